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
# offsets inside a slot's head are 32 bits wide; slots, heads and rows are multiplied in 64
MAX_TILE_EXTENT = 2**31
# what Triton says of CPU tensors where it finds no GPU at all, and where it finds one
NO_INTERPRETER = ("active drivers", "cannot be accessed from Triton (cpu tensor?)")


class LaunchError(ValueError):
    """Tensors that the kernels cannot address; the message starts with the argument's name."""


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched: ``block_v`` of the value axis per program, warps, pipeline stages."""

    block_v: int
    num_warps: int
    num_stages: int = 1


@dataclass(frozen=True)
class DeviceConfigs:
    """Both kernels' configurations on one device class."""

    replay: LaunchConfig
    packed: LaunchConfig


# by compute capability of CUDA devices, architecture of ROCm ones. chosen by bytes (replay reads each key entry once
# per tile, so a tile spans 64 of V) and by harness.compile_check: no spills at ring lengths 8 to 32, and registers that
# leave three programs of four warps or two of eight a multiprocessor. on sm_80 and sm_100 four warps need 196 to 218
# registers with a ring of 32, which leaves two of them; devices that are not listed get eight, which need the fewest
_FOUR_WARPS = DeviceConfigs(replay=LaunchConfig(64, 4), packed=LaunchConfig(32, 4))
_EIGHT_WARPS = DeviceConfigs(replay=LaunchConfig(64, 8), packed=LaunchConfig(32, 4))
LAUNCH_CONFIGS: dict[str, DeviceConfigs] = {
    "sm_80": _EIGHT_WARPS,
    "sm_90": _FOUR_WARPS,
    "sm_100": _EIGHT_WARPS,
    "sm_121": _FOUR_WARPS,
    "gfx942": _FOUR_WARPS,
    "default": _EIGHT_WARPS,
}


@cache
def device_class(device: torch.device) -> str:
    """Key of `LAUNCH_CONFIGS` for a device; "default" for one that is not listed and for an interpreter's CPU."""
    if device.type != "cuda":
        return "default"
    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    else:
        name = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return name if name in LAUNCH_CONFIGS else "default"


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of a kernel: ``arguments`` in the order of its parameters, then ``constants`` by name."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]
    constants: dict[str, int]
    config: LaunchConfig

    def run(self, device: torch.device) -> None:
        """Launch on the tensors' own device; no rows, no launch."""
        if self.grid[2] == 0:
            return
        options = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        with _on(device), _said_plainly(device):
            self.kernel[self.grid](*self.arguments, **self.constants, **options)


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
    token, layer = (q, k, v, a, b), (A_log, dt_bias)
    ring, cursor = (ring_d, ring_k, ring_g), (slots, write_pos, is_flush)
    target = _dense_last(out)
    config = LAUNCH_CONFIGS[device_class(v.device)].replay
    replay_launch(token, layer, state, ring, cursor, target, use_qk_l2norm, config).run(v.device)
    if target is not out:
        out.copy_(target)


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
    target = _dense_last(out)
    config = LAUNCH_CONFIGS[device_class(v.device)].packed
    packed_launch((q, k, v, a, b), (A_log, dt_bias), state, slots, target, use_qk_l2norm, config).run(v.device)
    if target is not out:
        out.copy_(target)


def replay_launch(
    token: tuple[torch.Tensor, ...],
    layer: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    ring: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cursor: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    use_qk_l2norm: bool,
    config: LaunchConfig,
) -> Launch:
    """Launch of the replay kernel: token (q, k, v, a, b), layer (A_log, dt_bias), ring (d, k, g).

    cursor is (slots, write_pos, is_flush). out must be contiguous in its last axis.
    Raises LaunchError where the kernel cannot address a tensor.
    """
    ring_d, ring_k, ring_g = ring
    _check_extents(state=state, ring_d=ring_d, ring_k=ring_k, ring_g=ring_g)
    slots, write_pos, is_flush = (x.contiguous() for x in cursor)
    if is_flush.dtype == torch.bool:
        # the same bytes: torch stores a bool in one
        is_flush = is_flush.view(torch.int8)
    token = tuple(_dense_last(x) for x in token)
    arguments = (
        *token, *(x.contiguous() for x in layer), state, ring_d, ring_k, ring_g, slots, write_pos, is_flush, out,
        *_token_strides(token, out), *state.stride(), *ring_d.stride(), *ring_k.stride(), *ring_g.stride(),
    )  # fmt: skip
    constants = {"BLOCK_L": power_of_two(ring_d.shape[2])}
    return _launch(decode_triton.replay_decode_kernel, arguments, constants, token, use_qk_l2norm, config)


def packed_launch(
    token: tuple[torch.Tensor, ...],
    layer: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    use_qk_l2norm: bool,
    config: LaunchConfig,
) -> Launch:
    """Launch of the packed kernel; arguments and errors as in `replay_launch`."""
    _check_extents(state=state)
    token = tuple(_dense_last(x) for x in token)
    arguments = (
        *token, *(x.contiguous() for x in layer), state, slots.contiguous(), out,
        *_token_strides(token, out), *state.stride(),
    )  # fmt: skip
    return _launch(decode_triton.packed_decode_kernel, arguments, {}, token, use_qk_l2norm, config)


def _launch(
    kernel: Any,
    arguments: tuple[object, ...],
    constants: dict[str, int],
    token: tuple[torch.Tensor, ...],
    use_qk_l2norm: bool,
    config: LaunchConfig,
) -> Launch:
    """What both launches share: the scale, sizes of axes and tiles, the grid over (tiles of V, HV, R)."""
    q, _, v, _, _ = token
    num_rows, num_k_heads, head_k_dim = q.shape
    _, num_v_heads, head_v_dim = v.shape
    if num_rows > MAX_ROWS:
        raise LaunchError(f"q: at most {MAX_ROWS} rows a call, got {num_rows}")
    block_v = min(config.block_v, power_of_two(head_v_dim))
    sizes = {
        "GROUP": num_v_heads // num_k_heads,
        "K": head_k_dim,
        "V": head_v_dim,
        "BLOCK_K": power_of_two(head_k_dim),
        "BLOCK_V": block_v,
        "USE_QK_L2NORM": use_qk_l2norm,
    }
    grid = (-(-head_v_dim // block_v), num_v_heads, num_rows)
    return Launch(kernel, grid, (*arguments, head_k_dim**-0.5), sizes | constants, config)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def _token_strides(token: tuple[torch.Tensor, ...], out: torch.Tensor) -> tuple[int, ...]:
    """Strides of all axes but the last, in the order of the kernels' parameters."""
    return tuple(stride for x in (*token, out) for stride in x.stride()[:-1])


def _dense_last(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, contiguous in its last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_extents(**tensors: torch.Tensor) -> None:
    """Refuse a tensor of which one head spans more elements than an offset can count."""
    for name, tensor in tensors.items():
        axes = zip(tensor.shape[2:], tensor.stride()[2:], strict=True)
        extent = sum((size - 1) * stride for size, stride in axes)
        if extent >= MAX_TILE_EXTENT:
            raise LaunchError(f"{name}: one head spans {extent} elements; at most {MAX_TILE_EXTENT - 1} fit")


def _on(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
