"""Decode operators of one Gated DeltaNet layer: argument checks, then the backend: Triton on CUDA, torch on a CPU.

`gdn_packed_decode` reads and writes the state each step. `gdn_replay_decode` (ReplaySSM for GDN: vLLM #48792, #62004)
reads a checkpoint state and a ring of pending tokens, appends to the ring, and writes the state on a flush only.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Literal

import torch

from . import decode_torch

Backend = Literal["auto", "torch", "triton"]

ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
FLAG_DTYPES = (torch.bool, torch.int8, torch.uint8)


class DecodeArgumentError(ValueError):
    """An argument that no decode step can use; the message starts with its name."""


def gdn_replay_decode(
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
    *,
    out: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Decode one token per row from checkpoint and ring; returns out [R, HV, V].

    q, k [R, H, K]; v [R, HV, V]; a, b [R, HV]: activation dtype (float32, float16 or bfloat16).
    A_log, dt_bias [HV]: any floating dtype, used in float32.
    state [N, HV, V, K]; ring_d [N, HV, L, V], ring_k [N, H, L, K]; ring_g [N, HV, L] float32: pages of N slots,
    of any strides, updated in place.
    slots [R] int32 or int64: live rows name distinct positive slots; 0 (NULL block) and below mark padding, whose
    rows change no byte and get zeros. write_pos [R] int, is_flush [R] bool or int8: see `cursor.decode_cursor`;
    values are not checked, since that would read device memory.
    out [R, HV, V] of v's dtype, made where None. use_qk_l2norm: q and k come as they are, not yet normalised.
    backend "auto" is "triton" for CUDA tensors and "torch" for CPU ones. "torch" runs on any device; "triton" takes
    CPU tensors under a Triton interpreter only (TRITON_INTERPRET=1 before triton is imported, or the harness's).

    Raises DecodeArgumentError naming the argument, NotImplementedError where the backend cannot run.
    """
    sizes = _check_token(q, k, v, a, b, A_log, dt_bias)
    _check_state(state, sizes)
    _check_ring(ring_d, ring_k, ring_g, state, sizes)
    _check_index("slots", slots, sizes["R"], INDEX_DTYPES)
    _check_index("write_pos", write_pos, sizes["R"], INDEX_DTYPES)
    _check_index("is_flush", is_flush, sizes["R"], FLAG_DTYPES)
    out = _check_out(out, v)
    _check_devices(
        v, q=q, k=k, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state, ring_d=ring_d, ring_k=ring_k,
        ring_g=ring_g, slots=slots, write_pos=write_pos, is_flush=is_flush, out=out,
    )  # fmt: skip
    formulation = _formulation(backend, v.device)
    formulation.replay_decode(
        q, k, v, a, b, A_log, dt_bias, state, ring_d, ring_k, ring_g, slots, write_pos, is_flush, out, use_qk_l2norm
    )
    return out


def gdn_packed_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Decode one token per row, reading and writing the state each step; returns out [R, HV, V].

    Arguments and errors as in `gdn_replay_decode`; padding rows change no byte and get zeros here too.
    """
    sizes = _check_token(q, k, v, a, b, A_log, dt_bias)
    _check_state(state, sizes)
    _check_index("slots", slots, sizes["R"], INDEX_DTYPES)
    out = _check_out(out, v)
    _check_devices(v, q=q, k=k, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state, slots=slots, out=out)
    formulation = _formulation(backend, v.device)
    formulation.packed_decode(q, k, v, a, b, A_log, dt_bias, state, slots, out, use_qk_l2norm)
    return out


def _check_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
) -> dict[str, int]:
    """Check the current token and name the sizes that all else must fit: R, H, HV, K, V."""
    if q.dim() != 3:
        raise DecodeArgumentError(f"q: expected shape [R, H, K], got {list(q.shape)}")
    if v.dim() != 3:
        raise DecodeArgumentError(f"v: expected shape [R, HV, V], got {list(v.shape)}")
    sizes = {"R": q.shape[0], "H": q.shape[1], "K": q.shape[2], "HV": v.shape[1], "V": v.shape[2]}
    for name in ("H", "K", "HV", "V"):
        if sizes[name] == 0:
            raise DecodeArgumentError(f"{'q' if name in ('H', 'K') else 'v'}: {name} must be at least 1, got 0")
    if sizes["HV"] % sizes["H"]:
        raise DecodeArgumentError(f"v: HV {sizes['HV']} is no multiple of q's H {sizes['H']}")
    for name, tensor, axes in (
        ("k", k, ("R", "H", "K")), ("v", v, ("R", "HV", "V")), ("a", a, ("R", "HV")), ("b", b, ("R", "HV")),
        ("A_log", A_log, ("HV",)), ("dt_bias", dt_bias, ("HV",)),
    ):  # fmt: skip
        _check_shape(name, tensor, axes, sizes)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
        _check_dtype(name, tensor, ACTIVATION_DTYPES)
    return sizes


def _check_state(state: torch.Tensor, sizes: Mapping[str, int]) -> None:
    """Check the paged checkpoint state."""
    if state.dim() != 4 or state.shape[0] == 0:
        raise DecodeArgumentError(f"state: expected shape [N, HV, V, K] with N at least 1, got {list(state.shape)}")
    _check_shape("state", state, ("N", "HV", "V", "K"), {**sizes, "N": state.shape[0]})
    _check_dtype("state", state, ACTIVATION_DTYPES)


def _check_ring(
    ring_d: torch.Tensor, ring_k: torch.Tensor, ring_g: torch.Tensor, state: torch.Tensor, sizes: Mapping[str, int]
) -> None:
    """Check the paged ring against the state's slots."""
    if ring_d.dim() != 4 or ring_d.shape[2] == 0:
        raise DecodeArgumentError(f"ring_d: expected shape [N, HV, L, V] with L at least 1, got {list(ring_d.shape)}")
    full = {**sizes, "N": state.shape[0], "L": ring_d.shape[2]}
    _check_shape("ring_d", ring_d, ("N", "HV", "L", "V"), full)
    _check_shape("ring_k", ring_k, ("N", "H", "L", "K"), full)
    _check_shape("ring_g", ring_g, ("N", "HV", "L"), full)
    _check_dtype("ring_d", ring_d, ACTIVATION_DTYPES)
    _check_dtype("ring_k", ring_k, (ring_d.dtype,))
    _check_dtype("ring_g", ring_g, (torch.float32,))


def _check_index(name: str, tensor: torch.Tensor, num_rows: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check one integer or flag per row."""
    _check_shape(name, tensor, ("R",), {"R": num_rows})
    _check_dtype(name, tensor, dtypes)


def _check_out(out: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor:
    """Check the caller's output, or make one."""
    if out is None:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _check_shape("out", out, ("R", "HV", "V"), dict(zip(("R", "HV", "V"), v.shape, strict=True)))
    _check_dtype("out", out, (v.dtype,))
    return out


def _check_shape(name: str, tensor: torch.Tensor, axes: tuple[str, ...], sizes: Mapping[str, int]) -> None:
    """Refuse a tensor whose shape is not the named axes."""
    expected = tuple(sizes[axis] for axis in axes)
    if tensor.shape != expected:
        raise DecodeArgumentError(
            f"{name}: expected shape [{', '.join(axes)}] = {list(expected)}, got {list(tensor.shape)}"
        )


def _check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse a dtype outside the allowed ones."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise DecodeArgumentError(f"{name}: expected dtype {names}, got {str(tensor.dtype).removeprefix('torch.')}")


def _check_devices(v: torch.Tensor, **others: torch.Tensor) -> None:
    """Refuse tensors on several devices."""
    for name, tensor in others.items():
        if tensor.device != v.device:
            raise DecodeArgumentError(f"{name}: is on {tensor.device}, but v is on {v.device}")


def _formulation(backend: str, device: torch.device) -> ModuleType:
    """The module whose replay_decode and packed_decode run; refuses a backend that is unknown or cannot run."""
    if backend not in ("auto", "torch", "triton"):
        raise DecodeArgumentError(f'backend: expected "auto", "torch" or "triton", got {backend!r}')
    if backend == "torch" or (backend == "auto" and device.type == "cpu"):
        return decode_torch
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f'no GDN decode backend for {device.type} tensors yet; pass backend="torch" for the torch formulation'
        )
    try:
        # only here: the torch formulation needs no triton
        from . import decode_launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise NotImplementedError(
            'backend: triton is not installed; install it, or pass backend="torch" for the torch formulation'
        ) from None
    return decode_launch
