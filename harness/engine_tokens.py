"""Token ids for a Case: what an engine is given to prefill and to be forced to, held against the Case."""

from __future__ import annotations

from collections.abc import Sequence

from ..cases.case import Case

Tokens = list[int]


class TokensError(ValueError):
    """Token ids that do not fit the Case; the message names the request."""


def check_tokens(case: Case, prompts: Sequence[Tokens], forced: Sequence[Tokens], vocab_size: int) -> None:
    """Raise TokensError unless there are as many token ids of each request as the Case has, all in the vocabulary."""
    for name, lists, length in (("prompts", prompts, "prompt_len"), ("forced", forced, "output_len")):
        if len(lists) != len(case.requests):
            raise TokensError(f"{name}: must hold a list for each of {len(case.requests)} requests, not {len(lists)}")
        for request, tokens in enumerate(lists):
            wanted = getattr(case.requests[request], length)
            if len(tokens) != wanted:
                raise TokensError(f"{name}[{request}]: must hold {length} = {wanted} tokens, not {len(tokens)}")
            if not all(0 <= token < vocab_size for token in tokens):
                raise TokensError(f"{name}[{request}]: tokens must be from 0 to {vocab_size - 1}")
