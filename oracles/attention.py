"""Full attention of Qwen3.5 over one whole sequence: output gate, normed heads, partial rotary positions, GQA."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from .checkpoint import TextConfig
from .norm import rms_norm


def gated_attention(x: Tensor, weights: Mapping[str, Tensor], config: TextConfig) -> Tensor:
    """Causal attention, x [T, hidden] to [T, hidden]; weights by their names inside ``self_attn``.

    Row layout of q_proj: per head, head_dim rows of the query and then head_dim rows of that head's output gate.
    """
    T, heads, head_dim = len(x), config.num_attention_heads, config.head_dim
    q, gate = linear(x, weights["q_proj.weight"]).view(T, heads, 2, head_dim).unbind(2)
    k = linear(x, weights["k_proj.weight"]).view(T, -1, head_dim)
    v = linear(x, weights["v_proj.weight"]).view(T, -1, head_dim)

    q = rotated(rms_norm(q, weights["q_norm.weight"], config.rms_norm_eps), config)
    k = rotated(rms_norm(k, weights["k_norm.weight"], config.rms_norm_eps), config)
    group = heads // config.num_key_value_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
    future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    attention = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
    o = torch.einsum("hqk,khd->qhd", attention, v) * torch.sigmoid(gate)
    return linear(o.reshape(T, heads * head_dim), weights["o_proj.weight"])


def rotated(x: Tensor, config: TextConfig) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim] at positions 0 .. T - 1; lanes from rotary_dim on pass through.

    Lane i is paired with lane i + rotary_dim / 2. Text has one position for all three M-RoPE axes, so their sections do
    not matter. Angles are float32 in every dtype: the float32 table of frequencies belongs to the model, and a finer
    one would move the float64 run away from what the weights were trained with.
    """
    half = config.rotary_dim // 2
    exponents = torch.arange(half, dtype=torch.float32, device=x.device) * 2 / config.rotary_dim
    frequencies = 1 / config.rope_theta**exponents
    positions = torch.arange(len(x), dtype=torch.float32, device=x.device)
    angles = (positions[:, None, None] * frequencies).to(x.dtype)
    cos, sin = torch.cos(angles), torch.sin(angles)
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
