"""The builder's operations on shapes, products and gathers: axis 0 is the programs', so every axis moves by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from .arithmetic import Arithmetic
from .handle import Array, Handle, Unsupported, is_bfloat16


class Shapes(Arithmetic):
    """Shape methods of Triton's builder on handles."""

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> Handle:
        return Handle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, ret_ty: Any, arg: Handle) -> Handle:
        shape = tuple(ret_ty.shape)
        data = arg.data.reshape((len(arg.data),) + (1,) * len(shape))
        # in full, not as a view: see semantic._in_order
        return arg.reshaped(np.ascontiguousarray(np.broadcast_to(data, (len(data), *shape))))

    def create_unsplat(self, arg: Handle) -> Handle:
        return arg.reshaped(arg.data.reshape(len(arg.data)))

    def create_reshape(self, arg: Handle, shape: Any, allow_reorder: bool) -> Handle:
        return arg.reshaped(arg.data.reshape((len(arg.data), *shape)))

    def create_expand_dims(self, arg: Handle, axis: int) -> Handle:
        return arg.reshaped(np.expand_dims(arg.data, axis + 1))

    def create_broadcast(self, arg: Handle, shape: Any) -> Handle:
        return arg.reshaped(np.broadcast_to(arg.data, (len(arg.data), *shape)))

    def create_trans(self, arg: Handle, perm: Any) -> Handle:
        return arg.reshaped(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))))

    def create_cat(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.made(np.concatenate(_same_length(lhs.data, rhs.data), axis=1), lhs.dtype)

    def create_join(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.made(np.stack(_same_length(lhs.data, rhs.data), axis=-1), lhs.dtype)

    def create_split(self, val: Handle) -> tuple[Handle, Handle]:
        return val.reshaped(val.data[..., 0]), val.reshaped(val.data[..., 1])

    def create_gather(self, src: Handle, indices: Handle, axis: int) -> Handle:
        data, index = _same_length(src.data, indices.data)
        return self.made(np.take_along_axis(data, index, axis=axis + 1), src.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        values, used = np.broadcast_arrays(data.data, np.ones(1, np.bool_) if mask is None else mask.data)
        valid = used & (values >= 0) & (values < bins)
        counts = [np.bincount(row[keep], minlength=bins) for row, keep in zip(values, valid, strict=True)]
        return self.made(np.stack(counts).astype(np.int32), tl.int32)

    def create_dot(self, a: Handle, b: Handle, d: Handle, input_precision: Any, max_num_imprecise_acc: int) -> Handle:
        """a @ b + d; products of 16-bit floats are exact and summed in the type of d. TF32 is not modelled."""
        if is_bfloat16(d.dtype):
            raise Unsupported("a dot product that accumulates in bfloat16")
        return self.made(np.matmul(a.data, b.data, dtype=d.data.dtype) + d.data, d.dtype)


def _same_length(*arrays: Array) -> list[Array]:
    """The arrays with one number of programs."""
    longest = max(len(array) for array in arrays)
    return [np.broadcast_to(array, (longest, *array.shape[1:])) for array in arrays]
