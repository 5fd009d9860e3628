"""KV cache blocks as vLLM hands them out, without prefix caching: who gets some, who has to give way."""

from __future__ import annotations

from collections.abc import Sequence

# Qwen3.5 has three GDN layers to each attention layer, which vLLM keeps as four groups of layers: a request holds a
# block of state in each of the three and as many blocks of the fourth as its tokens fill
STATE_BLOCKS = 3


class Blocks:
    """``num_blocks`` blocks, the NULL block among them; one of attention holds ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = num_blocks - 1
        self.held: dict[int, int] = {}

    def needed(self, tokens: int) -> int:
        """Blocks of a request of that many tokens."""
        return STATE_BLOCKS + -(-tokens // self.block_size)

    def schedule(self, running: Sequence[tuple[int, int]]) -> list[int]:
        """Give running (request, tokens after the step) what they lack, in order; who gave way for it, first one first.

        Where blocks run out the last one gives all of its own back, whoever asks: vLLM preempts it.
        """
        left, gave_way = list(running), []
        index = 0
        while index < len(left):
            request, tokens = left[index]
            if self._take(request, tokens):
                index += 1
                continue
            last, _ = left.pop()
            self.release(last)
            gave_way.append(last)
        return gave_way

    def admit(self, request: int, known: int, tokens: int) -> bool:
        """Give a waiting request blocks for its first ``tokens``; not unless all ``known`` ones would fit now."""
        return self.needed(known) <= self.free and self._take(request, tokens)

    def release(self, request: int) -> None:
        """Take back all that a request holds."""
        self.free += self.held.pop(request, 0)

    def _take(self, request: int, tokens: int) -> bool:
        held = self.held.get(request, 0)
        more = max(self.needed(tokens) - held, 0)
        if more > self.free:
            return False
        self.free -= more
        self.held[request] = held + more
        return True
