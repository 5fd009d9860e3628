"""How this tests, in plain words.

Hypothesis plays random legal lives of several requests (chunked prefill with one-token tails, decoding, preemption and
resume, release, prefix hits in align mode) into the ledger. Every decode row must equal the closed cursor formula,
which is written here and nowhere in the ledger. At a random moment of the same lives a skipped, a repeated or a
misplaced token is offered: the ledger must refuse it, say why in one line, and stay as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from replay_parity.oracles.ring import Holding, LedgerError, LedgerRow, RingLedger


def closed_formula(num_computed: int, prefill_len: int, L: int, block: int | None) -> tuple[int, int]:
    """(write_pos, is_flush) of a one-token row over existing state, from vLLM's cursor definition (#48018, #62004)."""
    base = prefill_len if block is None else max(prefill_len, num_computed // block * block)
    steps = num_computed - base
    write_pos, is_flush = (0, 1) if steps < 0 else (steps % L, int(steps % L == L - 1))
    if block is not None and (num_computed + 1) % block == 0:
        is_flush = 1
    return write_pos, is_flush


@dataclass
class Life:
    """A request as the scheduler sees it; ``prefill_len`` is 0 while it is not admitted."""

    prompt_len: int
    generated: int = 0
    num_computed: int = 0
    prefill_len: int = 0


@dataclass(frozen=True)
class Event:
    """One thing that happened: ``kind`` is prefill, decode, adopt or release; ``row`` is the ledger's answer."""

    kind: str
    request: int
    num_computed: int
    prefill_len: int
    row: LedgerRow | None = None


# one code a step: which request, what it wants (0 preempts, 1 and 2 ask for a one-token chunk), and a chunk size
CODES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=80)
PROMPTS = st.lists(st.integers(1, 14), min_size=3, max_size=3)
BUFFER_LENS = st.integers(1, 7)
BLOCKS = st.none() | st.integers(1, 9)
Codes = list[tuple[int, int, int]]


def play(ledger: RingLedger, prompts: list[int], codes: Codes) -> Iterator[Event]:
    """Turn codes into a legal schedule and run it; every code has a meaning, so nothing is filtered."""
    lives = [Life(prompt) for prompt in prompts]
    for request, wish, size in codes:
        life = lives[request]
        if life.prefill_len and wish == 0:
            ledger.release(request)
            life.num_computed = life.prefill_len = 0
            yield Event("release", request, 0, 0)
            continue
        if not life.prefill_len:
            life.prefill_len = life.prompt_len + life.generated
            block = ledger.align_block or life.prefill_len
            # at least one token is always left to compute
            hit = (life.prefill_len - 1) // block * block
            if hit and wish > 4:
                ledger.adopt(request, hit)
                life.num_computed = hit
                yield Event("adopt", request, hit, life.prefill_len)
        yield step(ledger, request, life, 1 if wish < 3 else size)


def step(ledger: RingLedger, request: int, life: Life, size: int) -> Event:
    """One row of the request: a prefill chunk while it has prompt left, else a decode."""
    start, todo = life.num_computed, life.prefill_len - life.num_computed
    num_tokens = 1 if todo <= 0 else min(size, todo)
    life.num_computed += num_tokens
    if life.num_computed >= life.prefill_len:
        life.generated += 1
    if start == 0 or num_tokens > 1:
        ledger.prefill(request, start, num_tokens, life.prefill_len)
        return Event("prefill", request, life.num_computed, life.prefill_len)
    row = ledger.decode(request, start, life.prefill_len)
    return Event("decode", request, life.num_computed, life.prefill_len, row)


Cursor = Callable[[int, int, int, int | None], tuple[int, int]]


def compare_with(cursor: Cursor, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    """Assert on 300 random schedules that the ledger's rows equal the cursor's; the seed is fixed."""

    @settings(max_examples=300, deadline=None, derandomize=True, database=None, phases=phases)
    @given(BUFFER_LENS, BLOCKS, PROMPTS, CODES)
    def rows_agree(L: int, block: int | None, prompts: list[int], codes: Codes) -> None:
        for event in play(RingLedger(L, block), prompts, codes):
            if event.row is None:
                continue
            position, row = event.num_computed - 1, event.row
            assert (row.write_pos, row.is_flush) == cursor(position, event.prefill_len, L, block)
            assert [*range(row.checkpointed), *row.pending, position] == list(range(event.num_computed))
            assert len(row.pending) < L

    rows_agree()


def test_rows_equal_the_closed_formula() -> None:
    compare_with(closed_formula)


WRONG: dict[str, Cursor] = {
    "ring one too long": lambda n, base, L, block: closed_formula(n, base, L + 1, block),
    "ring one too short": lambda n, base, L, block: closed_formula(n, base, max(L - 1, 1), block),
    "base one too high": lambda n, base, L, block: closed_formula(n, base + 1, L, block),
    "base one too low": lambda n, base, L, block: closed_formula(n, base - 1, L, block),
    "blocks forgotten": lambda n, base, L, block: closed_formula(n, base, L, None),
    "block of another size": lambda n, base, L, block: closed_formula(n, base, L, block and block + 1),
    "base at the block start only": lambda n, base, L, block: closed_formula(
        n, base if block is None or n < base else 0, L, block
    ),
    "leftover appended": lambda n, base, L, block: closed_formula(n, min(base, n), L, block),
}


@pytest.mark.parametrize("name", WRONG)
def test_comparison_rejects_wrong_cursor(name: str) -> None:
    with pytest.raises(AssertionError):
        # finding is enough, no need to shrink
        compare_with(WRONG[name], phases=(Phase.generate,))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(BUFFER_LENS, BLOCKS, PROMPTS, CODES, st.integers(-3, 3).filter(bool))
def test_skipped_and_repeated_tokens_are_refused(
    L: int, block: int | None, prompts: list[int], codes: Codes, off: int
) -> None:
    ledger = RingLedger(L, block)
    for event in play(ledger, prompts, codes):
        before = ledger.held(event.request)
        wrong = max(event.num_computed + off, 0)
        if wrong != event.num_computed:
            with pytest.raises(LedgerError, match=f"^request {event.request}: "):
                ledger.decode(event.request, wrong, event.prefill_len)
        if wrong not in (0, event.num_computed):
            with pytest.raises(LedgerError, match=f"^request {event.request}: "):
                ledger.prefill(event.request, wrong, 2, wrong + 2)
        assert ledger.held(event.request) == before


def test_schedules_reach_every_situation() -> None:
    """The property above is worth what its schedules contain: count it, on a fixed set of plans."""
    seen = dict.fromkeys(("leftover", "wrapped", "resumed", "hit", "cut by a block", "filled"), 0)
    kinds: set[str] = set()

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(BUFFER_LENS, BLOCKS, PROMPTS, CODES)
    def count(L: int, block: int | None, prompts: list[int], codes: Codes) -> None:
        for event in play(RingLedger(L, block), prompts, codes):
            kinds.add(event.kind)
            seen["hit"] += event.kind == "adopt"
            if event.row is None:
                continue
            steps = event.num_computed - 1 - event.prefill_len
            seen["leftover"] += steps < 0
            seen["wrapped"] += steps >= L
            seen["resumed"] += steps >= 0 and event.prefill_len > prompts[event.request]
            seen["filled"] += event.row.is_flush and len(event.row.pending) == L - 1
            seen["cut by a block"] += steps >= 0 and event.row.is_flush and len(event.row.pending) < L - 1

    count()
    assert kinds == {"prefill", "decode", "adopt", "release"}
    assert min(seen.values()) >= 50, seen


def test_worked_example_with_preemption() -> None:
    ledger = RingLedger(4, None)
    ledger.prefill(0, 0, 6, prefill_len=6)
    rows = [ledger.decode(0, position, prefill_len=6) for position in range(6, 10)]
    assert [(row.write_pos, row.is_flush) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert rows[3] == LedgerRow(write_pos=3, is_flush=1, checkpointed=6, pending=(6, 7, 8))
    ledger.release(0)
    ledger.prefill(0, 0, 10, prefill_len=10)
    assert ledger.decode(0, 10, prefill_len=10) == LedgerRow(0, 0, checkpointed=10, pending=())


def test_leftover_token_is_folded_at_once() -> None:
    ledger = RingLedger(16, None)
    ledger.prefill(3, 0, 8, prefill_len=9)
    assert ledger.decode(3, 8, prefill_len=9) == LedgerRow(0, 1, checkpointed=8, pending=())
    assert ledger.decode(3, 9, prefill_len=9) == LedgerRow(0, 0, checkpointed=9, pending=())
    assert ledger.held(3) == Holding(9, (9,), prefill_len=9)


def test_block_end_cuts_the_ring_short() -> None:
    ledger = RingLedger(16, 4)
    ledger.prefill(0, 0, 6, prefill_len=6)
    rows = [ledger.decode(0, position, prefill_len=6) for position in range(6, 13)]
    assert [(row.write_pos, row.is_flush) for row in rows] == [(0, 0), (1, 1), (0, 0), (1, 0), (2, 0), (3, 1), (0, 0)]


def test_ring_of_one_flushes_each_step() -> None:
    ledger = RingLedger(1, None)
    ledger.prefill(0, 0, 2, prefill_len=2)
    assert [ledger.decode(0, position, 2).is_flush for position in range(2, 6)] == [1, 1, 1, 1]


def holding_two_pending() -> RingLedger:
    """L 4, align block 8: request 0 holds 3 tokens checkpointed and positions 3 and 4 pending."""
    ledger = RingLedger(4, 8)
    ledger.prefill(0, 0, 3, prefill_len=3)
    ledger.decode(0, 3, prefill_len=3)
    ledger.decode(0, 4, prefill_len=3)
    return ledger


REFUSALS = {
    "skipped token": (
        lambda ledger: ledger.decode(0, 6, 3),
        "request 0: 3 tokens checkpointed, [3, 4] pending: 5 tokens, expected exactly the 6 before position 6",
    ),
    "repeated token": (
        lambda ledger: ledger.decode(0, 4, 3),
        "request 0: 3 tokens checkpointed, [3, 4] pending: 5 tokens, expected exactly the 4 before position 4",
    ),
    "prompt as base after a resume": (
        lambda ledger: (ledger.prefill(0, 0, 5, 5), ledger.decode(0, 5, 3)),
        "request 0: prefill_len 3, expected 5 as at its latest admission",
    ),
    "prefill over a live ring": (
        lambda ledger: ledger.prefill(0, 5, 2, 7),
        "request 0: prefill_len 7, expected 3 as at its latest admission",
    ),
    "decode as a first token": (
        lambda ledger: ledger.decode(7, 0, 1),
        "request 7: no state is held, expected the 0 tokens before position 0; "
        "a first chunk, even of one token, is a prefill at start 0",
    ),
    "chunk beyond the prompt": (
        lambda ledger: ledger.prefill(1, 0, 4, 3),
        "request 1: prefill chunk of 4 tokens at 0 does not lie within the 3 tokens handed to prefill",
    ),
    "hit inside a block": (
        lambda ledger: ledger.adopt(1, 5),
        "request 1: prefix hit of 5 tokens, expected a positive multiple of the block of 8",
    ),
    "hit on live state": (
        lambda ledger: ledger.adopt(0, 8),
        "request 0: prefix hit on live state (3 tokens checkpointed, [3, 4] pending), expected release first",
    ),
    "decode after release": (
        lambda ledger: (ledger.release(0), ledger.decode(0, 5, 3)),
        "request 0: no state is held, expected the 5 tokens before position 5; "
        "a first chunk, even of one token, is a prefill at start 0",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_request_held_and_expected(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(LedgerError) as refused:
        call(holding_two_pending())  # type: ignore[no-untyped-call]
    assert str(refused.value) == message


def test_release_of_a_request_that_never_ran_is_allowed() -> None:
    ledger = RingLedger(4, None)
    ledger.release(5)
    assert ledger.held(5) is None


def test_hit_needs_align_mode() -> None:
    with pytest.raises(LedgerError, match="align_block is None"):
        RingLedger(4, None).adopt(0, 4)


@pytest.mark.parametrize(("buffer_len", "block", "field"), [(0, None, "buffer_len"), (4, 0, "align_block")])
def test_sizes_below_one_are_refused(buffer_len: int, block: int | None, field: str) -> None:
    with pytest.raises(LedgerError, match=field):
        RingLedger(buffer_len, block)
