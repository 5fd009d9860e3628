"""The mixture of experts of a Qwen3.5 MoE layer: a router's best few experts a token, beside one that all tokens share.

Every expert sees every token here, and the router's weights, zero for those not chosen, pick from what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .mlp import gated_mlp, mlp_shapes

FUSED_GATE_UP, FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


@dataclass(frozen=True)
class MoeConfig:
    """The fields of config.json that the mixture needs, by their names there.

    ``norm_topk_prob``: the chosen experts' probabilities are divided by their sum; so where the field is absent.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = True


def mixture_of_experts(x: Tensor, weights: Mapping[str, Tensor], config: MoeConfig) -> Tensor:
    """One layer's mixture, x [T, hidden] to [T, hidden]; weights by their names inside ``mlp``."""
    chosen = routing(linear(x, weights["gate.weight"]), config)
    shared = torch.sigmoid(linear(x, weights["shared_expert_gate.weight"])) * gated_mlp(x, weights, "shared_expert.")
    experts = (gated_mlp(x, weights, f"experts.{expert}.") for expert in range(config.num_experts))
    return sum((w[:, None] * out for w, out in zip(chosen.unbind(-1), experts, strict=True)), shared)


def routing(logits: Tensor, config: MoeConfig) -> Tensor:
    """What each expert's word weighs, [T, num_experts] from the router's logits: a softmax over all, of which the
    ``num_experts_per_tok`` largest stay."""
    probabilities = torch.softmax(logits, dim=-1)
    best, index = probabilities.topk(config.num_experts_per_tok, dim=-1)
    if config.norm_topk_prob:
        best = best / best.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, index, best)


def routing_margins(logits: Tensor, config: MoeConfig) -> Tensor:
    """How far the last expert chosen lies above the first one left out, [T] in the router's logits; inf for no such."""
    if config.num_experts_per_tok == config.num_experts:
        return torch.full_like(logits[:, 0], torch.inf)
    best = logits.topk(config.num_experts_per_tok + 1, dim=-1).values
    return best[:, -2] - best[:, -1]


def moe_shapes(hidden: int, config: MoeConfig) -> dict[str, tuple[int, ...]]:
    """Names inside ``mlp`` and shapes of one layer's tensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (config.num_experts, hidden),
        "shared_expert_gate.weight": (1, hidden),
    }
    widths = {f"experts.{expert}": config.moe_intermediate_size for expert in range(config.num_experts)}
    for name, width in (widths | {"shared_expert": config.shared_expert_intermediate_size}).items():
        shapes |= {f"{name}.{weight}": shape for weight, shape in mlp_shapes(hidden, width).items()}
    return shapes


def apart(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the checkpoint by the names of ``moe_shapes``; some checkpoints hold a layer's experts as one.

    ``experts.gate_up_proj`` [E, 2 F, hidden]: F rows of the gate and then F rows of up; ``experts.down_proj``
    [E, hidden, F].
    """
    experts = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
    if name.endswith(FUSED_GATE_UP):
        for index, both in enumerate(tensor.unbind(0)):
            gate, up = both.tensor_split(2, dim=0)
            yield f"{experts}.{index}.gate_proj.weight", gate
            yield f"{experts}.{index}.up_proj.weight", up
    elif name.endswith(FUSED_DOWN):
        for index, down in enumerate(tensor.unbind(0)):
            yield f"{experts}.{index}.down_proj.weight", down
    else:
        yield name, tensor
