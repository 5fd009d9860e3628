"""The decode ops of one backend, as the layer levels run them, and what a backend sees that outputs do not show."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from ..kernels.decode import gdn_packed_decode, gdn_replay_decode
from .layer_memory import LayerMemory
from .trace import Event

if TYPE_CHECKING:
    from .interpreter import Access, Session

Token = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class DecodeOp(Protocol):
    """Decodes one token a row on a layer's memory. ``token``: q, k, v, a, b, A_log, dt_bias; slots and out [R, ...]."""

    def replay(
        self, token: Token, memory: LayerMemory, slots: Tensor, write_pos: Tensor, is_flush: Tensor, out: Tensor
    ) -> None:
        """gdn_replay_decode."""
        ...

    def packed(self, token: Token, memory: LayerMemory, slots: Tensor, out: Tensor) -> None:
        """gdn_packed_decode."""
        ...

    def events(self, step: int) -> list[Event]:
        """What the backend saw go wrong since it was last asked."""
        ...


class PlainOp:
    """A backend of kernels/decode.py, run as it is."""

    def __init__(self, backend: Literal["torch", "triton"] = "torch") -> None:
        self.backend: Literal["torch", "triton"] = backend

    def replay(
        self, token: Token, memory: LayerMemory, slots: Tensor, write_pos: Tensor, is_flush: Tensor, out: Tensor
    ) -> None:
        """gdn_replay_decode."""
        pages = (memory.state, memory.ring_d, memory.ring_k, memory.ring_g)
        gdn_replay_decode(*token, *pages, slots, write_pos, is_flush, out=out, backend=self.backend)

    def packed(self, token: Token, memory: LayerMemory, slots: Tensor, out: Tensor) -> None:
        """gdn_packed_decode."""
        gdn_packed_decode(*token, memory.state, slots, out=out, backend=self.backend)

    def events(self, step: int) -> list[Event]:
        """None: torch tells nothing beside its outputs."""
        return []


class InterpretedOp(PlainOp):
    """The Triton kernels under our interpreter: loads of poison and accesses outside are seen, with their line."""

    def __init__(self, session: Session) -> None:
        super().__init__("triton")
        self.session = session

    def events(self, step: int) -> list[Event]:
        """Bad accesses of the launches since the last call. The kernels' third grid axis is the row."""
        found = [Event(_symptom(bad), step, bad.program[2], _told(bad)) for bad in self.session.findings]
        self.session.findings.clear()
        return found


class CudaOp(PlainOp):
    """The Triton kernels on a GPU: pages go there and come back whole, so that every byte is audited as ever."""

    def __init__(self) -> None:
        super().__init__("triton")

    def replay(
        self, token: Token, memory: LayerMemory, slots: Tensor, write_pos: Tensor, is_flush: Tensor, out: Tensor
    ) -> None:
        """gdn_replay_decode."""
        there, written = memory.to("cuda"), out.cuda()
        rows = (slots.cuda(), write_pos.cuda(), is_flush.cuda())
        super().replay(_cuda(token), there, *rows, written)
        memory.pages.copy_(there.pages)
        out.copy_(written)

    def packed(self, token: Token, memory: LayerMemory, slots: Tensor, out: Tensor) -> None:
        """gdn_packed_decode."""
        there, written = memory.to("cuda"), out.cuda()
        super().packed(_cuda(token), there, slots.cuda(), written)
        memory.pages.copy_(there.pages)
        out.copy_(written)


@contextmanager
def decode_op(target: str) -> Iterator[DecodeOp]:
    """The op of a kernel-level target: torch, triton (interpreted) or triton_gpu."""
    if target == "triton":
        from .interpreter import interpreted

        # whatever cannot be interpreted must not pass unchecked
        with interpreted(bounds="collect", poison="collect", traffic="off", unsupported="raise") as session:
            yield InterpretedOp(session)
    else:
        yield CudaOp() if target == "triton_gpu" else PlainOp()


def why_not(target: str) -> str | None:
    """None where this machine can run the target, else one line that says what is missing."""
    if target != "torch" and importlib.util.find_spec("triton") is None:
        return f'target {target}: triton is not installed; pip install "replay-parity[cpu]"'
    if target == "triton_gpu" and not torch.cuda.is_available():
        return "target triton_gpu: there is no CUDA device here; use triton, which interprets the kernels"
    return None


def _cuda(token: Token) -> Token:
    q, k, v, a, b, A_log, dt_bias = (part.cuda() for part in token)
    return q, k, v, a, b, A_log, dt_bias


def _symptom(bad: Access) -> str:
    return "poison" if bad.kind == "poison" else "out_of_bounds"


def _told(bad: Access) -> str:
    """Without the directory, which differs from machine to machine."""
    what = {
        "poison": "reads poison from",
        "out_of_bounds_load": "reads outside",
        "out_of_bounds_store": "writes outside",
    }
    place = f"{Path(bad.file).name}:{bad.line}, program {bad.program}, lane {bad.lane}"
    return f"{bad.kernel} {what[bad.kind]} {bad.region} ({place})"
