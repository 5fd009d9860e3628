"""Reductions and scans along an axis of a block, for all programs at once.

Triton's own combine functions are numpy's reductions, in the order in which its interpreter takes them; any other
combine function is applied element after element, each time to all other axes and programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.language import core, standard

from .handle import Array, Handle

if TYPE_CHECKING:
    from .calls import Calls
    from .scope import Scope

Operation = Callable[..., Any]


def _first(best: Operation, worst: Operation) -> Operation:
    """Index of the first best value along an axis, NaN last."""

    def index(data: Array, axis: int) -> Array:
        if np.issubdtype(data.dtype, np.floating):
            data = np.where(np.isnan(data), worst(data.dtype), data)
        return np.asarray(best(data, axis=axis))

    return index


_REDUCE: dict[Any, Operation] = {
    standard._sum_combine.fn: np.sum,
    standard._elementwise_max.fn: np.fmax.reduce,
    standard._elementwise_min.fn: np.fmin.reduce,
}
_LARGEST = (np.fmax.reduce, _first(np.argmax, lambda kind: kind.type(-np.inf)))
_SMALLEST = (np.fmin.reduce, _first(np.argmin, lambda kind: kind.type(np.inf)))
_INDEXED: dict[Any, tuple[Operation, Operation]] = {
    standard._argmax_combine_tie_break_left.fn: _LARGEST,
    standard._argmax_combine_tie_break_fast.fn: _LARGEST,
    standard._argmin_combine_tie_break_left.fn: _SMALLEST,
    standard._argmin_combine_tie_break_fast.fn: _SMALLEST,
}
_SCAN: dict[Any, Operation] = {standard._sum_combine.fn: np.cumsum, standard._prod_combine.fn: np.cumprod}


class Reductions:
    """Reductions and scans of one call."""

    def __init__(self, calls: Calls, scope: Scope) -> None:
        self.calls = calls
        self.scope = scope

    def reduce(self, input: Any, axis: int | None, combine: Any, keep_dims: bool) -> Any:
        """``tl.reduce``: a tensor, or a tuple of tensors for a tuple."""
        if isinstance(input, tl.tensor):
            return self.reduce((input,), axis, combine, keep_dims)[0]
        rank = len(input[0].shape)
        arrays = _aligned(input)
        place = 1 if axis is None else axis + 1 if axis >= 0 else axis + 1 + rank
        if len(arrays) == 1 and combine.fn in _REDUCE:
            # all axes at once rather than flattened: numpy then sums in the order of memory
            places = tuple(range(1, rank + 1)) if axis is None else place
            results = [_REDUCE[combine.fn](arrays[0], axis=places)]
        else:
            if axis is None:
                arrays = [array.reshape(len(array), -1) for array in arrays]
            results = self._fold(arrays, place, [x.dtype for x in input], combine)
        if keep_dims:
            results = [_kept(result, place, None if axis is not None else rank) for result in results]
        return tuple(self._tensor(result, x.dtype) for result, x in zip(results, input, strict=True))

    def reduce_with_indices(self, input: Any, axis: int | None, combine: Any, keep_dims: bool) -> Any:
        """Values and int32 indices, for max, min, argmax and argmin."""
        if axis is None:
            raise TypeError("an index needs an axis")
        data = input.handle.data
        place = axis + 1 if axis >= 0 else axis + data.ndim
        if combine.fn not in _INDEXED:
            size = data.shape[place]
            shape = [1] * data.ndim
            shape[place] = size
            index = np.broadcast_to(np.arange(size, dtype=np.int32).reshape(shape), data.shape)
            return self.reduce((input, self._tensor(index, tl.int32)), axis, combine, keep_dims)
        value, index = (operation(data, axis=place) for operation in _INDEXED[combine.fn])
        results = [value, index.astype(np.int32)]
        if keep_dims:
            results = [np.expand_dims(result, place) for result in results]
        return self._tensor(results[0], input.dtype), self._tensor(results[1], tl.int32)

    def scan(self, input: Any, axis: int, combine: Any, reverse: bool) -> Any:
        """``tl.associative_scan``: a tensor, or a tuple of tensors for a tuple."""
        if isinstance(input, tl.tensor):
            return self.scan((input,), axis, combine, reverse)[0]
        arrays = _aligned(input)
        place = axis + 1 if axis >= 0 else axis + arrays[0].ndim
        if reverse:
            arrays = [np.ascontiguousarray(np.flip(array, place)) for array in arrays]
        if len(arrays) == 1 and combine.fn in _SCAN:
            results = [_SCAN[combine.fn](arrays[0], axis=place)]
        else:
            steps = self._steps(arrays, place, [x.dtype for x in input], combine)
            results = [np.stack(column, axis=place) for column in zip(*steps, strict=True)]
        if reverse:
            results = [np.flip(result, place) for result in results]
        return tuple(self._tensor(result, x.dtype) for result, x in zip(results, input, strict=True))

    def _fold(self, arrays: list[Array], place: int, dtypes: list[Any], combine: Any) -> list[Array]:
        last: list[Array] = []
        for last in self._steps(arrays, place, dtypes, combine):  # noqa: B007
            pass
        return last

    def _steps(self, arrays: list[Array], place: int, dtypes: list[Any], combine: Any) -> Any:
        """What the combine function has made of the first 1, 2, ... elements."""
        so_far = [array.take(0, axis=place) for array in arrays]
        yield so_far
        for i in range(1, arrays[0].shape[place]):
            following = [array.take(i, axis=place) for array in arrays]
            tensors = [self._tensor(a, t) for part in (so_far, following) for a, t in zip(part, dtypes, strict=True)]
            result = self.calls.call_function(combine, tensors, {}, self.scope)
            made = result if isinstance(result, tuple) else (result,)
            so_far = [
                np.broadcast_to(self.calls.semantic.cast(x, dtype).handle.data, like.shape)
                for x, dtype, like in zip(made, dtypes, so_far, strict=True)
            ]
            yield so_far

    def _tensor(self, data: Array, dtype: Any) -> Any:
        handle: Handle = self.calls.builder.made(
            data if data.dtype == _held(dtype) else data.astype(_held(dtype)), dtype
        )
        shape = list(data.shape[1:])
        return tl.tensor(handle, core.block_type(dtype, shape) if shape else dtype)


def _held(dtype: Any) -> np.dtype[Any]:
    from .handle import held_dtype

    return held_dtype(dtype)


def _aligned(input: Any) -> list[Array]:
    """The data of tensors that are reduced together, with one number of programs."""
    arrays = [x.handle.data for x in input]
    longest = max(len(array) for array in arrays)
    return [np.broadcast_to(array, (longest, *array.shape[1:])) for array in arrays]


def _kept(result: Array, place: int, rank: int | None) -> Array:
    return np.expand_dims(result, place) if rank is None else result.reshape((len(result),) + (1,) * rank)
