"""Triton's types and tensors made faster while a launch runs: the same objects, their shapes computed once.

Half of an operation's time went into describing its result: a tensor wraps each size of its shape into constexprs and
tuples, and every comparison of two types unwraps them again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from triton._utils import validate_block_shape
from triton.language import core

Sizes = tuple[int, ...]


@cache
def _block_shape(sizes: Sizes) -> tuple[Any, int]:
    """A block type's shape and number of elements."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(sizes), validate_block_shape(sizes)


@cache
def _tensor_shape(sizes: Sizes) -> tuple[Any, Any]:
    """A tensor's shape and number of elements, as constexprs."""
    numel = 1
    for size in sizes:
        numel *= size
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(numel)


def sizes_of(dtype: Any) -> Sizes:
    """The shape of a type, () for a scalar."""
    if type(dtype) is not core.block_type:
        return ()
    try:
        sizes: Sizes = dtype._sizes
    except AttributeError:
        # made outside a launch
        sizes = dtype._sizes = _sizes(dtype.shape)
    return sizes


def _sizes(shape: Any) -> Sizes:
    return tuple([size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape])


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = self._sizes = _sizes(shape)
    self.element_ty = element_ty
    self.shape, self.numel = _block_shape(sizes)
    self.name = _name(sizes, element_ty.name)


@cache
def _name(sizes: Sizes, element: str) -> str:
    return f"<{_block_shape(sizes)[0]}, {element}>"


def _block_types_equal(self: Any, other: Any) -> bool:
    if self is other:
        return True
    if not isinstance(other, core.block_type):
        return False
    return self.element_ty == other.element_ty and sizes_of(self) == sizes_of(other)


def _scalar_types_equal(self: Any, other: Any) -> bool:
    if self is other:
        return True
    if type(other) is core.constexpr:
        other = other.value
    return isinstance(other, core.dtype) and self.name == other.name


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _tensor_shape(sizes_of(type))


def _itself(self: Any, builder: Any) -> Any:
    return self


# signedness is lost in the builder's own types, so types stand for themselves
CHANGES: tuple[tuple[Any, str, Any], ...] = (
    (core.dtype, "to_ir", _itself),
    (core.pointer_type, "to_ir", _itself),
    (core.block_type, "to_ir", _itself),
    (core.block_type, "__init__", _block_type),
    (core.block_type, "__eq__", _block_types_equal),
    (core.dtype, "__eq__", _scalar_types_equal),
    (core.tensor, "__init__", _tensor),
)
