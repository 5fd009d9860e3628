"""Token ids of a Case whose answers do not hang on rounding."""

from __future__ import annotations

from dataclasses import replace

from ..cases.case import Case
from ..cases.inputs import token_ids
from ..oracles.qwen3_5 import Qwen3_5Oracle

# logits. A router's logits in float32 are off by at most 2.6e-5 (4,000 tokens in four layers), with each weight nudged
# as well by at most 5.9e-5 (2,300 tokens); a margin is the difference of two. Without it one Case of 60 tokens in 20
# would have a token for which two right answers exist
CLEAR = 2e-4
DRAWS = 100
# far from any seed that a Case has of its own
STRIDE = 1_000_000_007


class UnclearTokens(RuntimeError):
    """No draw was clear of near-ties; the message names the Case."""


def clear_tokens(case: Case, oracle: Qwen3_5Oracle, vocab_size: int) -> list[list[int]]:
    """``token_ids`` of the Case, in a mixture of experts drawn anew while a router hesitates over one of them.

    A schedule shows its faults with any tokens, and a near-tie between the last expert chosen and the first one left
    out excuses none: it is avoided, not judged. The same Case and checkpoint give the same tokens. Raises UnclearTokens
    after DRAWS draws.
    """
    for draw in range(DRAWS):
        inputs = replace(case.inputs, seed=case.inputs.seed + draw * STRIDE)
        tokens = token_ids(replace(case, inputs=inputs), vocab_size)
        if oracle.config.moe is None or all(is_clear(row[:-1], oracle) for row in tokens):
            return tokens
    raise UnclearTokens(f"case {case.id}: of {DRAWS} draws of its tokens none is clear of near-ties between experts")


def is_clear(tokens: list[int], oracle: Qwen3_5Oracle) -> bool:
    """No router hesitates; ``tokens`` are those that are computed."""
    return float(oracle.routing_margins(tokens).min()) >= CLEAR
