"""The dictionaries of all value heads at once, and the row in question: what guesses (guesses.py) are played on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..oracles.memory import ALL_KEYS, NOBODY, BoolArray, IntArray, MemoryTruth
from .pages import Page, Token

# tokens that are tried in stretches and two by two: what is left out of long rings costs a name, never a verdict
MOST_NEAR = 64


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
        """The row's own page."""
        return self.pages[self.slot]

    @property
    def checkpointed(self) -> int:
        """Tokens below this position are in the checkpoint."""
        return self.start - self.pending

    @property
    def beneath(self) -> Token:
        """The checkpoint: the last token folded in, -1 as its position where there is none."""
        return Token(self.last.request, self.checkpointed - 1)

    def rows(self) -> list[Token]:
        """The tokens in the ring, oldest first."""
        return self.own(self.checkpointed, self.start)

    def own(self, first: int, end: int) -> list[Token]:
        """The row's request's tokens from ``first`` up to but not with ``end``."""
        return [Token(self.last.request, position) for position in range(first, end)]

    def candidates(self) -> list[Token]:
        """All tokens that could have been read, the likeliest first: own, former tenants', live ones, others."""
        order = [self.last.request, *(request for request, _ in self.page.former), *sorted(self.live), *self.known]
        requests = list(dict.fromkeys(order))
        return [Token(r, p) for r in requests for p in range(self.known.get(r, 0) - 1, -1, -1)]

    def near(self) -> list[Token]:
        """Candidates of the last two rings of each request, the latest that a ring could still hold."""
        reach = 2 * self.buffer_len + 1
        return [t for t in self.candidates() if self.known[t.request] - t.position <= reach][:MOST_NEAR]

    def was_tenant(self, request: int) -> bool:
        """Whether another request held the slot before."""
        return request != self.last.request and request in {former for former, _ in self.page.former}


class Heads:
    """The dictionaries of all value heads as integers [HV, keys, V], keys in use only."""

    def __init__(self, truth: MemoryTruth) -> None:
        self.truth, self.ops = truth, truth.ops
        self.keys = int(max(self.ops.key.max(), self.ops.asked.max())) + 1
        self.all = np.arange(self.ops.value.shape[2])
        self._changes: dict[Token, IntArray] = {}

    def after(self, token: Token | None) -> IntArray:
        """The right state after a token; None, or a position below 0, for an empty one."""
        count, lanes = self.ops.value.shape[2:]
        if token is None or token.position < 0:
            return np.zeros((count, self.keys, lanes), np.int64)
        holder = self.truth.holder[token.request, token.position, :, : self.keys]
        values: IntArray = self.ops.value[token.request][holder, self.all[:, None]]
        return np.where((holder != NOBODY)[..., None], values, 0)

    def change(self, token: Token) -> IntArray:
        """[HV, V]: what a token's ring row holds, its value less the one that it found under its key."""
        if token not in self._changes:
            before = self.after(Token(token.request, token.position - 1))
            self._changes[token] = self.change_on(before, token)
        return self._changes[token]

    def change_on(self, state: IntArray, token: Token) -> IntArray:
        """[HV, V]: the change that the token would make if it found ``state``."""
        found = np.where(self.ops.clear[token][:, None], 0, state[self.all, self.ops.key[token]])
        return np.where(self.ops.write[token][:, None], self.ops.value[token] - found, 0)

    def append(self, state: IntArray, token: Token, clear: BoolArray | None = None) -> None:
        """A ring row on whatever lies beneath: its decay, or ``clear`` [HV] in its place, then its change."""
        state[self.ops.clear[token] if clear is None else clear] = 0
        state[self.all, self.ops.key[token]] += self.change(token)

    def run(self, state: IntArray, token: Token, key: IntArray | None = None) -> None:
        """The token itself on whatever lies beneath; under ``key`` [HV] in place of its own."""
        state[self.ops.clear[token]] = 0
        key = self.ops.key[token] if key is None else key
        written = self.ops.write[token]
        state[self.all[written], key[written]] = self.ops.value[token][written]

    def read(self, state: IntArray, asked: IntArray) -> IntArray:
        """[HV, V]: the value under the key that each head's query asks for, or the sum of all."""
        one: IntArray = state[self.all, np.maximum(asked, 0)]
        return np.where((asked == ALL_KEYS)[:, None], state.sum(1), one)
