"""How this tests the cursor, in plain words.

Rows whose answer can be worked out by hand (fresh, flush, wrap, resume, align, one-token tail, padding), then a
ledger: requests drawn at random are walked token by token, a plain list holds what is pending in the ring, and the
cursor must agree with the list's length and with when it is emptied. Last, the ledger is shown to reject wrong rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_parity.kernels.cursor import Cursor, CursorError, decode_cursor, runs_as_decode

Rule = Callable[[list[int], list[int], list[int], int, int | None], Cursor]


def rows(cursor: Cursor) -> list[tuple[int, bool]]:
    return list(zip(cursor.write_pos.tolist(), cursor.is_flush.tolist(), strict=True))


def one(computed: int, base: int, buffer_len: int, align_block: int | None = None) -> tuple[int, bool]:
    return rows(decode_cursor([computed], [base], [1], buffer_len, align_block))[0]


def test_worked_example() -> None:
    cursor = decode_cursor([6, 7, 8, 9, 10], [6] * 5, [1] * 5, 4)
    assert rows(cursor) == [(0, False), (1, False), (2, False), (3, True), (0, False)]
    assert cursor.write_pos.dtype == np.int32
    assert cursor.is_flush.dtype == np.bool_


@pytest.mark.parametrize(
    ("name", "computed", "base", "buffer_len", "expected"),
    [
        ("fresh", 6, 6, 4, (0, False)),
        ("flush", 9, 6, 4, (3, True)),
        ("wrap", 10, 6, 4, (0, False)),
        ("resume restarts, L 4", 10, 10, 4, (0, False)),
        ("resume restarts, L 3", 10, 10, 3, (0, False)),
        ("resume, second token", 11, 10, 3, (1, False)),
        ("one-token tail", 8, 9, 4, (0, True)),
        ("token after the tail", 9, 9, 4, (0, False)),
        ("tail far below base", 3, 30, 16, (0, True)),
        ("L 1", 6, 6, 1, (0, True)),
        ("L 1, later", 11, 6, 1, (0, True)),
        ("L 2", 7, 6, 2, (1, True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_row(name: str, computed: int, base: int, buffer_len: int, expected: tuple[int, bool]) -> None:
    assert one(computed, base, buffer_len) == expected


@pytest.mark.parametrize(
    ("name", "computed", "base", "expected"),
    [
        ("prefill ended mid-block", 6, 6, (0, False)),
        ("completes the block at write_pos 1", 7, 6, (1, True)),
        ("first token of the next block", 8, 6, (0, False)),
        ("ends that block", 11, 6, (3, True)),
        ("prefill ended at the boundary", 8, 8, (0, False)),
        ("one-token tail", 8, 9, (0, True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_align_row(name: str, computed: int, base: int, expected: tuple[int, bool]) -> None:
    assert one(computed, base, 16, align_block=4) == expected


def test_align_keeps_ring_period_inside_long_blocks() -> None:
    assert [one(computed, 8, 3, align_block=8) for computed in range(8, 16)] == [
        (0, False), (1, False), (2, True), (0, False), (1, False), (2, True), (0, False), (1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("buffer_len", [1, 2, 16])
@pytest.mark.parametrize("align_block", [None, 1, 4])
def test_padding_rows_are_zero(buffer_len: int, align_block: int | None) -> None:
    cursor = decode_cursor([9, 0, 3, 7], [9, 0, 0, 9], [1, 0, 0, 0], buffer_len, align_block)
    assert rows(cursor)[1:] == [(0, False)] * 3


def test_no_rows() -> None:
    cursor = decode_cursor([], [], [], 4)
    assert cursor.write_pos.shape == (0,)
    assert runs_as_decode([], []).shape == (0,)


def test_arguments_are_not_changed() -> None:
    given_rows = [np.array(values, dtype=np.int32) for values in ([6, 9], [7, 2], [1, 0])]
    kept = [values.copy() for values in given_rows]
    decode_cursor(given_rows[0], given_rows[1], given_rows[2], 4, 8)
    assert all(np.array_equal(now, before) for now, before in zip(given_rows, kept, strict=True))


def test_runs_as_decode() -> None:
    computed = [0, 0, 1, 8, 8, 9]
    length = [1, 5, 1, 1, 3, 0]
    assert runs_as_decode(computed, length).tolist() == [False, False, True, True, False, False]


def check_ledger(rule: Rule, prompts: list[int], tail: list[bool], decodes: int, length: int, block: int | None) -> int:
    """Walk every request token by token beside a list of pending tokens; returns the flushes seen."""
    pending: list[list[int]] = [[] for _ in prompts]
    flushes = 0
    # a request with a tail first runs its last prompt token as decode
    computed = [prompt - int(has_tail) for prompt, has_tail in zip(prompts, tail, strict=True)]
    for _ in range(decodes):
        result = rows(rule(computed, prompts, [1] * len(prompts), length, block))
        for row, (write_pos, is_flush) in enumerate(result):
            token = computed[row]
            assert write_pos == len(pending[row]), f"request {row}, token {token}: entries pending"
            must_flush = (
                len(pending[row]) == length - 1
                or token < prompts[row]
                or (block is not None and (token + 1) % block == 0)
            )
            assert is_flush == must_flush, f"request {row}, token {token}: flush"
            pending[row] = [] if is_flush else [*pending[row], token]
            flushes += is_flush
            computed[row] = token + 1
    return flushes


@given(
    prompts=st.lists(st.integers(2, 40), min_size=1, max_size=5),
    tails=st.lists(st.booleans(), min_size=5, max_size=5),
    decodes=st.integers(1, 40),
    length=st.integers(1, 9),
    block=st.one_of(st.none(), st.integers(1, 12)),
)
def test_ledger(prompts: list[int], tails: list[bool], decodes: int, length: int, block: int | None) -> None:
    check_ledger(decode_cursor, prompts, tails[: len(prompts)], decodes, length, block)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("period L + 1", lambda c, b, n, length, block: decode_cursor(c, b, n, length + 1, block)),
        ("base + 1", lambda c, b, n, length, block: decode_cursor(c, [x + 1 for x in b], n, length, block)),
        ("block ignored", lambda c, b, n, length, block: decode_cursor(c, b, n, length, None)),
        ("tail counted as decode", lambda c, b, n, length, block: decode_cursor(c, [0] * len(c), n, length, block)),
        ("wrong block", lambda c, b, n, length, block: decode_cursor(c, b, n, length, 3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ledger_rejects(name: str, rule: Rule) -> None:
    with pytest.raises(AssertionError, match="request"):
        check_ledger(rule, [6, 9], [False, True], 20, 4, 8)
    assert check_ledger(decode_cursor, [6, 9], [False, True], 20, 4, 8) > 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_computed": [3, -1]}, r"num_computed\[1\]: must not be negative, got -1"),
        ({"decode_base": [-2, 3]}, r"decode_base\[0\]: must not be negative"),
        ({"query_len": [1, -1]}, r"query_len\[1\]: must not be negative"),
        ({"query_len": [1, 2]}, r"query_len\[1\]: must be 1 \(decode\) or 0 \(padding\), got 2"),
        ({"num_computed": [3]}, "num_computed 1, decode_base 2, query_len 2"),
        ({"decode_base": [3, 4, 5]}, "decode_base 3"),
        ({"num_computed": [3.0, 4.0]}, "num_computed: expected integers, got float64"),
        ({"num_computed": [[3, 4]]}, "num_computed: expected one integer per row"),
        ({"buffer_len": 0}, "buffer_len: must be at least 1, got 0"),
        ({"buffer_len": 4.0}, "buffer_len: expected an integer"),
        ({"align_block": 0}, "align_block: must be at least 1, got 0"),
    ],
)
def test_bad_argument_is_named(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"num_computed": [3, 4], "decode_base": [3, 3], "query_len": [1, 1], "buffer_len": 4}
    decode_cursor(**good)
    with pytest.raises(CursorError, match=message) as caught:
        decode_cursor(**{**good, **change})
    assert "\n" not in str(caught.value)


def test_bad_rows_of_runs_as_decode() -> None:
    with pytest.raises(CursorError, match="num_computed 2, query_len 1"):
        runs_as_decode([1, 2], [1])
    with pytest.raises(CursorError, match="query_len"):
        runs_as_decode([1, 2], [1, -1])
