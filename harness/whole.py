"""Whole numbers in outputs: which stored values may stand for an integer over its divisor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cases.exact_inputs import scales_exactly

# |o / scale - n| where 1 / sqrt(K) is no power of two, so that scale and products round. Observed: 6.5e-5 (3.5e-5
# for L <= 64) over 315 clean float32 runs of 300 tokens, replay and packed decode, K = 2, 3, 8, 24, 32, 128, 512 and
# L = 1, 4, 16, 64, 256, values up to 32 (exact_inputs.py keeps them so small for this limit); a misread changes n by 1
SCALED_SLACK = 1e-4


def slack(head_k_dim: int) -> float:
    """How far an output over its scale may lie from its integer: 0 where the scale is exact."""
    return 0.0 if scales_exactly(head_k_dim) else SCALED_SLACK


def shows(stored: Tensor, exact: Tensor, allowed: Tensor | float) -> Tensor:
    """True where ``stored`` is what a number within ``allowed`` of ``exact`` is rounded to in its dtype.

    stored [...] in the dtype under test; exact, allowed float64 that broadcast with it. Rounding keeps the order, so
    the numbers in question become all values between the ends' own. -0.0 is 0.0 here, and NaN is nothing.
    """
    lowest, highest = ((exact + side).to(stored.dtype) for side in (-1.0 * _wide(allowed), _wide(allowed)))
    return (lowest <= stored) & (stored <= highest)


def _wide(allowed: Tensor | float) -> Tensor:
    return torch.as_tensor(allowed, dtype=torch.float64)
