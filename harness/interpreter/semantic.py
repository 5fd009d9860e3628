"""Triton's semantic with shortcuts for what kernels do most: the same types, found once per pair of operands.

Triton broadcasts every operand to the shape of the result before it computes; numpy does that by itself.
"""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

from .builder import Builder
from .handle import Array
from .types import Sizes, sizes_of

# operator -> builder's methods for floats and for integers
_ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("create_fadd", "create_add"),
    ast.Sub: ("create_fsub", "create_sub"),
    ast.Mult: ("create_fmul", "create_mul"),
}
_COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("create_fcmpOLT", "create_icmpSLT"),
    ast.LtE: ("create_fcmpOLE", "create_icmpSLE"),
    ast.Gt: ("create_fcmpOGT", "create_icmpSGT"),
    ast.GtE: ("create_fcmpOGE", "create_icmpSGE"),
    ast.Eq: ("create_fcmpOEQ", "create_icmpEQ"),
    ast.NotEq: ("create_fcmpUNE", "create_icmpNE"),
}
_BITWISE: dict[type[ast.AST], tuple[str, str]] = {
    ast.BitAnd: ("", "create_and"),
    ast.BitOr: ("", "create_or"),
    ast.BitXor: ("", "create_xor"),
}
_METHODS = {**_ARITHMETIC, **_COMPARISONS, **_BITWISE}


class Semantic(TritonSemantic):  # type: ignore[misc]
    """The same results as its base."""

    builder: Builder

    def elementwise(self, kind: type[ast.AST], lhs: Any, rhs: Any) -> Any:
        """lhs op rhs where that is simple, else None; one of them may be a plain number."""
        names = _METHODS.get(kind)
        if names is None:
            return None
        left_plain, right_plain = not isinstance(lhs, tl.tensor), not isinstance(rhs, tl.tensor)
        left_type = self.to_tensor_type(lhs) if left_plain else lhs.dtype
        right_type = self.to_tensor_type(rhs) if right_plain else rhs.dtype
        if left_type.is_ptr() or right_type.is_ptr():
            return self._moved(lhs, rhs) if kind is ast.Add else None
        common = self._common(left_type, left_plain, right_type, right_plain)
        if kind in _BITWISE and (left_type is not right_type or not common.is_int()):
            return None
        lhs, rhs = self._cast_to_computation_type(lhs, common), self._cast_to_computation_type(rhs, common)
        sizes = _broadcast(sizes_of(lhs.type), sizes_of(rhs.type))
        left, right = (self._ranked(x, len(sizes)) for x in (lhs, rhs))
        handle = getattr(self.builder, names[not common.is_floating()])(left, right)
        return tl.tensor(handle, _type(tl.int1 if kind in _COMPARISONS else common, sizes))

    def _moved(self, lhs: Any, rhs: Any) -> Any:
        """A pointer plus signed integers."""
        if isinstance(lhs, tl.tensor) and lhs.dtype.is_int_signed():
            lhs, rhs = rhs, lhs
        if not isinstance(lhs, tl.tensor) or not isinstance(rhs, tl.tensor) or not rhs.dtype.is_int_signed():
            return None
        sizes = _broadcast(sizes_of(lhs.type), sizes_of(rhs.type))
        handle = self.builder.create_addptr(self._ranked(lhs, len(sizes)), self._ranked(rhs, len(sizes)))
        return tl.tensor(handle, _type(lhs.dtype, sizes))

    def indexed(self, value: Any, index: Any) -> Any:
        """value[index] for ``:`` and None, else None."""
        places = index if isinstance(index, tuple) else (index,)
        if not all(place is None or place == slice(None) for place in places):
            return None
        if len(places) - places.count(None) != len(value.shape):
            return None
        handle = value.handle
        data: Array = handle.data[(slice(None), *places)]
        return tl.tensor(handle.reshaped(data), _type(value.dtype, data.shape[1:]))

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        if sizes_of(lhs.type) == sizes_of(rhs.type):
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.dtype is dst_ty or input.dtype == dst_ty.scalar:
            return input
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def _common(self, left: Any, left_plain: bool, right: Any, right_plain: bool) -> Any:
        """The type in which two operands meet."""
        if left is right:
            return left
        key = (left.name, left_plain, right.name, right_plain)
        common = _commons.get(key)
        if common is None:
            common = _commons[key] = self.computation_type_impl(left, left_plain, right, right_plain, False)
        return common

    def _ranked(self, value: Any, rank: int) -> Any:
        """A handle whose data broadcasts against blocks of ``rank`` axes."""
        data = value.handle.data
        missing = rank + 1 - data.ndim
        if not missing:
            return value.handle
        return value.handle.reshaped(data.reshape((len(data),) + (1,) * missing + data.shape[1:]))


_commons: dict[tuple[str, bool, str, bool], Any] = {}


@cache
def _broadcast(left: Sizes, right: Sizes) -> Sizes:
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        raise ValueError(f"blocks of shapes {left} and {right} do not fit together") from None


_types: dict[tuple[str, Sizes], Any] = {}


def _type(scalar: Any, sizes: Sizes) -> Any:
    """The type of a block of a scalar type, or the scalar type itself."""
    if not sizes:
        return scalar
    key = (scalar.name, sizes)
    made = _types.get(key)
    if made is None:
        made = _types[key] = tl.block_type(scalar, list(sizes))
    return made
