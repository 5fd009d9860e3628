"""The two RMS norms of Qwen3.5."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm over the last axis of x [..., N]: the factor is 1 + weight, weight [N]."""
    return _unit_rms(x, eps) * (1 + weight)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., N], times weight [N] itself, and only then times silu(gate), gate [..., N]."""
    return _unit_rms(x, eps) * weight * silu(gate)


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
