"""Why a row of the exact regime is wrong, in one sentence: whose value came out, whose should have, the likely reason.

Method: a wrong row is held against guesses (what_if.py), each of which says what every value head would have given if
one certain thing had been read instead. A guess that gives the whole row wins; else the one that gives most of the
wrong heads; else single values and sums of two are tried on a head. What nothing explains is said so, with numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.inputs import layer_inputs, poisons
from ..cases.timeline import Timeline
from ..oracles.memory import ALL_KEYS, IntArray, memory_truth
from .finding import FirstBad
from .pages import Token, pages_before
from .trace import Cursors
from .what_if import FLUSH, FORMER, MISSING, SLOT, Guess, Heads, Scene, guesses
from .whole import shows, slack

POISON, ZERO = "poison", "zero"
# tokens whose values and changes are tried two by two
MOST_PAIRED = 192


@dataclass(frozen=True)
class Explanation:
    """``sentence`` for a person; ``reason`` (None where nothing fits); the head it is about; tokens read and expected.

    ``read``: tokens whose value or ring row came out too much, or was left out where the reason is a missing one.
    ``expected``: the token whose value the head asked for, None where it asked for nothing or for the sum of all.
    """

    sentence: str
    reason: str | None
    head: int
    read: tuple[Token, ...]
    expected: Token | None


@dataclass(frozen=True)
class Seen:
    """What a row gave: ``outputs`` [HV, V] of its query, or ``state`` [HV, V, K] after its flush; heads that are wrong.

    One of the two is None. Dtypes are those of the run.
    """

    outputs: Tensor | None
    state: Tensor | None
    bad: tuple[int, ...]


class Explainer:
    """Explains rows of one Case. Dictionaries and pages are worked out from the Case and the right cursors alone."""

    def __init__(self, case: Case, timeline: Timeline, cursors: Cursors) -> None:
        self.case, self.timeline, self.cursors = case, timeline, cursors
        self.heads = Heads(memory_truth(layer_inputs(case)))

    def explain(self, step: int, row: int, seen: Seen) -> Explanation:
        """The sentence for one row, ``row`` in the order of the Case."""
        scene = self._scene(step, row)
        return _Row(self.heads, scene, seen, slack(self.case.geometry.head_k_dim), poisons(self.case)).explain(step, row)

    def _scene(self, step: int, row: int) -> Scene:
        entry = self.timeline.steps[step].rows[row]
        known: dict[int, int] = {}
        live: set[int] = set()
        for past in self.timeline.steps[: step + 1]:
            live -= {*past.preempt, *past.abort}
            for one in past.rows:
                known[one.request] = max(known.get(one.request, 0), one.position + 1)
                live.add(one.request)
            if past is not self.timeline.steps[step]:
                live -= set(past.finished)
        labels = self.cursors.rows.labels()
        pending = int(self.cursors.write_pos[labels.index((step, row))]) if (step, row) in labels else 0
        return Scene(
            last=Token(entry.request, entry.position),
            start=entry.num_computed,
            pending=pending,
            slot=entry.slot,
            pages=pages_before(self.timeline, self.cursors, step),
            known=known,
            live=frozenset(live),
            buffer_len=self.case.replay.buffer_len,
        )


class _Row:
    """One row under the lamp."""

    def __init__(self, heads: Heads, scene: Scene, seen: Seen, slack: float, poison: str) -> None:
        self.heads, self.scene, self.seen, self.slack, self.poison = heads, scene, seen, slack, poison
        ops, last = heads.ops, scene.last
        self.right = heads.after(last)
        self.asked = ops.asked[last] if seen.state is None else self._first_wrong_keys()
        self.total = heads.read(self.right, self.asked)
        self.divisor = heads.truth.divisor[last] if seen.state is None else np.ones(len(heads.heads))

    def explain(self, step: int, row: int) -> Explanation:
        for find in (self._poison, self._all_zero, self._guessed, self._value, self._sum_of_two, self._nothing):
            found = find()
            if found is not None:
                where = FirstBad(step, row, found.head, *self.scene.last)
                return Explanation(f"{where} {found.sentence}", found.reason, found.head, found.read, found.expected)
        raise AssertionError("unreachable: the last one always finds")

    # what was read

    def _stored(self, head: int) -> Tensor:
        """[V] as stored: the head's output, or the column of its first wrong key."""
        if self.seen.state is None:
            assert self.seen.outputs is not None
            return self.seen.outputs[head]
        return self.seen.state[head, :, int(self.asked[head])]

    def _gives(self, head: int, totals: IntArray) -> npt.NDArray[np.bool_]:
        """[...] of integers [..., V]: would this have been stored as what was read?"""
        divisor = float(self.divisor[head])
        allowed = self.slack / divisor if self.seen.state is None else 0.0
        return shows(self._stored(head), torch.from_numpy(totals / divisor), allowed).all(-1).numpy()

    def _given_by(self, guess: Guess) -> list[int]:
        """Heads whose output, or whole state, the guess gives."""
        if self.seen.state is None:
            return [head for head in self.heads.heads.tolist() if self._gives(head, guess.total[head])]
        used = torch.from_numpy(guess.state).transpose(1, 2)
        same = (self.seen.state[..., : self.heads.keys].double() == used).flatten(1).all(1)
        return same.nonzero()[:, 0].tolist()

    def _first_wrong_keys(self) -> IntArray:
        assert self.seen.state is not None
        used = torch.from_numpy(self.right).transpose(1, 2)
        wrong = (self.seen.state[..., : self.heads.keys].double() != used).any(1)
        # past the keys in use every column is zero
        return wrong.int().argmax(1).numpy()

    # the steps of the search, each None where it finds nothing

    def _poison(self) -> Explanation | None:
        for head in self.seen.bad:
            if not bool(torch.isfinite(self._stored(head)).all()):
                return self._told(head, "NaN or infinity", POISON, POISON + self._ring(), ())
        return None

    def _all_zero(self) -> Explanation | None:
        """A whole row of zeros is an output that was never computed; a single head's may be anything."""
        if self.seen.outputs is None or bool(self.seen.outputs.any()):
            return None
        if int(self.total.any(1).sum()) < 2:
            return None
        return self._told(self._best(self.seen.bad), "zero in every head", ZERO, ZERO, ())

    def _guessed(self) -> Explanation | None:
        best: tuple[int, Guess, list[int]] | None = None
        for guess in guesses(self.heads, self.scene):
            given = self._given_by(guess)
            bad = [head for head in self.seen.bad if head in given]
            if bad and (best is None or len(bad) > best[0]):
                best = len(bad), guess, bad
            if bad and len(given) == len(self.heads.heads):
                best = len(bad), guess, bad
                break
        if best is None:
            return None
        _, guess, bad = best
        head = self._best(bad)
        return self._told(head, self._came_out(head, guess), guess.reason, self._cause(head, guess), guess.tokens)

    def _value(self) -> Explanation | None:
        """A single value: of any token in any head."""
        for head in self._order(self.seen.bad):
            found = self._find_value(head)
            if found is not None:
                token, other = found
                reason = self._reason(head, token, other)
                named = f"the value of {token}" + ("" if other == head else f" in head {other}")
                return self._told(head, named, reason, reason, (token,))
        return self._zero()

    def _zero(self) -> Explanation | None:
        for head in self._order(self.seen.bad):
            if not bool(self._stored(head).any()):
                return self._told(head, "zero", ZERO, ZERO, ())
        return None

    def _sum_of_two(self) -> Explanation | None:
        """What was expected, and the value or change of one token or of two, more or less."""
        for head in self._order(self.seen.bad):
            terms, owners = self._terms(head)
            singles = self._gives(head, self.total[head] + terms)
            if singles.any():
                return self._more_or_less(head, [owners[int(singles.argmax())]])
            pairs = self._gives(head, self.total[head] + terms[:, None] + terms)
            if pairs.any():
                first, second = np.unravel_index(int(pairs.argmax()), pairs.shape)
                return self._more_or_less(head, [owners[int(first)], owners[int(second)]])
        return None

    def _nothing(self) -> Explanation:
        head = self._best(self.seen.bad)
        stored, divisor = self._stored(head).double().numpy(), float(self.divisor[head])
        lane = int(np.argmax(~self._lanes(head, self.total[head])))
        got, want = stored[lane] * divisor, int(self.total[head, lane])
        numbers = f"{got:g} in lane {lane} where {want} is right"
        whole = bool(self._lanes(head, np.rint(stored * divisor).astype(np.int64)).all())
        if whole:
            return self._told(head, numbers, None, "no token, ring row or state explains it", ())
        if self.poison == "stale":
            return self._told(head, numbers, POISON, f"{POISON}, numbers that no token wrote{self._ring()}", ())
        return self._told(head, numbers, None, "no whole number: wrong arithmetic", ())

    # words

    def _told(
        self, head: int, got: str, reason: str | None, cause: str, tokens: tuple[Token, ...]
    ) -> Explanation:
        verb = "read" if self.seen.state is None else f"left under key {int(self.asked[head])} of its state"
        expected = self._expected(head)
        return Explanation(f"{verb} {got}, expected {self._wanted(head)}: {cause}", reason, head, tokens, expected)

    def _expected(self, head: int) -> Token | None:
        if self.asked[head] == ALL_KEYS:
            return None
        holders = self.heads.truth.holders(*self.scene.last, head)
        position = holders.get(int(self.asked[head]))
        return None if position is None else Token(self.scene.last.request, position)

    def _wanted(self, head: int) -> str:
        if self.asked[head] == ALL_KEYS:
            held = sorted(self.heads.truth.holders(*self.scene.last, head).values())
            return f"the sum of {_named([Token(self.scene.last.request, position) for position in held])}"
        expected = self._expected(head)
        return "zero" if expected is None else str(expected)

    def _came_out(self, head: int, guess: Guess) -> str:
        """What a guess that fits means for one head: the token that came out, or what there was too much or little."""
        if self.asked[head] != ALL_KEYS:
            found = self._find_value(head, first=guess.tokens)
            if found is not None:
                token, other = found
                return f"the value of {token}" + ("" if other == head else f" in head {other}")
            if not bool(self._stored(head).any()):
                return "zero"
        if guess.reason in (MISSING, FLUSH):
            return f"the sum without {_named(guess.tokens)}"
        if guess.what == "ring row":
            return f"the ring row of {_named(guess.tokens)} on top"
        if guess.what == "state":
            return f"a state that ends with {_named(guess.tokens)}" if guess.tokens else "an empty state"
        return "what another head should"

    def _cause(self, head: int, guess: Guess) -> str:
        if guess.reason == FORMER:
            return f"former tenant's {guess.what}"
        if guess.reason == SLOT:
            return f"{SLOT}, another request's {guess.what}"
        lost = guess.reason in (MISSING, FLUSH) and self.asked[head] != ALL_KEYS
        if lost and self._expected(head) not in guess.tokens:
            return f"{guess.reason} of {_named(guess.tokens)}"
        return guess.reason

    def _more_or_less(self, head: int, tokens: list[Token]) -> Explanation:
        reason = self._reason(head, tokens[0], head)
        return self._told(head, f"{_named(tokens)} too much or too little", reason, reason, tuple(tokens))

    def _ring(self) -> str:
        scene = self.scene
        if not scene.pending:
            return " (its ring should be empty)"
        return f" (its ring should hold {_named(scene.own(scene.checkpointed, scene.start))})"

    # tokens

    def _reason(self, head: int, token: Token, other: int) -> str:
        """Why one token's value stands where another's should: by owner, and by where the expected one should be."""
        if other != head:
            return "wrong head"
        expected = self._expected(head)
        if token.request == self.scene.last.request and expected is not None and token.position < expected.position:
            before = self.heads.truth.holders(expected.request, expected.position - 1, head)
            if before.get(int(self.asked[head])) == token.position:
                return MISSING if expected.position >= self.scene.checkpointed else FLUSH
        return self.scene.owner(token)

    def _find_value(self, head: int, first: Sequence[Token] = ()) -> tuple[Token, int] | None:
        """The likeliest (token, head) whose value was read, the same head before others."""
        tokens = [*first, *self.scene.candidates()]
        for other in (head, *(h for h in self.heads.heads.tolist() if h != head)):
            values = np.stack([self.heads.ops.value[token][other] for token in tokens])
            same = self._gives(head, values)
            if same.any():
                return tokens[int(same.argmax())], other
        return None

    def _terms(self, head: int) -> tuple[IntArray, list[Token]]:
        """[M, V] numbers that may have come on top, and whose they are: values and changes, more and less."""
        tokens = self.scene.candidates()[:MOST_PAIRED]
        values = [sign * self.heads.ops.value[token][head] for token in tokens for sign in (1, -1)]
        changes = [sign * self.heads.change(token)[head] for token in tokens for sign in (1, -1)]
        twice = [token for token in tokens for _ in range(2)]
        return np.stack([*changes, *values]), [*twice, *twice]

    def _lanes(self, head: int, totals: IntArray) -> npt.NDArray[np.bool_]:
        divisor = float(self.divisor[head])
        allowed = self.slack / divisor if self.seen.state is None else 0.0
        return shows(self._stored(head), torch.from_numpy(totals / divisor), allowed).numpy()

    def _order(self, heads: Sequence[int]) -> list[int]:
        """Heads that ask for one key first: they name the token."""
        return sorted(heads, key=lambda head: (self.asked[head] == ALL_KEYS, head))

    def _best(self, heads: Sequence[int]) -> int:
        return self._order(heads)[0]


def _named(tokens: Sequence[Token]) -> str:
    """Tokens in words, stretches of positions joined: "tokens 6 to 8 of request 0, token 2 of request 1"."""
    if not tokens:
        return "nothing"
    parts: list[tuple[int, int, int]] = []
    for request, position in tokens:
        if parts and parts[-1][0] == request and parts[-1][2] + 1 == position:
            parts[-1] = request, parts[-1][1], position
        else:
            parts.append((request, position, position))
    words = []
    for request, first, last in parts:
        span = f"token {first}" if first == last else f"tokens {first} to {last}"
        words.append(f"{span} of request {request}")
    return ", ".join(words)
