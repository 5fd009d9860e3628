"""Where a prefill chunk may end in "align" mode: state is cached at block boundaries, where a chunk or decode ends."""

from __future__ import annotations

from collections.abc import Callable

# tokens granted to a chunk: (first token, tokens asked for, prompt tokens, known tokens, tokens of a block)
Split = Callable[[int, int, int, int, int], int]


def may_end(start: int, end: int, known: int, block: int) -> bool:
    """Whether a chunk from ``start`` may end at ``end``: on a boundary, or in the block of the last known token.

    Of that block no state is needed before the request has all of it, by a chunk or by a decode.
    """
    return end % block == 0 or start >= (known - 1) // block * block


def split_as_vllm(start: int, asked: int, prompt_len: int, known: int, block: int) -> int:
    """What vLLM's scheduler grants where a step has room for a block (Scheduler._mamba_block_aligned_split, 0.32).

    A chunk that ends before the prefill does ends on a boundary; where none lies in it, nothing is granted. One that
    ends the prefill does not run past the last boundary that leaves a token to compute. A resumed request decodes its
    last known token as if it had just been sampled.
    """
    prefill_end = max(prompt_len, known - 1)
    if start >= prefill_end:
        return asked
    end = start + asked
    if end < prefill_end:
        end = end // block * block
    stops = [(known - 1) // block * block]
    if start % block:
        stops.append(start + block - start % block)
    return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)


def split_in_last_block(start: int, asked: int, prompt_len: int, known: int, block: int) -> int:
    """The size nearest to ``asked`` that ends on a boundary or lies in the last partial block, in any pieces.

    That is what is left of vLLM's rule where a step has less room than a block.
    """
    last = known // block * block
    if start >= last:
        return asked
    return max((start + asked) // block, start // block + 1) * block - start


def next_split(split: Split, start: int, asked: int, prompt_len: int, known: int, block: int) -> int:
    """What ``split`` grants, or where that is nothing, what it grants up to the next boundary or the end."""
    granted = split(start, asked, prompt_len, known, block)
    if granted:
        return granted
    boundary = start + block - start % block
    return split(start, min(boundary, known) - start, prompt_len, known, block)
