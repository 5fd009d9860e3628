"""How this tests the ring's layout, in plain words.

The bytes are held against published figures for Qwen3.5 (K = V = 128, H = 16, ring of 16 entries in 16 bits, float32
state), and tensors of the stated shapes are allocated and asked for their size. Every field is then made wrong once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replay_parity.kernels.ring import RingSpec, RingSpecError

GOOD: dict[str, Any] = {
    "num_k_heads": 2,
    "num_v_heads": 6,
    "head_k_dim": 16,
    "head_v_dim": 8,
    "buffer_len": 5,
    "ring_dtype": torch.bfloat16,
    "state_dtype": torch.float32,
}


def qwen(num_v_heads: int, ring_dtype: torch.dtype = torch.float16) -> RingSpec:
    return RingSpec(16, num_v_heads, 128, 128, 16, ring_dtype, torch.float32)


@pytest.mark.parametrize("ring_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_v_heads", "state_kib", "ring_kib", "percent"),
    [(16, 1024, 129, 12.6), (32, 2048, 194, 9.5), (48, 3072, 259, 8.4), (64, 4096, 324, 7.9)],
)
def test_published_bytes(
    num_v_heads: int, state_kib: int, ring_kib: int, percent: float, ring_dtype: torch.dtype
) -> None:
    spec = qwen(num_v_heads, ring_dtype)
    assert spec.state_bytes == state_kib * 1024
    assert spec.ring_bytes == ring_kib * 1024
    assert round(100 * spec.ring_fraction, 1) == percent
    assert spec.slot_bytes == (state_kib + ring_kib) * 1024


def test_shapes() -> None:
    spec = RingSpec(**GOOD)
    assert spec.state_shape == (6, 8, 16)
    assert spec.d_shape == (6, 5, 8)
    assert spec.k_shape == (2, 5, 16)
    assert spec.g_shape == (6, 5)


@pytest.mark.parametrize("ring_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_are_those_of_tensors(ring_dtype: torch.dtype) -> None:
    spec = RingSpec(**{**GOOD, "ring_dtype": ring_dtype})
    assert spec.g_dtype == torch.float32
    assert torch.empty(spec.state_shape, dtype=spec.state_dtype).nbytes == spec.state_bytes
    assert torch.empty(spec.d_shape, dtype=spec.ring_dtype).nbytes == spec.d_bytes
    assert torch.empty(spec.k_shape, dtype=spec.ring_dtype).nbytes == spec.k_bytes
    assert torch.empty(spec.g_shape, dtype=spec.g_dtype).nbytes == spec.g_bytes


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        RingSpec(**GOOD).buffer_len = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_k_heads", 0),
        ("num_v_heads", -6),
        ("num_v_heads", 5),
        ("head_k_dim", 16.0),
        ("head_v_dim", True),
        ("buffer_len", 0),
        ("buffer_len", "16"),
        ("ring_dtype", torch.float64),
        ("ring_dtype", torch.int8),
        ("ring_dtype", "float16"),
        ("state_dtype", torch.float64),
        ("state_dtype", None),
    ],
)
def test_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(RingSpecError, match=f"^{field}: ") as caught:
        RingSpec(**{**GOOD, field: value})
    assert "\n" not in str(caught.value)
