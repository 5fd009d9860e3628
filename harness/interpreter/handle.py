"""A value of the interpreter: numpy data whose leading axis is the programs of a group, with its Triton type.

The axis has length 1 where every program holds the same value, so uniform work is done once. bfloat16 is held as
float32 that was rounded to nearest even after each operation; its 16 bits exist in memory and in bit casts only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

Array = NDArray[Any]
# which region a pointer was made from: its number, one number a program, or ANYWHERE
Origin = int | NDArray[np.int64]
ANYWHERE = -1

_MEMORY: dict[str, np.dtype[Any]] = {
    "int1": np.dtype(np.bool_),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
_HELD = {**_MEMORY, "bf16": np.dtype(np.float32)}
_POINTER = np.dtype(np.uint64)


class Unsupported(Exception):
    """The interpreter does not do this; the launch falls back to Triton's own interpreter."""


@dataclass(slots=True)
class Handle:
    """What stands behind a ``tl.tensor``: data (P or 1, *block_shape) and its scalar type.

    Of a pointer also its origin, and whether all addresses are known to be multiples of its element's size.
    """

    data: Array
    dtype: Any
    origin: Origin = ANYWHERE
    aligned: bool = False

    def get_element_ty(self) -> Any:
        """The type a pointer points to, or the type itself."""
        dtype = self.dtype
        while hasattr(dtype, "element_ty"):
            dtype = dtype.element_ty
        return dtype

    def reshaped(self, data: Array) -> Handle:
        """The same elements in another shape."""
        return Handle(data, self.dtype, self.origin, self.aligned)

    def take(self, rows: NDArray[np.int64]) -> Handle:
        """The same value for the programs at ``rows``."""
        origin = self.origin if isinstance(self.origin, int) else self.origin[rows]
        return Handle(self.data[rows] if len(self.data) > 1 else self.data, self.dtype, origin, self.aligned)


def memory_dtype(dtype: Any) -> np.dtype[Any]:
    """How a value of this Triton type lies in memory."""
    return _numpy(dtype, _MEMORY)


def held_dtype(dtype: Any) -> np.dtype[Any]:
    """How a value of this Triton type is held: as in memory, bfloat16 as float32."""
    return _numpy(dtype, _HELD)


def _numpy(dtype: Any, table: dict[str, np.dtype[Any]]) -> np.dtype[Any]:
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return _POINTER
    try:
        return table[scalar.name]
    except KeyError:
        raise Unsupported(f"type {scalar}") from None


def is_bfloat16(dtype: Any) -> bool:
    """True for bfloat16 scalars and blocks of them."""
    return bool(dtype.scalar == tl.bfloat16)


def round_bfloat16(data: Array) -> Array:
    """float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = data.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    rounded &= np.uint32(0xFFFF0000)
    nan = np.isnan(data)
    if nan.any():
        rounded[nan] = (bits[nan] | np.uint32(0x00400000)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def to_memory(data: Array, dtype: Any) -> Array:
    """Held data as it lies in memory."""
    if is_bfloat16(dtype):
        return (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return data


def from_memory(data: Array, dtype: Any) -> Array:
    """Data as it lies in memory, as it is held."""
    if is_bfloat16(dtype):
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data
