"""The gated MLP of Qwen3.5: of a dense layer, of one expert, of the expert that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.functional import linear, silu


def gated_mlp(x: Tensor, weights: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """down(silu(gate(x)) * up(x)), x [T, hidden] to [T, hidden]; the three weights by their names below ``prefix``."""
    gate = silu(linear(x, weights[f"{prefix}gate_proj.weight"]))
    return linear(gate * linear(x, weights[f"{prefix}up_proj.weight"]), weights[f"{prefix}down_proj.weight"])


def mlp_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the three weights."""
    return {"gate_proj.weight": (width, hidden), "up_proj.weight": (width, hidden), "down_proj.weight": (hidden, width)}
