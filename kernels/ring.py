"""Shapes, dtypes and bytes of one layer's checkpoint state and ring."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RING_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# the gate is summed over up to buffer_len entries and exponentiated: it is never stored in 16 bits
GATE_DTYPE = torch.float32


class RingSpecError(ValueError):
    """A field of a RingSpec that cannot be; the message names the field."""


@dataclass(frozen=True)
class RingSpec:
    """State and ring of one GDN layer, per slot.

    ``num_k_heads`` H, ``num_v_heads`` HV, ``head_k_dim`` K, ``head_v_dim`` V, ``buffer_len`` L ring entries;
    ``ring_dtype`` is the dtype of the stored d and k, the gate g is always float32.
    Raises RingSpecError, which names the field, where no such layer can exist.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    buffer_len: int
    ring_dtype: torch.dtype
    state_dtype: torch.dtype

    def __post_init__(self) -> None:
        """Refuse what cannot be laid out."""
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "buffer_len"):
            _check_positive(name, getattr(self, name))
        if self.num_v_heads % self.num_k_heads:
            raise RingSpecError(
                f"num_v_heads: {self.num_v_heads} is no multiple of num_k_heads {self.num_k_heads}; "
                "every key head serves the same number of value heads"
            )
        _check_dtype("ring_dtype", self.ring_dtype, RING_DTYPES)
        _check_dtype("state_dtype", self.state_dtype, STATE_DTYPES)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Checkpoint state of a slot, [HV, V, K]."""
        return (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    @property
    def d_shape(self) -> tuple[int, int, int]:
        """Corrected values in the ring of a slot, [HV, L, V]."""
        return (self.num_v_heads, self.buffer_len, self.head_v_dim)

    @property
    def k_shape(self) -> tuple[int, int, int]:
        """Keys in the ring of a slot, [H, L, K]."""
        return (self.num_k_heads, self.buffer_len, self.head_k_dim)

    @property
    def g_shape(self) -> tuple[int, int]:
        """Log decays in the ring of a slot, [HV, L]."""
        return (self.num_v_heads, self.buffer_len)

    @property
    def g_dtype(self) -> torch.dtype:
        """Dtype of the stored log decay: float32, whatever ring_dtype is."""
        return GATE_DTYPE

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot's checkpoint state."""
        return _elements(self.state_shape) * self.state_dtype.itemsize

    @property
    def d_bytes(self) -> int:
        """Bytes of a slot's ring of corrected values."""
        return _elements(self.d_shape) * self.ring_dtype.itemsize

    @property
    def k_bytes(self) -> int:
        """Bytes of a slot's ring of keys."""
        return _elements(self.k_shape) * self.ring_dtype.itemsize

    @property
    def g_bytes(self) -> int:
        """Bytes of a slot's ring of log decays."""
        return _elements(self.g_shape) * self.g_dtype.itemsize

    @property
    def ring_bytes(self) -> int:
        """Bytes of a slot's whole ring: d, k and g."""
        return self.d_bytes + self.k_bytes + self.g_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: state and ring, without the padding of a page."""
        return self.state_bytes + self.ring_bytes

    @property
    def ring_fraction(self) -> float:
        """Ring bytes over state bytes: the memory that replay costs."""
        return self.ring_bytes / self.state_bytes


def _check_positive(name: str, value: object) -> None:
    """Refuse a count that is no integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RingSpecError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise RingSpecError(f"{name}: must be at least 1, got {value}")


def _check_dtype(name: str, value: object, allowed: tuple[torch.dtype, ...]) -> None:
    """Refuse a dtype outside the allowed ones."""
    if value not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise RingSpecError(f"{name}: must be one of {names} (a torch dtype), got {value!r}")


def _elements(shape: tuple[int, ...]) -> int:
    """Product of a shape."""
    count = 1
    for size in shape:
        count *= size
    return count
