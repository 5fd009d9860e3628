"""Where a decode row stands in its ring: exact integers on the host, no device read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntRows = NDArray[np.int64]
BoolRows = NDArray[np.bool_]


class CursorError(ValueError):
    """An argument from which no cursor can be computed; the message names it."""


@dataclass(frozen=True, eq=False)
class Cursor:
    """Ring position of each row of a step.

    ``write_pos`` [R] int32: valid ring entries, and the index at which a row that does not flush appends.
    ``is_flush`` [R] bool: the row folds its ring and itself into the checkpoint state and appends nothing.
    """

    write_pos: NDArray[np.int32]
    is_flush: BoolRows


def decode_cursor(
    num_computed: ArrayLike,
    decode_base: ArrayLike,
    query_len: ArrayLike,
    buffer_len: int,
    align_block: int | None = None,
) -> Cursor:
    """Compute write_pos and is_flush of decode rows.

    ``num_computed`` [R]: tokens of the row's request that the state already holds.
    ``decode_base`` [R]: tokens handed to prefill at the latest (re)admission: the prompt, or after a preemption
    the prompt and what had been generated (Model Runner V2's ``prefill_len``, in batch order).
    ``query_len`` [R]: 1 for a decode row, 0 for padding. ``buffer_len``: ring entries, L.
    ``align_block``: tokens per state block where prefix caching runs in "align" mode, which needs the exact state
    at every block boundary; None elsewhere.

    Raises CursorError for negative or fractional values, unlike lengths, and a query_len over 1.
    Sources: vLLM #48018 (anchor and period), #62004 (align), #49847 (one-token tail of a prompt).
    """
    computed = _int_rows("num_computed", num_computed)
    base = _int_rows("decode_base", decode_base)
    length = _int_rows("query_len", query_len)
    _check_same_rows(num_computed=computed, decode_base=base, query_len=length)
    _check_decode_rows(length)
    _check_positive("buffer_len", buffer_len)
    if align_block is not None:
        _check_positive("align_block", align_block)
        base = _align_base(computed, base, align_block)

    is_real = length > 0
    steps = computed - base
    # a one-token prompt chunk that runs as decode: the chunks before it left an empty ring, the next may be a prefill
    is_leftover = steps < 0
    write_pos = steps % buffer_len
    write_pos = np.where(is_leftover, 0, write_pos)
    is_flush = write_pos == buffer_len - 1
    is_flush = is_flush | is_leftover
    if align_block is not None:
        is_flush = is_flush | _ends_block(computed, align_block)
    # at L = 1 a padding row's write_pos 0 is also L - 1
    write_pos = np.where(is_real, write_pos, 0)
    is_flush = is_flush & is_real
    return Cursor(write_pos=write_pos.astype(np.int32), is_flush=is_flush)


def runs_as_decode(num_computed: ArrayLike, query_len: ArrayLike) -> BoolRows:
    """Tell which rows may run as decode, [R] bool: one token over an existing state.

    A first chunk of one token never does: its slot still holds the state of a former request (vLLM #51562).
    ``num_computed`` [R] and ``query_len`` [R] as in `decode_cursor`, but chunks of any length are allowed.
    Raises CursorError for negative or fractional values and unlike lengths.
    """
    computed = _int_rows("num_computed", num_computed)
    length = _int_rows("query_len", query_len)
    _check_same_rows(num_computed=computed, query_len=length)
    has_state = computed > 0
    is_single = length == 1
    may_decode: BoolRows = is_single & has_state
    return may_decode


def _align_base(computed: IntRows, base: IntRows, block: int) -> IntRows:
    """Start the ring anew at a block boundary, unless the prefill ended later than it."""
    block_start = (computed // block) * block
    return np.maximum(base, block_start)


def _ends_block(computed: IntRows, block: int) -> BoolRows:
    """Tell whether this token completes a block, whose exact state prefix caching will keep."""
    ends: BoolRows = (computed + 1) % block == 0
    return ends


def _int_rows(name: str, values: ArrayLike) -> IntRows:
    """Take one non-negative integer per row, as int64."""
    rows: NDArray[Any] = np.asarray(values)
    if rows.ndim != 1:
        raise CursorError(f"{name}: expected one integer per row, shape [R], got shape {list(rows.shape)}")
    if rows.size and not np.issubdtype(rows.dtype, np.integer):
        raise CursorError(f"{name}: expected integers, got {rows.dtype}")
    if rows.size and rows.min() < 0:
        row = int(np.argmax(rows < 0))
        raise CursorError(f"{name}[{row}]: must not be negative, got {int(rows[row])}")
    return rows.astype(np.int64)


def _check_same_rows(**rows: IntRows) -> None:
    """Refuse arguments that disagree on the number of rows."""
    if len({len(values) for values in rows.values()}) > 1:
        lengths = ", ".join(f"{name} {len(values)}" for name, values in rows.items())
        raise CursorError(f"{', '.join(rows)}: need the same number of rows, got {lengths}")


def _check_decode_rows(length: IntRows) -> None:
    """Refuse a chunk of several tokens: it has no single ring position."""
    if length.size and length.max() > 1:
        row = int(np.argmax(length > 1))
        raise CursorError(f"query_len[{row}]: must be 1 (decode) or 0 (padding), got {int(length[row])}")


def _check_positive(name: str, value: object) -> None:
    """Refuse a size that is no integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise CursorError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise CursorError(f"{name}: must be at least 1, got {value}")
