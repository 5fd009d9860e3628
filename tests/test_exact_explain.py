"""Explanations of wrong reads, on mismatches made by hand: the right row, with one thing put in place of another.

Each test builds the wrong output or state from the dictionaries alone and asks who is named: the token that came out,
the one that was expected, the reason. Rows come from two short schedules: one request whose ring wraps, and three
requests of which two share a slot one after the other while the third decodes beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from replay_parity.cases.case import Cache, Case, Inputs, Replay, Request, Step
from replay_parity.cases.geometry import Geometry
from replay_parity.cases.inputs import TORCH_DTYPES, layer_inputs
from replay_parity.cases.timeline import play
from replay_parity.harness.explain import Explainer, Explanation
from replay_parity.harness.oracle_path import ledger_cursors
from replay_parity.harness.pages import Token, pages_before
from replay_parity.harness.reading import Seen
from replay_parity.oracles.memory import ALL_KEYS, MemoryTruth, memory_truth

TINY = Geometry(2, 4, 16, 16, 4)


def decodes(count: int, *requests: int) -> tuple[Step, ...]:
    return (Step(tuple((request, 1) for request in requests)),) * count


def long_run(seed: int = 3, dtype: str = "float32", geometry: Geometry = TINY) -> Case:
    """Prompt 5, then 27 decodes over a ring of 4."""
    replay = Replay(4, dtype, dtype, dtype)
    steps = (Step(((0, 5),)), *decodes(27, 0))
    return Case("run", geometry, replay, Cache(), None, Inputs("exact", seed), (Request(5, 28),), steps)


def tenants(seed: int = 3, dtype: str = "float32") -> Case:
    """Requests 0 and 1 side by side; 0 ends with two rows pending, and 2 takes its slot."""
    replay = Replay(4, dtype, dtype, dtype)
    steps = (Step(((0, 4), (1, 9))), *decodes(6, 0, 1), Step(((1, 1), (2, 3))), *decodes(8, 1, 2))
    requests = (Request(4, 7), Request(9, 16), Request(3, 9))
    return Case("tenants", TINY, replay, Cache(), None, Inputs("exact", seed), requests, steps)


@dataclass
class Bench:
    """A Case, its dictionaries, and where its rows are."""

    case: Case

    def __post_init__(self) -> None:
        self.timeline = play(self.case)
        self.cursors = ledger_cursors(self.case, self.timeline)
        self.truth: MemoryTruth = memory_truth(layer_inputs(self.case))
        self.explainer = Explainer(self.case, self.timeline, self.cursors)
        self.write_pos = dict(zip(self.cursors.rows.labels(), self.cursors.write_pos.tolist(), strict=True))

    def rows(self) -> list[tuple[int, int, Token]]:
        """(step, row, last token) of decode rows."""
        return [
            (step, index, Token(row.request, row.position))
            for step, entry in enumerate(self.timeline.steps)
            for index, row in enumerate(entry.rows)
            if row.runs_as_decode
        ]

    def asked(self, last: Token, head: int) -> int:
        return int(self.truth.ops.asked[last.request, last.position, head])

    def holder(self, last: Token, head: int) -> int | None:
        """Position of the token that a one-hot query must find."""
        return self.truth.holders(*last, head).get(self.asked(last, head))

    def outputs(self, last: Token) -> torch.Tensor:
        dtype = TORCH_DTYPES[self.case.replay.activation_dtype]
        return self.truth.outputs[last.request, last.position].to(dtype)

    def value(self, token: Token, head: int) -> torch.Tensor:
        return torch.from_numpy(self.truth.ops.value[token.request, token.position, head]).double()

    def explain(self, step: int, row: int, outputs: torch.Tensor) -> Explanation:
        entry = self.timeline.steps[step].rows[row]
        bad = (outputs != self.outputs(Token(entry.request, entry.position))).any(-1).nonzero()[:, 0].tolist()
        assert bad
        return self.explainer.explain(step, row, Seen(outputs, None, tuple(bad)))

    def replaced(self, step: int, row: int, last: Token, head: int, total: torch.Tensor) -> Explanation:
        """The right row with one head's sum replaced."""
        outputs = self.outputs(last)
        divisor = float(self.truth.divisor[last.request, last.position, head])
        outputs[head] = (total / divisor).to(outputs.dtype)
        return self.explain(step, row, outputs)

    def first(self, wanted: Callable[[int, int, Token, int], bool]) -> tuple[int, int, Token, int]:
        """(step, row, last token, head) of the first decode row and head that is as wanted."""
        heads = range(self.case.geometry.num_v_heads)
        return next((s, r, last, h) for s, r, last in self.rows() for h in heads if wanted(s, r, last, h))


def previous_holder(bench: Bench, last: Token, head: int) -> int | None:
    """Whose value stood under the asked key before its holder came, unless the holder cleared first."""
    holder = bench.holder(last, head)
    if not holder:
        return None
    return bench.truth.holders(last.request, holder - 1, head).get(bench.asked(last, head))


def test_missing_ring_row() -> None:
    bench = Bench(long_run())

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        before, pending = previous_holder(bench, last, head), bench.write_pos[step, row]
        return before is not None and last.position - pending <= (bench.holder(last, head) or 0) < last.position

    step, row, last, head = bench.first(wanted)
    before, holder = previous_holder(bench, last, head), bench.holder(last, head)
    assert before is not None and holder is not None
    told = bench.replaced(step, row, last, head, bench.value(Token(0, before), head))
    assert (told.reason, told.head, told.expected) == ("missing ring row", head, Token(0, holder))
    assert told.sentence == (
        f"step {step} row {row} head {head}: request 0 token {last.position} read the value of token {before} of "
        f"request 0, expected token {holder} of request 0: missing ring row"
    )


def test_missed_flush() -> None:
    bench = Bench(long_run())

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        before, pending = previous_holder(bench, last, head), bench.write_pos[step, row]
        holder = bench.holder(last, head)
        return before is not None and holder is not None and 5 <= holder < last.position - pending

    step, row, last, head = bench.first(wanted)
    before, holder = previous_holder(bench, last, head), bench.holder(last, head)
    assert before is not None
    told = bench.replaced(step, row, last, head, bench.value(Token(0, before), head))
    assert (told.reason, told.head) == ("missed flush", head)
    assert f"read the value of token {before} of request 0, expected token {holder} of request 0" in told.sentence
    assert told.sentence.endswith(": missed flush")


def test_stale_ring_row_of_its_own() -> None:
    """A token that was overwritten long ago comes out: neither the expected token's predecessor nor anything near."""
    bench = Bench(long_run())

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        return last.position > 24 and bench.holder(last, head) is not None

    step, row, last, head = bench.first(wanted)
    told = bench.replaced(step, row, last, head, bench.value(Token(0, 6), head))
    assert (told.reason, told.read) == ("stale ring row", (Token(0, 6),))
    assert "read the value of token 6 of request 0, expected token " in told.sentence


def test_folded_twice_is_a_stale_ring_row() -> None:
    """Head 2 asks for everything: the ring row of a token that is in the checkpoint comes on top."""
    bench = Bench(long_run())
    ops = bench.truth.ops

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        folded = last.position - bench.write_pos[step, row] - 1
        asks_all = bench.asked(last, head) == ALL_KEYS
        later = slice(folded + 1, last.position + 1)
        # a clear or a newer value under the same key would hide it
        hidden = (
            ops.clear[0, folded : last.position + 1, head].any() or ops.key[0, folded, head] in ops.key[0, later, head]
        )
        return asks_all and head == 2 and last.position > 8 and not hidden and folded >= 5

    step, row, last, head = bench.first(wanted)
    folded = last.position - bench.write_pos[step, row] - 1
    key = int(ops.key[0, folded, head])
    before = bench.truth.holders(0, folded - 1, head).get(key)
    change = bench.value(Token(0, folded), head) - (0 if before is None else bench.value(Token(0, before), head))
    total = torch.from_numpy(bench.truth.total[0, last.position, head]).double() + change
    told = bench.replaced(step, row, last, head, total)
    assert told.reason == "stale ring row" and Token(0, folded) in told.read
    assert told.expected is None and f"token {folded} of request 0 on top, expected the sum of " in told.sentence


def second_tenant(bench: Bench) -> tuple[int, int, Token, int]:
    """A row of request 2 that asks for one key, whose slot was request 0's."""
    return bench.first(lambda s, r, last, h: last.request == 2 and bench.holder(last, h) is not None)


def test_former_tenant() -> None:
    bench = Bench(tenants())
    step, row, last, head = second_tenant(bench)
    told = bench.replaced(step, row, last, head, bench.value(Token(0, 8), head))
    assert told.reason == "former tenant"
    assert f"request 2 token {last.position} read the value of token 8 of request 0, expected token " in told.sentence
    assert "of request 2: former tenant" in told.sentence


def test_wrong_slot() -> None:
    bench = Bench(tenants())
    step, row, last, head = second_tenant(bench)
    told = bench.replaced(step, row, last, head, bench.value(Token(1, 12), head))
    assert told.reason == "wrong slot"
    assert "read the value of token 12 of request 1, expected token " in told.sentence
    assert "of request 2: wrong slot" in told.sentence


def test_the_whole_row_of_another_slot() -> None:
    """Every head reads request 1's dictionary with request 2's queries: no single head could be blamed on a token."""
    bench = Bench(tenants())
    step, row, last = next(entry for entry in bench.rows() if entry[2].request == 2)
    theirs = pages_before(bench.timeline, bench.cursors, step)
    page = next(page for page in theirs.values() if page.tenant == 1)
    assert page.checkpoint is not None
    outputs = bench.outputs(last)
    ops = bench.truth.ops
    for head in range(4):
        clear, write = ops.clear[2, last.position, head], ops.write[2, last.position, head]
        holders = {} if clear else bench.truth.holders(1, page.checkpoint.position, head)
        held = {key: bench.value(Token(1, place), head) for key, place in holders.items()}
        if write:
            held[int(ops.key[2, last.position, head])] = bench.value(last, head)
        asked = bench.asked(last, head)
        read = [value for key, value in held.items() if asked in (key, ALL_KEYS)]
        total = torch.stack([torch.zeros(16).double(), *read]).sum(0)
        outputs[head] = (total / float(bench.truth.divisor[2, last.position, head])).to(outputs.dtype)
    told = bench.explain(step, row, outputs)
    assert told.reason == "wrong slot" and told.sentence.endswith(": wrong slot, another request's state")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_poison(number: float) -> None:
    bench = Bench(long_run())
    step, row, last = bench.rows()[6]
    outputs = bench.outputs(last)
    outputs[1, 3] = number
    told = bench.explain(step, row, outputs)
    assert (told.reason, told.head) == ("poison", 1)
    assert "head 1: request 0 token 11 read NaN or infinity, expected " in told.sentence
    assert told.sentence.endswith("poison (its ring should hold tokens 9 to 10 of request 0)")


def test_numbers_that_nobody_wrote_are_stale_poison() -> None:
    bench = Bench(long_run(seed=3))
    step, row, last = bench.rows()[6]
    told = bench.explain(step, row, bench.outputs(last) + 0.123)
    assert told.reason == "poison" and "poison, numbers that no token wrote, or wrong arithmetic" in told.sentence
    # where the poison is NaN, finite numbers cannot come from it
    bench = Bench(long_run(seed=4))
    told = bench.explain(step, row, bench.outputs(last) + 0.123)
    assert told.reason is None and told.sentence.endswith("no whole number: wrong arithmetic")


def test_numbers_beyond_all_integers_do_not_break_the_search() -> None:
    bench = Bench(long_run())
    step, row, last = bench.rows()[6]
    told = bench.explain(step, row, torch.full_like(bench.outputs(last), 3e38))
    assert told.reason is None or told.reason == "poison"


def test_zero_row() -> None:
    bench = Bench(long_run())
    step, row, last = bench.rows()[9]
    told = bench.explain(step, row, torch.zeros_like(bench.outputs(last)))
    assert told.reason == "zero" and "read zero in every head, expected " in told.sentence


def test_zero_head() -> None:
    """A head that gives nothing although every token it could lack would leave something there."""
    bench = Bench(long_run())

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        # what the head asks for is the row's own token, which no ring and no checkpoint could withhold
        own = bench.holder(last, head) == last.position
        return own and head == 0 and previous_holder(bench, last, head) is not None

    step, row, last, head = bench.first(wanted)
    told = bench.replaced(step, row, last, head, torch.zeros(16, dtype=torch.float64))
    assert told.reason == "zero" and f"read zero, expected token {last.position} of request 0: zero" in told.sentence


def test_wrong_head() -> None:
    bench = Bench(long_run())

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        return head == 0 and bench.holder(last, 0) is not None

    step, row, last, head = bench.first(wanted)
    holder = bench.holder(last, head)
    assert holder is not None
    told = bench.replaced(step, row, last, head, bench.value(Token(0, holder), 3))
    assert told.reason == "wrong head"
    assert f"read the value of token {holder} of request 0 in head 3, expected token {holder} of" in told.sentence


def test_wrong_decay() -> None:
    """The last token clears, and what stood before comes out all the same."""
    bench = Bench(long_run())
    ops = bench.truth.ops

    def wanted(step: int, row: int, last: Token, head: int) -> bool:
        clears = bool(ops.clear[0, last.position, head] and not ops.clear[0, last.position - 1, head])
        return clears and bench.asked(last, head) == ALL_KEYS and head == 3

    step, row, last, head = bench.first(wanted)
    held = bench.truth.holders(0, last.position - 1, head)
    outputs = bench.outputs(last)
    for each in range(4):
        if ops.clear[0, last.position, each]:
            before = bench.truth.holders(0, last.position - 1, each)
            left = [bench.value(Token(0, place), each) for place in before.values()]
            own = bench.value(last, each) if ops.write[0, last.position, each] else torch.zeros(16)
            asked = bench.asked(last, each)
            if asked == ALL_KEYS:
                total = sum(left, torch.zeros(16, dtype=torch.float64)) + own
            else:
                place = before.get(asked)
                total = torch.zeros(16).double() if place is None else bench.value(Token(0, place), each)
                total = total + (own if asked == int(ops.key[0, last.position, each]) else 0)
            outputs[each] = (total / float(bench.truth.divisor[0, last.position, each])).to(outputs.dtype)
    assert held
    told = bench.explain(step, row, outputs)
    assert told.reason == "wrong decay" and f"wrong decays of token {last.position} of request 0" in told.sentence


def test_two_tokens_at_once_are_told_from_the_sum() -> None:
    """Two values that no guess joins: one too much, one too little."""
    bench = Bench(tenants())
    step, row, last, head = bench.first(
        lambda s, r, last, h: last.request == 2 and bench.asked(last, h) == ALL_KEYS and h == 2 and s > 12
    )
    added, left_out = Token(0, 2), Token(1, bench.timeline.steps[step].rows[0].position - 3)
    right = torch.from_numpy(bench.truth.total[2, last.position, head]).double()
    told = bench.replaced(step, row, last, head, right + bench.value(added, head) - bench.value(left_out, head))
    assert set(told.read) == {added, left_out} and told.reason in ("former tenant", None)
    assert f"{added} added" in told.sentence and f"{left_out} left out" in told.sentence


def test_what_nothing_explains_is_said_so() -> None:
    bench = Bench(long_run())
    step, row, last = bench.rows()[6]
    outputs = bench.outputs(last)
    right = int(bench.truth.total[0, last.position, 2, 5])
    outputs[2, 5] = (right + 1) / float(bench.truth.divisor[0, last.position, 2])
    told = bench.explain(step, row, outputs)
    assert told.reason is None and told.read == ()
    assert f"read {right + 1} in lane 5 where {right} is right" in told.sentence
    assert told.sentence.endswith("no token, ring row or state explains it")


def test_a_state_is_read_key_by_key() -> None:
    """After a flush one key still holds what stood there before the ring's rows came."""
    bench = Bench(long_run())
    flushes = (entry for entry in bench.rows() if bench.write_pos[entry[0], entry[1]] == 3)
    step, row, last = next(entry for entry in flushes if entry[2].position > 12)
    head = 0
    state = bench.truth.states[0, last.position].float()
    first = last.position - 3
    key = int(bench.truth.ops.key[0, first, head])
    before = bench.truth.holders(0, first - 1, head)[key]
    now = bench.truth.holders(*last, head)[key]
    state[head, :, key] = bench.value(Token(0, before), head)
    told = bench.explainer.explain(step, row, Seen(None, state, (head,)))
    assert told.reason == "missing ring row" and told.expected == Token(0, now)
    assert (
        f"head 0: request 0 token {last.position} left under key {key} of its state the value of token {before} of "
        f"request 0, expected token {now} of request 0: missing ring row"
    ) in told.sentence


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("geometry", [TINY, Geometry(2, 4, 128, 16, 4)], ids=["K16", "K128"])
def test_rounded_sums_are_told_apart(geometry: Geometry, dtype: str) -> None:
    """Sums of six tokens are rounded in 16 bits: guesses are rounded the same way before they are compared."""
    bench = Bench(long_run(dtype=dtype, geometry=geometry))
    step, row, last, head = bench.first(
        lambda s, r, last, h: h == 2 and bench.write_pos[s, r] == 2 and len(bench.truth.holders(*last, h)) >= 4
    )
    lost = last.position - 1
    held = bench.truth.holders(*last, head)
    key = int(bench.truth.ops.key[0, lost, head])
    before = bench.truth.holders(0, lost - 1, head).get(key)
    places = [place for place in held.values() if place != lost] + ([] if before is None else [before])
    total = sum((bench.value(Token(0, place), head) for place in places), torch.zeros(16, dtype=torch.float64))
    told = bench.replaced(step, row, last, head, total)
    assert told.reason == "missing ring row" and told.read == (Token(0, lost),)
    assert f"read the sum without token {lost} of request 0, expected the sum of tokens " in told.sentence


def test_shared_prefixes_name_the_rows_own_request() -> None:
    """Two requests with the same tokens: the one that asks is the one that is named."""
    case = tenants()
    shared = replace(case.requests[2], shared_prefix_of=0, shared_prefix_len=3)
    bench = Bench(replace(case, requests=(*case.requests[:2], shared)))
    step, row, last, head = bench.first(
        lambda s, r, last, h: last.request == 2 and (bench.holder(last, h) or 0) > 2 and last.position > 5
    )
    told = bench.replaced(step, row, last, head, bench.value(Token(0, 1), head))
    assert "read the value of token 1 of request 2, expected" in told.sentence and told.reason != "former tenant"
