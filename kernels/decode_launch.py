"""Launching the Triton kernels of GDN decode: tile sizes and warps by device class, strides, grid.

Under Triton's interpreter tensors may be on a CPU; otherwise they must be where Triton compiles for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from . import decode_triton

# rows are the third axis of the grid
MAX_ROWS = 65535
# offsets inside a slot are 32 bits wide, slots and heads are counted in 64
MAX_TILE_EXTENT = 2**31
# what Triton says of CPU tensors where it finds no GPU at all, and where it finds one
NO_INTERPRETER = ("active drivers", "cannot be accessed from Triton (cpu tensor?)")


class LaunchError(ValueError):
    """Tensors that the kernels cannot address; the message starts with the argument's name."""


@dataclass(frozen=True)
class LaunchConfig:
    """One way to launch a kernel: ``block_v`` of the value axis per program, warps, pipeline stages."""

    block_v: int
    num_warps: int
    num_stages: int


# by device class: compute capability of CUDA devices, architecture of ROCm ones.
LAUNCH_CONFIGS: dict[str, LaunchConfig] = {
    "sm_80": LaunchConfig(block_v=64, num_warps=4, num_stages=1),
    "sm_90": LaunchConfig(block_v=64, num_warps=4, num_stages=1),
    "sm_100": LaunchConfig(block_v=64, num_warps=4, num_stages=1),
    "sm_121": LaunchConfig(block_v=64, num_warps=4, num_stages=1),
    "gfx942": LaunchConfig(block_v=64, num_warps=4, num_stages=1),
    "default": LaunchConfig(block_v=64, num_warps=4, num_stages=1),
}


@cache
def device_class(device: torch.device) -> str:
    """Key of `LAUNCH_CONFIGS` for a device; "default" for one that is not listed and for the interpreter's CPU."""
    if device.type != "cuda":
        return "default"
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    else:
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return name if name in LAUNCH_CONFIGS else "default"


def tile_constants(
    num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int, config: LaunchConfig
) -> dict[str, int]:
    """Compile-time constants that both kernels take, but for USE_QK_L2NORM; a tile never exceeds the value axis."""
    return {
        "GROUP": num_v_heads // num_k_heads,
        "K": head_k_dim,
        "V": head_v_dim,
        "BLOCK_K": power_of_two(head_k_dim),
        "BLOCK_V": min(config.block_v, power_of_two(head_v_dim)),
    }


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def replay_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring_d: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    slots: torch.Tensor,
    write_pos: torch.Tensor,
    is_flush: torch.Tensor,
    out: torch.Tensor,
    use_qk_l2norm: bool,
) -> None:
    """Decode one token per row from checkpoint and ring; shapes as in `decode.gdn_replay_decode`, unchecked here."""
    _check_extents(state=state, ring_d=ring_d, ring_k=ring_k)
    config = LAUNCH_CONFIGS[device_class(v.device)]
    token = _Token(q, k, v, a, b, out)
    _launch(
        decode_triton.replay_decode_kernel, v, config,
        (*token.tensors, A_log.contiguous(), dt_bias.contiguous(), state, ring_d, ring_k, ring_g,
         slots.contiguous(), write_pos.contiguous(), _bytes(is_flush.contiguous()), token.out,
         *token.strides, *state.stride(), *ring_d.stride(), *ring_k.stride(), *ring_g.stride(), q.shape[2] ** -0.5),
        tile_constants(q.shape[1], v.shape[1], q.shape[2], v.shape[2], config)
        | {"BLOCK_L": power_of_two(ring_d.shape[2]), "USE_QK_L2NORM": use_qk_l2norm},
    )  # fmt: skip
    token.finish(out)


def packed_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    use_qk_l2norm: bool,
) -> None:
    """Decode one token per row from a state written each step; shapes as in `decode.gdn_packed_decode`."""
    _check_extents(state=state)
    config = LAUNCH_CONFIGS[device_class(v.device)]
    token = _Token(q, k, v, a, b, out)
    _launch(
        decode_triton.packed_decode_kernel, v, config,
        (*token.tensors, A_log.contiguous(), dt_bias.contiguous(), state, slots.contiguous(), token.out,
         *token.strides, *state.stride(), q.shape[2] ** -0.5),
        tile_constants(q.shape[1], v.shape[1], q.shape[2], v.shape[2], config) | {"USE_QK_L2NORM": use_qk_l2norm},
    )  # fmt: skip
    token.finish(out)


class _Token:
    """Activations with a contiguous last axis, as the kernels take them, and their other strides."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.tensors = tuple(_dense_last(x) for x in (q, k, v, a, b))
        self.out = _dense_last(out)
        q, k, v, a, b = self.tensors
        rows_and_heads = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], a.stride(0), b.stride(0))
        self.strides = (*rows_and_heads, *self.out.stride()[:2])

    def finish(self, out: torch.Tensor) -> None:
        """Bring the output to the caller's tensor where the kernel could not write it there."""
        if self.out is not out:
            out.copy_(self.out)


def _dense_last(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes(flags: torch.Tensor) -> torch.Tensor:
    """The same flags as int8: torch stores a bool in a byte."""
    return flags.view(torch.int8) if flags.dtype == torch.bool else flags


def _check_extents(**tensors: torch.Tensor) -> None:
    """Refuse a tensor whose tile, the last two axes, spans more elements than an offset can count."""
    for name, tensor in tensors.items():
        rows, columns = tensor.shape[2:]
        extent = (rows - 1) * tensor.stride(2) + (columns - 1) * tensor.stride(3)
        if extent >= MAX_TILE_EXTENT:
            raise LaunchError(f"{name}: its last two axes span {extent} elements; at most {MAX_TILE_EXTENT - 1} fit")


def _launch(
    kernel: Any, v: torch.Tensor, config: LaunchConfig, arguments: tuple[object, ...], constants: dict[str, Any]
) -> None:
    """Launch over (tiles of V, HV, R) on the tensors' own device; no rows, no launch."""
    num_rows, num_v_heads, head_v_dim = v.shape
    if num_rows > MAX_ROWS:
        raise LaunchError(f"q: at most {MAX_ROWS} rows a call, got {num_rows}")
    if num_rows == 0:
        return
    grid = (-(-head_v_dim // constants["BLOCK_V"]), num_v_heads, num_rows)
    with _on(v.device), _said_plainly(v.device):
        kernel[grid](*arguments, **constants, num_warps=config.num_warps, num_stages=config.num_stages)


@contextmanager
def _said_plainly(device: torch.device) -> Iterator[None]:
    """Turn Triton's complaints about CPU tensors, made before anything runs, into one line that says what to do."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if device.type == "cpu" and any(words in str(error) for words in NO_INTERPRETER):
            raise NotImplementedError(
                'backend: "triton" takes CPU tensors under a Triton interpreter only; set TRITON_INTERPRET=1 before '
                'triton is imported, or pass backend="torch"'
            ) from None
        raise


def _on(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
