"""Shapes of one Gated DeltaNet layer, by model name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Geometry:
    """Shape of one GDN layer.

    ``num_k_heads`` (H) key heads of ``head_k_dim`` (K) serve ``num_v_heads`` (HV) value heads of ``head_v_dim`` (V);
    value head ``hv`` reads key head ``hv // (HV // H)``. ``conv_width`` is the width of the causal convolution
    in front of q, k and v (1 in number of tokens, its state holds ``conv_width - 1`` of them).
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int

    @property
    def heads_per_key(self) -> int:
        """Value heads that share one key head, HV // H."""
        return self.num_v_heads // self.num_k_heads


# public configurations of Qwen3.5 text models: K = V = 128, H = 16, conv width 4
QWEN3_5: dict[str, Geometry] = {
    "qwen3.5-0.8b": Geometry(16, 16, 128, 128, 4),
    "qwen3.5-2b": Geometry(16, 16, 128, 128, 4),
    "qwen3.5-4b": Geometry(16, 32, 128, 128, 4),
    "qwen3.5-9b": Geometry(16, 32, 128, 128, 4),
    "qwen3.5-35b-a3b": Geometry(16, 32, 128, 128, 4),
    "qwen3.5-27b": Geometry(16, 48, 128, 128, 4),
    "qwen3.5-122b-a10b": Geometry(16, 64, 128, 128, 4),
    "qwen3.5-397b-a17b": Geometry(16, 64, 128, 128, 4),
}

# small shapes of our own: TINY for the kernel and schedule levels, ENGINE for checkpoints that a CPU engine can serve
TINY = Geometry(2, 4, 16, 16, 4)
ENGINE = Geometry(2, 4, 64, 64, 4)
# tokens: vLLM makes a block hold a page of GDN state, at the shapes of ENGINE and L up to 32
ENGINE_BLOCK = 32
