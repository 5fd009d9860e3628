"""Guesses at what a wrong row read: each says what every value head would have given, and blames something.

A guess starts from a checkpoint (what the state held after some token), adds ring rows as they were stored, runs
the row's own tokens and reads. Rows are added by their change (new value less the old one), as the ring holds them, or
run again, as if they had been computed on the wrong state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..oracles.memory import IntArray
from .pages import Token
from .what_if import Heads, Scene

MISSING, STALE, FLUSH, SLOT, FORMER, HEAD, DECAY = (
    "missing ring row",
    "stale ring row",
    "missed flush",
    "wrong slot",
    "former tenant",
    "wrong head",
    "wrong decay",
)

# longest stretch of ring rows that is tried
MOST_ROWS = 16


@dataclass(frozen=True)
class Guess:
    """One explanation: the reason, the tokens read too much or too little, and what it would have given.

    ``state`` [HV, keys, V] after the row; ``asked`` [HV] by its queries, which add up to ``total`` [HV, V]. ``what``
    was read wrongly: "ring row", "state", "token" (left out), "change" (of the row's own token), "head" or "decay".
    """

    reason: str
    what: str
    tokens: tuple[Token, ...]
    state: IntArray
    asked: IntArray
    total: IntArray


def guesses(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """All guesses but wrong heads, those that need the fewest things to go wrong first."""
    makers = (
        _missing_rows,
        _other_pages,
        _missed_flushes,
        _rows_too_many,
        _former_states,
        _wrong_decays,
        _extra_rows,
    )
    for make in makers:
        yield from make(heads, scene)


def wrong_heads(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """The row's key and query taken from another key head; then its whole answer from another value head."""
    ops, last, right = heads.ops, scene.last, heads.after(scene.last)
    asked = ops.asked[last]
    for other in range(1, len(heads.all)):
        wrong = (heads.all + other) % len(heads.all)
        state = heads.after(Token(last.request, last.position - 1))
        heads.run(state, last, ops.key[last][wrong])
        yield Guess(HEAD, "head", (last,), state, asked[wrong], heads.read(state, asked[wrong]))
        yield Guess(HEAD, "head", (last,), right[wrong], asked[wrong], heads.read(right, asked)[wrong])


def blamed(scene: Scene, token: Token) -> str:
    """The reason why a row that should not read a token does: by whose it is."""
    if token.request == scene.last.request:
        return STALE
    return FORMER if scene.was_tenant(token.request) else SLOT


def _guess(
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
    return _ended(heads, scene, reason, what, tokens, state)


def _ended(heads: Heads, scene: Scene, reason: str, what: str, tokens: Sequence[Token], state: IntArray) -> Guess:
    asked = heads.ops.asked[scene.last]
    return Guess(reason, what, tuple(tokens), state, asked, heads.read(state, asked))


def _missing_rows(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """The ring read too short, or without one of its rows: lost just now, or before the later ones were computed."""
    rows, beneath = scene.rows(), scene.beneath
    for lost in reversed(range(len(rows))):
        before, after = rows[:lost], rows[lost + 1 :]
        yield _guess(heads, scene, MISSING, rows[lost:], beneath=beneath, appended=before)
        if after:
            yield _guess(heads, scene, MISSING, rows[lost : lost + 1], beneath=beneath, appended=[*before, *after])
            yield _guess(heads, scene, MISSING, rows[lost : lost + 1], beneath=beneath, appended=before, run=after)
    for lost in reversed(range(len(rows))):
        # the row is read, but the current token does not take its value out
        state = heads.after(beneath)
        for token in rows[:lost]:
            heads.append(state, token)
        change = heads.change_on(state, scene.last)
        for token in rows[lost:]:
            heads.append(state, token)
        state[heads.ops.clear[scene.last]] = 0
        state[heads.all, heads.ops.key[scene.last]] += change
        yield _ended(heads, scene, MISSING, "change", rows[lost:], state)


def _missed_flushes(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """A checkpoint that ends too early, by up to two rings; or one that the row itself should have written.

    An older state of the request's own in another slot is the same to the eye.
    """
    earliest = max(scene.checkpointed - 2 * scene.buffer_len, 0)
    for end in range(scene.checkpointed - 1, earliest - 1, -1):
        beneath, lost = Token(scene.last.request, end - 1), scene.own(end, scene.checkpointed)
        yield _guess(heads, scene, FLUSH, lost, beneath=beneath, appended=scene.rows(), what="token")
        yield _guess(heads, scene, FLUSH, lost, beneath=beneath, run=scene.rows(), what="token")
    unwritten = scene.own(scene.checkpointed, scene.last.position + 1)
    yield _ended(heads, scene, FLUSH, "token", unwritten, heads.after(scene.beneath))


def _rows_too_many(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """The ring read beyond its pending rows, as it lies; or as it lay when the tenant came, its own rows behind."""
    rows = scene.rows()
    for end in range(scene.pending + 1, scene.buffer_len + 1):
        behind = _lying(scene.page.ring, scene.pending, end)
        if behind:
            yield _with_rows(heads, scene, behind, [*rows, *behind], ())
    for end in range(1, scene.buffer_len):
        before = _lying(scene.page.found, 0, end)
        if before and rows:
            yield _with_rows(heads, scene, before, [*before, *rows], ())
            yield _with_rows(heads, scene, before, before, rows)


def _extra_rows(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """One row of anybody on top; then whole stretches of anybody's tokens, up to a ring of them."""
    rows = scene.rows()
    for length in range(1, min(scene.buffer_len, MOST_ROWS) + 1):
        for token in scene.near():
            extra = [Token(token.request, token.position + further) for further in range(length)]
            if extra[-1].position < scene.known[token.request] and scene.last not in extra:
                yield _with_rows(heads, scene, extra, [*extra, *rows], ())
                if rows:
                    yield _with_rows(heads, scene, extra, extra, rows)


def _with_rows(
    heads: Heads, scene: Scene, extra: Sequence[Token], appended: Sequence[Token], run: Sequence[Token]
) -> Guess:
    return _guess(heads, scene, blamed(scene, extra[0]), extra, beneath=scene.beneath, appended=appended, run=run)


def _lying(ring: dict[int, Token], start: int, end: int) -> list[Token]:
    """Ring rows from ``start`` to ``end``; none at all where one of them was never written."""
    found = [ring[index] for index in range(start, end) if index in ring]
    return found if len(found) == end - start else []


def _other_pages(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """Another request's state, ring, or both, in place of the row's own."""
    for page in (scene.pages[slot] for slot in scene.pages if slot != scene.slot):
        if page.checkpoint is None or page.checkpoint.request == scene.last.request:
            continue
        state, told = page.checkpoint, (page.checkpoint,)
        yield _guess(heads, scene, SLOT, told, beneath=state, what="state")
        if scene.pending:
            yield _guess(heads, scene, SLOT, told, beneath=state, appended=scene.rows(), what="state")
        for end in range(1, scene.buffer_len):
            ring = _lying(page.ring, 0, end)
            if ring:
                yield _guess(heads, scene, SLOT, ring, beneath=state, appended=ring, what="state")
                yield _guess(heads, scene, SLOT, ring, beneath=scene.beneath, appended=ring)


def _former_states(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """A former tenant's state beneath the row's own tokens: not zeroed, not overwritten, or not moved away from."""
    for request, checkpoint in scene.page.former:
        told = () if checkpoint is None else (checkpoint,)
        reason = STALE if request == scene.last.request else FORMER
        own = scene.own(0, scene.start)
        yield _guess(heads, scene, reason, told, beneath=checkpoint, run=own, what="state")
        yield _guess(heads, scene, reason, told, beneath=checkpoint, appended=scene.rows(), what="state")


def _wrong_decays(heads: Heads, scene: Scene) -> Iterator[Guess]:
    """Clears that were left out, came once too often, or fell upon the wrong rows."""
    rows, last, clear = scene.rows(), scene.last, heads.ops.clear
    never = np.zeros(len(heads.all), np.bool_)
    state = heads.after(Token(last.request, last.position - 1))
    heads.append(state, last, never)
    yield _ended(heads, scene, DECAY, "decay", (last,), state)
    for forgiven in [*([row] for row in rows), rows]:
        state = heads.after(scene.beneath)
        for row in rows:
            heads.append(state, row, never if row in forgiven else None)
        heads.run(state, last)
        yield _ended(heads, scene, DECAY, "decay", forgiven, state)
    # since the last flush, in all rows so far
    cleared = [np.logical_or.reduce([clear[row] for row in rows[: end + 1]]) for end in range(len(rows))]
    state = heads.after(scene.beneath)
    for row, so_far in zip(rows, cleared, strict=True):
        heads.append(state, row, so_far)
    heads.run(state, last)
    yield _ended(heads, scene, DECAY, "decay", rows, state)
    # a row decayed by what came before it, not by what came after
    state = heads.after(scene.beneath)
    for row in rows:
        state[clear[row]] = 0
    for row, so_far in zip(rows, cleared, strict=True):
        state[heads.all, heads.ops.key[row]] += np.where(so_far[:, None], 0, heads.change(row))
    heads.run(state, last)
    yield _ended(heads, scene, DECAY, "decay", rows, state)
