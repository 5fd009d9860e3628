"""What the layer levels share: a step's rows as arrays, the op under test, what is kept of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.inputs import LayerInputs
from ..cases.timeline import TimelineStep
from ..kernels.vllm_cpu import delta_prefill
from .decode_op import DecodeOp, PlainOp
from .layer_memory import LayerMemory
from .trace import Cursors, Event, IntArray, Trace, row_index


class Tokens(NamedTuple):
    """One token a row as the decode ops read it: q, k [R, H, K]; v [R, HV, V]; a, b [R, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class StepRows:
    """The rows of one step in batch order, [R] each; ``order`` is the row's place in the Case's step."""

    order: IntArray
    request: IntArray
    num_computed: IntArray
    num_tokens: IntArray
    slot: IntArray

    def select(self, mask: np.ndarray) -> StepRows:
        """The rows where ``mask`` holds."""
        parts = (self.order, self.request, self.num_computed, self.num_tokens, self.slot)
        return StepRows(*(part[mask] for part in parts))

    @property
    def position(self) -> IntArray:
        """Index of each row's last token."""
        return self.num_computed + self.num_tokens - 1


def step_rows(step: TimelineStep) -> StepRows:
    """A step of the timeline as arrays."""
    table = np.array(
        [(i, row.request, row.num_computed, row.num_tokens, row.slot) for i, row in enumerate(step.rows)], np.int64
    )
    return StepRows(*table.T)


def padded(values: IntArray, size: int, fill: int = 0) -> IntArray:
    """[size]: the values, then ``fill``: what a captured graph sees in its padded rows."""
    return np.concatenate([values, np.full(size - len(values), fill, np.int64)])


@dataclass
class LayerLeg:
    """One leg in progress: memory, inputs, and what its Trace will hold."""

    case: Case
    inputs: LayerInputs
    memory: LayerMemory
    op: DecodeOp = field(default_factory=PlainOp)
    entries: list[tuple[int, int, int, int]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    state_entries: list[tuple[int, int, int, int]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    told: list[tuple[int, int, int, int]] = field(default_factory=list)
    write_pos: list[int] = field(default_factory=list)
    is_flush: list[bool] = field(default_factory=list)
    # slot index of padded rows: the NULL slot, or -1 as some metadata builders have it
    padding_slot: int = 0
    events: list[Event] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"replay_steps": 0, "flushes": 0})

    def tokens(self, request: IntArray, position: IntArray, size: int) -> Tokens:
        """One token a row, [size, ...]; padded rows hold poison or another row's numbers."""
        where = torch.from_numpy(padded(request, size)), torch.from_numpy(padded(position, size))
        parts = []
        for source in (self.inputs.q, self.inputs.k, self.inputs.v, self.inputs.a, self.inputs.b):
            rows = source[where]
            if self.memory.poison == "nan":
                rows[len(request) :] = float("nan")
            parts.append(rows)
        return Tokens(*parts)

    def replay(self, step: int, rows: StepRows, write_pos: IntArray, is_flush: IntArray, size: int) -> None:
        """The op under test on ``size`` rows, padding included; its writes are audited."""
        before = self.memory.snapshot()
        memory, slots = self.memory, padded(rows.slot, size, self.padding_slot)
        out = self._fresh_output(size)
        self._keep_cursors(step, rows, write_pos, is_flush)
        self.op.replay(
            (*self.tokens(rows.request, rows.num_computed, size), self.inputs.A_log, self.inputs.dt_bias),
            memory,
            torch.from_numpy(slots),
            torch.from_numpy(padded(write_pos, size)).int(),
            torch.from_numpy(padded(is_flush, size)).bool(),
            out,
        )
        self.events += self.op.events(step)
        self.events += memory.audit(before, step, rows.slot, write_pos, is_flush)
        self._check_padding(step, rows, out)
        self._keep(step, rows, out)
        self._keep_states(step, rows, is_flush)
        memory.kill_ring(torch.from_numpy(rows.slot[is_flush.astype(bool)]))

    def packed(self, step: int, rows: StepRows, is_flush: IntArray) -> None:
        """The baseline op: the state is written at each step; kept where the ledger says flush."""
        out = self._fresh_output(len(rows.slot))
        self.op.packed(
            (*self.tokens(rows.request, rows.num_computed, len(rows.slot)), self.inputs.A_log, self.inputs.dt_bias),
            self.memory,
            torch.from_numpy(rows.slot),
            out,
        )
        self.events += self.op.events(step)
        self._keep(step, rows, out)
        self._keep_states(step, rows, is_flush)

    def prefill(self, step: int, rows: StepRows) -> None:
        """Chunks through the plugin's prefill, whose state stays in float32 until a chunk ends; keeps last outputs."""
        spans = [
            (request, slice(start, start + count))
            for request, start, count in zip(
                rows.request.tolist(), rows.num_computed.tolist(), rows.num_tokens.tolist(), strict=True
            )
        ]
        inputs = self.inputs
        outputs = delta_prefill(
            self._span(inputs.q, spans),
            self._span(inputs.k, spans),
            self._span(inputs.v, spans),
            self._span(inputs.a, spans),
            self._span(inputs.b, spans),
            inputs.A_log,
            inputs.dt_bias,
            self.memory.state,
            torch.from_numpy(rows.slot),
            query_lens=rows.num_tokens.tolist(),
            has_context=(rows.num_computed > 0).tolist(),
        )
        ends = torch.from_numpy(np.cumsum(rows.num_tokens) - 1)
        self._keep(step, rows, outputs[ends].to(inputs.v.dtype))

    @staticmethod
    def _span(source: Tensor, spans: list[tuple[int, slice]]) -> Tensor:
        """Tokens of several requests one after another."""
        return torch.cat([source[request, tokens] for request, tokens in spans])

    def keep_prefill(self, step: int, rows: StepRows, outputs: Tensor) -> None:
        """Outputs of a prefill that was not the subject's."""
        self._keep(step, rows, outputs)

    def trace(self) -> Trace:
        """All that was kept, rows in the order of the Case."""
        order = sorted(range(len(self.entries)), key=self.entries.__getitem__)
        outputs = torch.cat(self.outputs)[torch.tensor(order)] if order else torch.empty(0)
        state = self.memory.state
        return Trace(
            rows=row_index([self.entries[place] for place in order]),
            outputs=outputs,
            state_rows=row_index(self.state_entries),
            states=torch.cat(self.states) if self.states else state.new_empty((0, *state.shape[1:])),
            cursors=Cursors(
                row_index(self.told), np.array(self.write_pos, np.int64), np.array(self.is_flush, np.bool_)
            ),
            events=tuple(self.events),
            counts=dict(self.counts),
        )

    def _fresh_output(self, size: int) -> Tensor:
        geometry = self.case.geometry
        return self.inputs.v.new_full((size, geometry.num_v_heads, geometry.head_v_dim), float("nan"))

    def _check_padding(self, step: int, rows: StepRows, out: Tensor) -> None:
        for row in range(len(rows.slot), len(out)):
            if not bool((out[row] == 0).all()):
                self.events.append(Event("poison", step, row, f"padded row {row}: its output is not zero"))

    def _keep(self, step: int, rows: StepRows, outputs: Tensor) -> None:
        self.entries += self._entries(step, rows)
        self.outputs.append(outputs[: len(rows.slot)].clone())

    def _keep_states(self, step: int, rows: StepRows, is_flush: IntArray) -> None:
        flushed = rows.select(is_flush.astype(bool))
        self.state_entries += self._entries(step, flushed)
        self.states.append(self.memory.state[torch.from_numpy(flushed.slot)].clone())

    def _keep_cursors(self, step: int, rows: StepRows, write_pos: IntArray, is_flush: IntArray) -> None:
        self.told += self._entries(step, rows)
        self.write_pos += write_pos.tolist()
        self.is_flush += is_flush.astype(bool).tolist()
        self.counts["replay_steps"] += len(rows.slot)
        self.counts["flushes"] += int(is_flush.astype(bool).sum())

    def _entries(self, step: int, rows: StepRows) -> list[tuple[int, int, int, int]]:
        places = zip(rows.order.tolist(), rows.request.tolist(), rows.position.tolist(), strict=True)
        return [(step, order, request, position) for order, request, position in places]
