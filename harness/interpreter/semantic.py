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
from .handle import Array, Handle
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
_NUMBERS = frozenset(("int1", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))) | {
    "fp16",
    "bf16",
    "fp32",
    "fp64",
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
        if not isinstance(lhs, tl.tensor):
            lhs = self._constant(lhs, rhs.dtype)
        elif not isinstance(rhs, tl.tensor):
            rhs = self._constant(rhs, lhs.dtype)
        if lhs is None or rhs is None:
            return None
        if lhs.dtype.is_ptr() or rhs.dtype.is_ptr():
            return self._moved(lhs, rhs) if kind is ast.Add else None
        common = self._common(lhs.dtype, rhs.dtype)
        if kind in _BITWISE and (lhs.dtype is not rhs.dtype or not common.is_int()):
            return None
        lhs, rhs = self.cast(lhs, common), self.cast(rhs, common)
        left_sizes, right_sizes = sizes_of(lhs.type), sizes_of(rhs.type)
        sizes = _broadcast(left_sizes, right_sizes)
        left, right = self._ranked(lhs, len(sizes)), self._ranked(rhs, len(sizes))
        if not left_sizes and right_sizes:
            right = _in_order(right)
        elif not right_sizes and left_sizes:
            left = _in_order(left)
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
        source, target = input.dtype, dst_ty.scalar
        if source is target or source == target:
            return input
        if fp_downcast_rounding is not None or source.name not in _NUMBERS or target.name not in _NUMBERS:
            return super().cast(input, dst_ty, fp_downcast_rounding)
        if target.is_bool():
            return super().cast(input, dst_ty)
        return tl.tensor(self.builder.create_cast(input.handle, target), _type(target, sizes_of(input.type)))

    def load(self, ptr: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: bool) -> Any:
        given = [x for x in (ptr, mask, other) if x is not None]
        if not self._simple(given) or (mask is None and other is not None):
            return super().load(ptr, mask, other, cache_policy, is_volatile)
        sizes = sizes_of(ptr.type)
        for x in given[1:]:
            sizes = _broadcast(sizes, sizes_of(x.type))
        if sizes != sizes_of(ptr.type):
            ptr = self.broadcast_impl_shape(ptr, list(sizes))
        element = ptr.dtype.element_ty
        masks = None if mask is None else self._ranked(mask, len(sizes)).data
        others = None if other is None else self._ranked(self.cast(other, element), len(sizes))
        return tl.tensor(self.builder.load(ptr.handle, masks, others), _type(element, sizes))

    def store(self, ptr: Any, val: Any, mask: Any, cache_policy: Any) -> Any:
        given = [x for x in (ptr, val, mask) if x is not None]
        sizes = sizes_of(ptr.type)
        if (
            not self._simple(given)
            or ptr.dtype.is_const()
            or any(_broadcast(sizes, sizes_of(x.type)) != sizes for x in given)
        ):
            return super().store(ptr, val, mask, cache_policy)
        masks = None if mask is None else self._ranked(mask, len(sizes)).data
        self.builder.store(ptr.handle, self._ranked(self.cast(val, ptr.dtype.element_ty), len(sizes)), masks)
        return tl.tensor(None, tl.void)

    def _simple(self, given: list[Any]) -> bool:
        """Whether an access is by plain pointers to numbers, with a mask that is one."""
        ptr = given[0]
        if not ptr.dtype.is_ptr() or ptr.dtype.element_ty.name not in _NUMBERS or ptr.dtype.element_ty.is_bool():
            return False
        return ptr.type.is_block() or not any(x.type.is_block() for x in given[1:])

    def _constant(self, value: Any, dtype: Any) -> Any:
        """A plain number as a scalar beside a tensor of this type, None where there is no rule for it."""
        if dtype.is_ptr() or not isinstance(value, bool | int | float):
            return None
        # 0.0 and -0.0 are one key of a dictionary
        key = (type(value), value if value else repr(value), dtype.name)
        made = _constants.get(key)
        if made is None:
            common = self.computation_type_impl(dtype, False, self.to_tensor_type(value), True, False)
            made = _constants[key] = self._cast_to_computation_type(value, common)
        return made

    def _common(self, left: Any, right: Any) -> Any:
        """The type in which two tensors meet."""
        if left is right:
            return left
        key = (left.name, right.name)
        common = _commons.get(key)
        if common is None:
            common = _commons[key] = self.computation_type_impl(left, False, right, False, False)
        return common

    def _ranked(self, value: Any, rank: int) -> Any:
        """A handle whose data broadcasts against blocks of ``rank`` axes."""
        data = value.handle.data
        missing = rank + 1 - data.ndim
        if not missing:
            return value.handle
        return value.handle.reshaped(data.reshape((len(data),) + (1,) * missing + data.shape[1:]))


def _in_order(handle: Handle) -> Handle:
    """A block beside a scalar, C-contiguous unless broadcast.

    A scalar that Triton's interpreter spreads over a block decides the order of the result in memory against a
    transposed operand, and the order in memory is the one in which numpy sums: bits depend on it.
    """
    data = handle.data
    if data.flags.c_contiguous or 0 in data.strides[1:]:
        return handle
    return handle.reshaped(np.ascontiguousarray(data))


_commons: dict[tuple[str, str], Any] = {}
_constants: dict[tuple[type, Any, str], Any] = {}


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
