"""The mixture of experts of a tiny Qwen3.5 MoE checkpoint: its fields of config.json and its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .draws import Draws

# router logits of this standard deviation: the chosen experts differ in weight, none takes all
ROUTER_GAIN = 2.0


@dataclass(frozen=True)
class Experts:
    """Sizes by their names in config.json; widths are multiples of the 32 that vLLM's CPU kernel asks for."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64


EXPERTS = Experts()


def with_experts(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of a dense text model as that of a mixture of experts."""
    kept = {name: value for name, value in config.items() if name != "intermediate_size"}
    return kept | asdict(EXPERTS)


def draw_experts(draws: Draws, prefix: str, hidden: int) -> None:
    """Router, experts and the gated shared expert of one layer, named as transformers saves them."""
    draws.linear(f"{prefix}.gate.weight", EXPERTS.num_experts, hidden, gain=ROUTER_GAIN)
    names = [f"experts.{expert}" for expert in range(EXPERTS.num_experts)]
    widths = dict.fromkeys(names, EXPERTS.moe_intermediate_size)
    widths["shared_expert"] = EXPERTS.shared_expert_intermediate_size
    for name, width in widths.items():
        draws.linear(f"{prefix}.{name}.gate_proj.weight", width, hidden)
        draws.linear(f"{prefix}.{name}.up_proj.weight", width, hidden)
        draws.linear(f"{prefix}.{name}.down_proj.weight", hidden, width)
    draws.linear(f"{prefix}.shared_expert_gate.weight", 1, hidden)
