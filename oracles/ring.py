"""The replay ring as a ledger: which token positions each request's state holds, in plain integers.

A request's state is a checkpoint (all tokens below some position, folded in) and a ring (the tokens after them, kept
apart). The ledger follows both token by token and never takes a remainder: the next write position is the number of
tokens it sees pending, so it checks the closed cursor formula instead of repeating it.
"""

from __future__ import annotations

from dataclasses import dataclass


class LedgerError(ValueError):
    """A call that would lose, repeat or mix up tokens; the message says request, what is held, what was expected."""


@dataclass(frozen=True)
class LedgerRow:
    """What one decode row must find and do. ``checkpointed`` and ``pending`` describe the state before this token.

    write_pos: index of this token in the ring = number of pending tokens. is_flush: 1 if the token and all pending
    ones are folded into the checkpoint, 0 if the token is appended. checkpointed: tokens 0 .. checkpointed - 1 are in
    the checkpoint. pending: positions of the tokens in the ring, oldest first.
    """

    write_pos: int
    is_flush: int
    checkpointed: int
    pending: tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """State of one request: tokens below ``checkpointed`` folded in, ``pending`` positions in the ring.

    prefill_len: tokens handed to prefill at the latest (re)admission; None until the first row after a prefix hit.
    """

    checkpointed: int
    pending: tuple[int, ...]
    prefill_len: int | None

    @property
    def num_tokens(self) -> int:
        """Length of the prefix that checkpoint and ring hold together."""
        return self.checkpointed + len(self.pending)

    def __str__(self) -> str:
        ring = f"{list(self.pending)} pending" if self.pending else "nothing pending"
        return f"{self.checkpointed} tokens checkpointed, {ring}"


class RingLedger:
    """All requests' checkpoints and rings. buffer_len: ring length in tokens, at least 1.

    align_block: tokens per block in prefix-caching "align" mode (exact state at each block's end), None otherwise.
    A refused call leaves the ledger as it was.
    """

    def __init__(self, buffer_len: int, align_block: int | None) -> None:
        """Raises LedgerError for a size below 1."""
        if buffer_len < 1:
            raise LedgerError(f"buffer_len must be at least 1, got {buffer_len}")
        if align_block is not None and align_block < 1:
            raise LedgerError(f"align_block must be None or at least 1, got {align_block}")
        self.buffer_len = buffer_len
        self.align_block = align_block
        self._held: dict[int, Holding] = {}

    def held(self, request: int) -> Holding | None:
        """What the request's state holds now; None if it has none."""
        return self._held.get(request)

    def prefill(self, request: int, start: int, num_tokens: int, prefill_len: int) -> None:
        """Run tokens start .. start + num_tokens - 1 as a prefill chunk: all of them end in the checkpoint.

        start 0 is a (re)admission and forgets whatever was held. Raises LedgerError if a later chunk does not continue
        what is held, or if a chunk reaches beyond prefill_len (so none can start over a ring with pending tokens).
        """
        if num_tokens < 1 or start < 0 or start + num_tokens > prefill_len:
            raise LedgerError(
                f"request {request}: prefill chunk of {num_tokens} tokens at {start} "
                f"does not lie within the {prefill_len} tokens handed to prefill"
            )
        if start > 0:
            self._continued(request, start, prefill_len)
        self._held[request] = Holding(start + num_tokens, (), prefill_len)

    def decode(self, request: int, num_computed: int, prefill_len: int) -> LedgerRow:
        """Run the one token at position num_computed through the decode kernel and say what the row must be.

        A token below prefill_len is a leftover one-token prefill chunk: it is folded into the checkpoint at once.
        Raises LedgerError unless checkpoint, pending and this token are exactly the prefix 0 .. num_computed.
        """
        held = self._continued(request, num_computed, prefill_len)
        fills_ring = len(held.pending) + 1 == self.buffer_len
        is_flush = num_computed < prefill_len or fills_ring or self._ends_block(num_computed)
        if is_flush:
            self._held[request] = Holding(num_computed + 1, (), prefill_len)
        else:
            self._held[request] = Holding(held.checkpointed, (*held.pending, num_computed), prefill_len)
        return LedgerRow(len(held.pending), int(is_flush), held.checkpointed, held.pending)

    def adopt(self, request: int, num_computed: int) -> None:
        """Start the request from a prefix hit: an exact state of its first num_computed tokens.

        Raises LedgerError outside align mode, inside a block, and for a request that still holds state.
        """
        if self.align_block is None:
            raise LedgerError(f"request {request}: a prefix hit needs align mode, align_block is None")
        if num_computed < 1 or num_computed % self.align_block:
            raise LedgerError(
                f"request {request}: prefix hit of {num_computed} tokens, "
                f"expected a positive multiple of the block of {self.align_block}"
            )
        if (held := self._held.get(request)) is not None:
            raise LedgerError(f"request {request}: prefix hit on live state ({held}), expected release first")
        self._held[request] = Holding(num_computed, (), None)

    def release(self, request: int) -> None:
        """Forget the request's state (finish, abort, preemption). A request that never ran holds nothing: allowed."""
        self._held.pop(request, None)

    def _ends_block(self, position: int) -> bool:
        return self.align_block is not None and (position + 1) % self.align_block == 0

    def _continued(self, request: int, num_computed: int, prefill_len: int) -> Holding:
        """The holding that position num_computed continues; LedgerError if it does not."""
        held = self._held.get(request)
        if held is None:
            raise LedgerError(
                f"request {request}: no state is held, expected the {num_computed} tokens before position "
                f"{num_computed}; a first chunk, even of one token, is a prefill at start 0"
            )
        if held.num_tokens != num_computed or held.pending != tuple(range(held.checkpointed, num_computed)):
            raise LedgerError(
                f"request {request}: {held}: {held.num_tokens} tokens, expected exactly the {num_computed} "
                f"before position {num_computed}"
            )
        if held.prefill_len not in (None, prefill_len):
            raise LedgerError(
                f"request {request}: prefill_len {prefill_len}, expected {held.prefill_len} as at its latest admission"
            )
        return held
