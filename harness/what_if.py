"""What a row would have given if it had read something else: guesses, played on the dictionaries of all heads at once.

A guess starts from a checkpoint (what the state held after some token), adds ring rows as they were stored, runs
the row's own tokens and reads. Rows are added by their change (new value less the old one), as the ring holds them, or
by their effect, as if they had been run on the wrong state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..oracles.memory import ALL_KEYS, NOBODY, IntArray, MemoryTruth
from .pages import Page, Token

MISSING, STALE, FLUSH = "missing ring row", "stale ring row", "missed flush"
SLOT, FORMER, HEAD = "wrong slot", "former tenant", "wrong head"


@dataclass(frozen=True)
class Guess:
    """One explanation: the reason, the tokens read too much or too little, and what it would have given.

    ``state`` [HV, keys, V] after the row; ``total`` [HV, V] what its query adds up to. ``what``: "ring row", "state" or
    "head", whatever was read wrongly.
    """

    reason: str
    what: str
    tokens: tuple[Token, ...]
    state: IntArray
    total: IntArray


@dataclass(frozen=True)
class Scene:
    """A row, its own page, the others, and the tokens that anybody had computed by the end of its step.

    ``start``: position of the row's first token; ``pending``: entries that its ring must hold; ``known`` tokens by
    request, those of requests that hold a slot at that time in ``live``.
    """

    last: Token
    start: int
    pending: int
    slot: int
    pages: dict[int, Page]
    known: dict[int, int]
    live: frozenset[int]
    buffer_len: int

    @property
    def page(self) -> Page:
        return self.pages[self.slot]

    @property
    def checkpointed(self) -> int:
        """Tokens below this position are in the checkpoint."""
        return self.start - self.pending

    def own(self, first: int, end: int) -> list[Token]:
        """The row's request's tokens from ``first`` up to but not with ``end``."""
        return [Token(self.last.request, position) for position in range(first, end)]

    def candidates(self) -> list[Token]:
        """All tokens that could have been read, the likeliest first: own, former tenants', live ones, others."""
        order = [self.last.request, *(request for request, _ in self.page.former), *sorted(self.live), *self.known]
        requests = list(dict.fromkeys(order))
        return [Token(r, p) for r in requests for p in range(self.known.get(r, 0) - 1, -1, -1)]

    def owner(self, token: Token) -> str:
        """The reason why a row that should not read the token does."""
        if token.request == self.last.request:
            return STALE
        return FORMER if token.request in {request for request, _ in self.page.former} else SLOT


class Heads:
    """The dictionaries of all value heads as integers [HV, keys, V], keys in use only."""

    def __init__(self, truth: MemoryTruth) -> None:
        self.truth, self.ops = truth, truth.ops
        self.keys = int(max(self.ops.key.max(), self.ops.asked.max())) + 1
        self.heads = np.arange(self.ops.value.shape[2])

    def after(self, token: Token | None) -> IntArray:
        """The right state after a token; None for an empty one."""
        count, lanes = self.ops.value.shape[2:]
        if token is None or token.position < 0:
            return np.zeros((count, self.keys, lanes), np.int64)
        holder = self.truth.holder[token.request, token.position, :, : self.keys]
        values: IntArray = self.ops.value[token.request][holder, self.heads[:, None]]
        return np.where((holder != NOBODY)[..., None], values, 0)

    def change(self, token: Token) -> IntArray:
        """[HV, V]: what a token's ring row holds, its value less the one that it found under its key."""
        found = self.after(Token(token.request, token.position - 1))[self.heads, self.ops.key[token]]
        found = np.where(self.ops.clear[token][:, None], 0, found)
        return np.where(self.ops.write[token][:, None], self.ops.value[token] - found, 0)

    def append(self, state: IntArray, token: Token) -> None:
        """A ring row on whatever lies beneath: its decay, then its change."""
        state[self.ops.clear[token]] = 0
        state[self.heads, self.ops.key[token]] += self.change(token)

    def run(self, state: IntArray, token: Token, key: IntArray | None = None) -> None:
        """The token itself on whatever lies beneath; ``key`` [HV] in place of its own."""
        state[self.ops.clear[token]] = 0
        key = self.ops.key[token] if key is None else key
        written = self.ops.write[token]
        state[self.heads[written], key[written]] = self.ops.value[token][written]

    def read(self, state: IntArray, asked: IntArray) -> IntArray:
        """[HV, V]: the value under the key that each head's query asks for, or the sum of all."""
        return np.where((asked == ALL_KEYS)[:, None], state.sum(1), state[self.heads, np.maximum(asked, 0)])


def guesses(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """All guesses, the simplest first."""
    for make in (_missing_rows, _missed_flushes, _rows_too_many, _other_pages, _former_states, _extra_rows, _heads):
        yield from make(heads, scene)


def _played(
    heads: Heads,
    scene: Scene,
    reason: str,
    tokens: Sequence[Token],
    *,
    beneath: Token | None,
    appended: Sequence[Token] = (),
    run: Sequence[Token] = (),
    what: str = "ring row",
) -> Guess:
    state = heads.after(beneath)
    for token in appended:
        heads.append(state, token)
    for token in (*run, *scene.own(scene.start, scene.last.position + 1)):
        heads.run(state, token)
    return Guess(reason, what, tuple(tokens), state, heads.read(state, heads.ops.asked[scene.last]))


def _beneath(scene: Scene) -> Token:
    return Token(scene.last.request, scene.checkpointed - 1)


def _pending(scene: Scene) -> list[Token]:
    return scene.own(scene.checkpointed, scene.start)


def _missing_rows(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """The ring read too short, or without one of its rows: lost just now, or before the later ones were computed."""
    rows, beneath = _pending(scene), _beneath(scene)
    for lost in reversed(range(len(rows))):
        before, after = rows[:lost], rows[lost + 1 :]
        yield _played(heads, scene, MISSING, rows[lost:], beneath=beneath, appended=before)
        if after:
            yield _played(heads, scene, MISSING, rows[lost : lost + 1], beneath=beneath, appended=[*before, *after])
            yield _played(heads, scene, MISSING, rows[lost : lost + 1], beneath=beneath, appended=before, run=after)


def _missed_flushes(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """A checkpoint that ends too early, by up to two rings."""
    earliest = max(scene.checkpointed - 2 * scene.buffer_len, 0)
    for end in range(scene.checkpointed - 1, earliest - 1, -1):
        beneath, lost = Token(scene.last.request, end - 1), scene.own(end, scene.checkpointed)
        yield _played(heads, scene, FLUSH, lost, beneath=beneath, appended=_pending(scene), what="token")
        yield _played(heads, scene, FLUSH, lost, beneath=beneath, run=_pending(scene), what="token")


def _rows_too_many(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """The ring read beyond its pending rows, as it lies; or as it lay when the tenant came, its own rows behind."""
    for end in range(scene.pending + 1, scene.buffer_len + 1):
        behind = _lying(scene.page.ring, scene.pending, end)
        if behind:
            yield from _with_rows(heads, scene, behind, [*_pending(scene), *behind], ())
    for end in range(1, scene.buffer_len):
        before = _lying(scene.page.found, 0, end)
        if before and scene.pending:
            yield from _with_rows(heads, scene, before, [*before, *_pending(scene)], ())
            yield from _with_rows(heads, scene, before, before, _pending(scene))


def _extra_rows(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """One row of anybody on top; then whole stretches of anybody's tokens, up to a ring of them."""
    known = scene.candidates()
    for length in range(1, scene.buffer_len + 1):
        for token in known:
            extra = [Token(token.request, token.position + further) for further in range(length)]
            if extra[-1].position < scene.known[token.request] and scene.last not in extra:
                yield from _with_rows(heads, scene, extra, [*extra, *_pending(scene)], ())
                if scene.pending:
                    yield from _with_rows(heads, scene, extra, extra, _pending(scene))


def _with_rows(
    heads: Heads, scene: Scene, extra: list[Token], appended: list[Token], run: Sequence[Token]
) -> Iterator[Guess]:
    reason = scene.owner(extra[0])
    yield _played(heads, scene, reason, extra, beneath=_beneath(scene), appended=appended, run=run)


def _lying(ring: dict[int, Token], start: int, end: int) -> list[Token]:
    """Ring rows from ``start`` to ``end``; none at all where one of them was never written."""
    found = [ring[index] for index in range(start, end) if index in ring]
    return found if len(found) == end - start else []


def _other_pages(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """Another slot's state, ring, or both, in place of the row's own."""
    for slot, page in scene.pages.items():
        if slot == scene.slot or page.tenant is None:
            continue
        told = () if page.checkpoint is None else (page.checkpoint,)
        rings = [ring for end in range(1, scene.buffer_len) if (ring := _lying(page.ring, 0, end))]
        yield _played(heads, scene, SLOT, told, beneath=page.checkpoint, what="state")
        for ring in rings:
            yield _played(heads, scene, SLOT, ring, beneath=page.checkpoint, appended=ring, what="state")
            yield _played(heads, scene, SLOT, ring, beneath=_beneath(scene), appended=ring)
        yield _played(heads, scene, SLOT, told, beneath=page.checkpoint, appended=_pending(scene), what="state")


def _former_states(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """A former tenant's state beneath the row's own tokens: not zeroed, not overwritten, or not moved away from."""
    for request, checkpoint in scene.page.former:
        told = () if checkpoint is None else (checkpoint,)
        reason = STALE if request == scene.last.request else FORMER
        own = scene.own(0, scene.start)
        yield _played(heads, scene, reason, told, beneath=checkpoint, run=own, what="state")
        yield _played(heads, scene, reason, told, beneath=checkpoint, appended=_pending(scene), what="state")


def _heads(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """The row's keys and queries taken from another key head; then its whole answer from another value head."""
    ops, last = heads.ops, scene.last
    count = len(heads.heads)
    for other in range(1, count):
        wrong = (heads.heads + other) % count
        state = heads.after(Token(last.request, scene.start - 1))
        for token in scene.own(scene.start, last.position):
            heads.run(state, token)
        heads.run(state, last, ops.key[last][wrong])
        yield Guess(HEAD, "head", (last,), state, heads.read(state, ops.asked[last][wrong]))
    right = heads.after(last)
    for other in range(1, count):
        wrong = (heads.heads + other) % count
        yield Guess(HEAD, "head", (last,), right[wrong], heads.read(right, ops.asked[last])[wrong])
