"""Why a row of the exact regime is wrong, in one sentence: whose value came out, whose should have, the likely reason.

Method: a wrong row is held against guesses (guesses.py), each of which says what every value head would have given if
one certain thing had been read instead. A guess that gives the whole row wins; else the one that gives most of the
wrong heads; else single values and sums of two are tried on a head. What nothing explains is said so, with numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch

from ..cases.case import Case
from ..cases.inputs import layer_inputs, poisons
from ..cases.timeline import Timeline
from ..oracles.memory import IntArray, memory_truth
from .finding import FirstBad
from .guesses import DECAY, FLUSH, FORMER, HEAD, MISSING, SLOT, STALE, Guess, blamed, guesses, wrong_heads
from .pages import Token, pages_before
from .reading import Reading, Seen
from .trace import Cursors
from .what_if import Heads, Scene

POISON, ZERO = "poison", "zero"
# heads that sums of two are tried on
MOST_HEADS = 4


@dataclass(frozen=True)
class Explanation:
    """``sentence`` for a person; ``reason`` (None where nothing fits); the head it is about; tokens read and expected.

    ``read``: tokens whose value or ring row came out, or was left out where the reason is a missing one.
    ``expected``: the token whose value the head asked for, None where it asked for nothing or for the sum of all.
    """

    sentence: str
    reason: str | None
    head: int
    read: tuple[Token, ...]
    expected: Token | None


class Explainer:
    """Explains rows of one Case. Dictionaries and pages are worked out from the Case and the right cursors alone."""

    def __init__(self, case: Case, timeline: Timeline, cursors: Cursors) -> None:
        self.case, self.timeline, self.cursors = case, timeline, cursors
        self.heads = Heads(memory_truth(layer_inputs(case)))

    def explain(self, step: int, row: int, seen: Seen) -> Explanation:
        """The sentence for one row, ``row`` in the order of the Case."""
        found = _Row(self.heads, self._scene(step, row), seen, poisons(self.case)).explain()
        entry = self.timeline.steps[step].rows[row]
        where = FirstBad(step, row, found.head, entry.request, entry.position)
        return Explanation(f"{where} {found.sentence}", found.reason, found.head, found.read, found.expected)

    def _scene(self, step: int, row: int) -> Scene:
        entry = self.timeline.steps[step].rows[row]
        labels = self.cursors.rows.labels()
        pending = int(self.cursors.write_pos[labels.index((step, row))]) if (step, row) in labels else 0
        known, live = _computed(self.timeline, step)
        return Scene(
            last=Token(entry.request, entry.position),
            start=entry.num_computed,
            pending=pending,
            slot=entry.slot,
            pages=pages_before(self.timeline, self.cursors, step),
            known=known,
            live=live,
            buffer_len=self.case.replay.buffer_len,
        )


def _computed(timeline: Timeline, step: int) -> tuple[dict[int, int], frozenset[int]]:
    """Tokens computed by request when ``step`` ends, and the requests that hold a slot in it."""
    known: dict[int, int] = {}
    live: set[int] = set()
    for index, entry in enumerate(timeline.steps[: step + 1]):
        live -= {*entry.preempt, *entry.abort}
        for row in entry.rows:
            known[row.request] = max(known.get(row.request, 0), row.position + 1)
            live.add(row.request)
        if index < step:
            live -= set(entry.finished)
    return known, frozenset(live)


class _Term(NamedTuple):
    """A number that may have come on top of the right one: a token's value or change, more (1) or less (-1)."""

    token: Token
    sign: int


class _Row:
    """One row under the lamp."""

    def __init__(self, heads: Heads, scene: Scene, seen: Seen, poison: str) -> None:
        self.heads, self.scene, self.bad, self.poison = heads, scene, seen.bad, poison
        self.reading = Reading(heads, scene, seen)

    def explain(self) -> Explanation:
        found = self._not_finite() or self._all_zero()
        if found is None and all(self.reading.is_whole(head) for head in self.bad):
            every = chain(guesses(self.heads, self.scene), wrong_heads(self.heads, self.scene))
            found = self._guessed(every) or self._one_value() or self._zero() or self._sum_of_two()
        elif found is None:
            found = self._guessed(wrong_heads(self.heads, self.scene))
        return found or self._nothing()

    # the steps of the search, each None where it finds nothing

    def _not_finite(self) -> Explanation | None:
        for head in self.bad:
            if not bool(torch.isfinite(self.reading.stored(head)).all()):
                return self._told(head, "NaN or infinity", POISON, POISON + self._ring(), ())
        return None

    def _all_zero(self) -> Explanation | None:
        """A whole row of zeros is an output that was never computed; a single head's may be anything."""
        outputs = self.reading.seen.outputs
        if outputs is None or bool(outputs.any()) or int(self.reading.right.any(1).sum()) < 2:
            return None
        return self._told(self._order(self.bad)[0], "zero in every head", ZERO, ZERO, ())

    def _guessed(self, every: Iterable[Guess]) -> Explanation | None:
        most: tuple[int, Guess, list[int]] | None = None
        for guess in every:
            given = self.reading.given_by(guess)
            bad = [head for head in self.bad if head in given]
            if bad and len(given) == len(self.heads.all):
                return self._by_guess(guess, bad)
            if bad and (most is None or len(bad) > most[0]):
                most = len(bad), guess, bad
        return None if most is None else self._by_guess(*most[1:])

    def _by_guess(self, guess: Guess, bad: list[int]) -> Explanation:
        head = self._order(bad)[0]
        return self._told(head, self._came_out(head, guess), guess.reason, self._cause(head, guess), guess.tokens)

    def _one_value(self) -> Explanation | None:
        """The value of any token in any head."""
        for head in self._order(self.bad):
            found = self._find_value(head)
            if found is not None:
                token, other = found
                reason = HEAD if other != head else self._instead(head, token)
                cause = reason or "no single misread explains it"
                return self._told(head, _value(token, other, head), reason, cause, (token,))
        return None

    def _zero(self) -> Explanation | None:
        for head in self._order(self.bad):
            if not bool(self.reading.stored(head).any()):
                return self._told(head, "zero", ZERO, ZERO, ())
        return None

    def _sum_of_two(self) -> Explanation | None:
        """What was expected, and the value or change of one token or of two, more or less."""
        for head in self._order(self.bad)[:MOST_HEADS]:
            terms, numbers = self._terms(head)
            right = self.reading.right[head]
            for first in (None, *range(len(terms))):
                given = self.reading.gives(head, right + numbers + (0 if first is None else numbers[first]))
                if given.any():
                    found = [terms[int(given.argmax())]]
                    return self._by_terms(head, found if first is None else [terms[first], *found])
        return None

    def _nothing(self) -> Explanation:
        head = next((head for head in self._order(self.bad) if not self.reading.is_whole(head)), self.bad[0])
        got, right = self.reading.numbers(head), self.reading.right[head]
        lane = int(np.abs(got - right).argmax())
        numbers = f"{got[lane]:.9g} in lane {lane} where {right[lane]} is right"
        if self.reading.is_whole(head):
            return self._told(head, numbers, None, "no token, ring row or state explains it", ())
        fractions = got * self.reading.num_keys
        if bool((fractions == np.rint(fractions)).all()):
            return self._told(head, numbers, None, "parts of whole numbers: wrong scale or wrong key", ())
        if self.poison == "nan":
            return self._told(head, numbers, None, "no whole number: wrong arithmetic", ())
        cause = f"{POISON}, numbers that no token wrote, or wrong arithmetic{self._ring()}"
        return self._told(head, numbers, POISON, cause, ())

    # words

    def _told(self, head: int, got: str, reason: str | None, cause: str, tokens: tuple[Token, ...]) -> Explanation:
        key = int(self.reading.asked[head])
        verb = "read" if self.reading.is_output else f"left under key {key} of its state"
        sentence = f"{verb} {got}, expected {self._wanted(head)}: {cause}"
        return Explanation(sentence, reason, head, tokens, self._expected(head))

    def _expected(self, head: int) -> Token | None:
        if not self.reading.names_a_key(head):
            return None
        position = self.heads.truth.holders(*self.scene.last, head).get(int(self.reading.asked[head]))
        return None if position is None else Token(self.scene.last.request, position)

    def _wanted(self, head: int) -> str:
        if not self.reading.names_a_key(head):
            held = sorted(self.heads.truth.holders(*self.scene.last, head).values())
            named = _named([Token(self.scene.last.request, position) for position in held])
            return f"the sum of {named}" if held else "zero"
        expected = self._expected(head)
        return "zero" if expected is None else str(expected)

    def _came_out(self, head: int, guess: Guess) -> str:
        """What a guess that fits means for one head: the token that came out, or what there was too much or little."""
        if self.reading.names_a_key(head):
            found = self._find_value(head, first=guess.tokens)
            if found is not None:
                return _value(*found, head)
            if not bool(self.reading.stored(head).any()):
                return "zero"
        named = _named(guess.tokens)
        return {
            "token": f"the sum without {named}",
            "state": f"the state that {named} left",
            "change": f"its own token with a change worked out without {named}",
            "head": "what another head should",
            "decay": f"a sum with wrong decays of {named}",
        }.get(guess.what, f"the sum without {named}" if guess.reason == MISSING else f"{named} on top")

    def _cause(self, head: int, guess: Guess) -> str:
        if guess.reason == FORMER:
            return f"former tenant's {guess.what}"
        if guess.reason == SLOT:
            return f"{SLOT}, another request's {guess.what}"
        if guess.reason == FLUSH:
            return FLUSH + self._elsewhere(guess.tokens[0]) + self._unnamed(head, guess)
        if guess.reason == STALE and guess.what == "state":
            return f"{STALE}, an earlier state of its own"
        if guess.reason in (MISSING, DECAY):
            return guess.reason + self._unnamed(head, guess)
        return guess.reason

    def _unnamed(self, head: int, guess: Guess) -> str:
        """The tokens to blame, where the sentence has not named them yet."""
        named = not self.reading.names_a_key(head) or self._expected(head) in guess.tokens
        return "" if named else f" of {_named(guess.tokens)}"

    def _elsewhere(self, lost: Token) -> str:
        """Another slot with the very state that lacks ``lost`` and what follows: it may have been read instead."""
        older = Token(lost.request, lost.position - 1)
        slots = [s for s, page in self.scene.pages.items() if s != self.scene.slot and page.checkpoint == older]
        return f" (or its older state in slot {slots[0]})" if slots else ""

    def _by_terms(self, head: int, terms: list[_Term]) -> Explanation:
        words = [f"{term.token} {'added' if term.sign > 0 else 'left out'}" for term in terms]
        first = terms[0]
        reason = blamed(self.scene, first.token) if first.sign > 0 else self._left_out(first.token)
        tokens = tuple(term.token for term in terms)
        cause = reason or "no single misread explains it"
        return self._told(head, f"what it should with {' and '.join(words)}", reason, cause, tokens)

    def _ring(self) -> str:
        rows = self.scene.rows()
        return f" (its ring should {f'hold {_named(rows)}' if rows else 'be empty'})"

    # tokens

    def _instead(self, head: int, token: Token) -> str | None:
        """Why one token's value stands where another's should, by whose it is and by where the expected one lies."""
        expected = self._expected(head)
        if token.request == self.scene.last.request and expected is not None and token.position < expected.position:
            before = self.heads.truth.holders(expected.request, expected.position - 1, head)
            if before.get(int(self.reading.asked[head])) == token.position:
                return self._left_out(expected)
        return blamed(self.scene, token)

    def _left_out(self, token: Token) -> str | None:
        """Why a token is not there, by where it should be; None for the row's own and for those of others."""
        if token.request != self.scene.last.request or token.position >= self.scene.start:
            return None
        return MISSING if token.position >= self.scene.checkpointed else FLUSH

    def _find_value(self, head: int, first: Sequence[Token] = ()) -> tuple[Token, int] | None:
        """The likeliest (token, head) whose value was read, the same head before others."""
        tokens = [*first, *self.scene.candidates()]
        values = np.stack([self.heads.ops.value[token] for token in tokens])
        for other in (head, *(other for other in self.heads.all.tolist() if other != head)):
            same = self.reading.gives(head, values[:, other])
            if same.any():
                return tokens[int(same.argmax())], other
        return None

    def _terms(self, head: int) -> tuple[list[_Term], IntArray]:
        """Terms and their numbers [M, V]: changes first, as ring rows hold them, then values."""
        tokens = self.scene.near()
        terms = [_Term(token, sign) for token in tokens for sign in (1, -1)]
        changes = [term.sign * self.heads.change(term.token)[head] for term in terms]
        values = [term.sign * self.heads.ops.value[term.token][head] for term in terms]
        return terms * 2, np.stack([*changes, *values])

    def _order(self, heads: Sequence[int]) -> list[int]:
        """Heads that ask for one key first, and got something: they name the token."""

        def silence(head: int) -> tuple[bool, bool, int]:
            return not self.reading.names_a_key(head), not bool(self.reading.stored(head).any()), head

        return sorted(heads, key=silence)


def _value(token: Token, of_head: int, head: int) -> str:
    return f"the value of {token}" + ("" if of_head == head else f" in head {of_head}")


def _named(tokens: Sequence[Token]) -> str:
    """Tokens in words: "tokens 2, 6 to 8 and 11 of request 0, token 2 of request 1"."""
    words = []
    for request, group in groupby(tokens, key=lambda token: token.request):
        spans = list(_spans([token.position for token in group]))
        told = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
        many = "s" if len(spans) > 1 or spans[0][0] != spans[0][1] else ""
        listed = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
        words.append(f"token{many} {listed} of request {request}")
    return ", ".join(words) or "nothing"


def _spans(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of neighbours, first and last of each."""
    first = last = positions[0]
    for position in positions[1:]:
        if position != last + 1:
            yield first, last
            first = position
        last = position
    yield first, last
