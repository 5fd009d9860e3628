"""A whole Qwen3.5 language model, sequential, from a safetensors checkpoint: the engine's answers are held against it.

Gated DeltaNet layers go token by token through ``recurrence``; what has no state (projections, norms, MLP) and causal
attention are plain dense formulas over the whole sequence. Weights are cast up once; nothing is rounded afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from .attention import gated_attention
from .checkpoint import LINEAR, OracleError, TextConfig, read_config, read_tensors
from .mlp import gated_mlp
from .moe import mixture_of_experts, routing_margins
from .norm import gated_rms_norm, rms_norm
from .recurrence import gdn_outputs

__all__ = ["OracleError", "Qwen3_5Oracle", "TextConfig"]


@dataclass(frozen=True)
class Qwen3_5Oracle:
    """The model: configuration and tensors by their names in the checkpoint, all of one dtype."""

    config: TextConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def load(cls, path: str | PathLike[str], dtype: torch.dtype = torch.float32) -> Qwen3_5Oracle:
        """Read a directory with config.json and model*.safetensors; dtype float32 or float64.

        Text models and the language part of multimodal ones, dense or with a mixture of experts. Raises OracleError
        (one line) for what the oracle does not implement: other model types, RoPE scaling, missing or unknown tensors.
        """
        if dtype not in (torch.float32, torch.float64):
            raise OracleError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        config = read_config(Path(path))
        return cls(config, read_tensors(Path(path), config, dtype))

    def nudged(self, seed: int) -> Qwen3_5Oracle:
        """The model in float32 with each weight one unit in the last place up or down, drawn from ``seed``.

        What it gives differs from the float64 model's answers as any float32 evaluation of them may.
        """
        generator = torch.Generator().manual_seed(seed)
        moved = {}
        for name, tensor in self.tensors.items():
            single = tensor.float()
            up = torch.randint(0, 2, single.shape, generator=generator, dtype=torch.bool)
            moved[name] = torch.nextafter(single, torch.where(up, torch.inf, -torch.inf))
        return Qwen3_5Oracle(self.config, moved)

    def log_probs(self, tokens: Sequence[int]) -> Tensor:
        """Teacher-forced log-probabilities [T, vocab]: row t is the distribution of the token after tokens[: t + 1].

        In the dtype of the model. Raises OracleError for an empty sequence and for ids outside the vocabulary.
        """
        x = self._embedded(tokens)
        for index in range(self.config.num_hidden_layers):
            x = self._mixed(x, index)
            x = x + self._mlp(self._mlp_input(x, index), index)
        x = rms_norm(x, self.tensors["model.norm.weight"], self.config.rms_norm_eps)
        head = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
        return torch.log_softmax(linear(x, self.tensors[head]), dim=-1)

    def routing_margins(self, tokens: Sequence[int]) -> Tensor:
        """How clear each token's choice of experts is, [T]: the smallest margin over the layers, in logits.

        Where it is as small as rounding, two right evaluations may choose other experts and differ by nats. inf in a
        dense model. Raises OracleError as log_probs does.
        """
        x = self._embedded(tokens)
        margins = torch.full_like(x[:, 0], torch.inf)
        if self.config.moe is None:
            return margins
        for index in range(self.config.num_hidden_layers):
            x = self._mixed(x, index)
            normed = self._mlp_input(x, index)
            logits = linear(normed, self.tensors[f"model.layers.{index}.mlp.gate.weight"])
            margins = torch.minimum(margins, routing_margins(logits, self.config.moe))
            x = x + self._mlp(normed, index)
        return margins

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        vocab = self.config.vocab_size
        if len(tokens) == 0:
            raise OracleError("tokens must hold at least one id, got none")
        for position, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise OracleError(f"tokens[{position}] must be from 0 to {vocab - 1}, got {token}")
        return self.tensors["model.embed_tokens.weight"][torch.tensor(tokens)]

    def _mixed(self, x: Tensor, index: int) -> Tensor:
        """The mixer of one layer on its normed input, added to it; x [T, hidden]."""
        normed = rms_norm(x, self.tensors[f"model.layers.{index}.input_layernorm.weight"], self.config.rms_norm_eps)
        if self.config.layer_types[index] == LINEAR:
            return x + gated_delta_net(normed, self._below(f"model.layers.{index}.linear_attn."), self.config)
        return x + gated_attention(normed, self._below(f"model.layers.{index}.self_attn."), self.config)

    def _mlp_input(self, x: Tensor, index: int) -> Tensor:
        weight = self.tensors[f"model.layers.{index}.post_attention_layernorm.weight"]
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def _mlp(self, normed: Tensor, index: int) -> Tensor:
        """What the MLP or the experts of one layer add; ``normed`` [T, hidden]."""
        weights = self._below(f"model.layers.{index}.mlp.")
        if self.config.moe is None:
            return gated_mlp(normed, weights)
        return mixture_of_experts(normed, weights, self.config.moe)

    def _below(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names start with ``prefix``, by the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


def gated_delta_net(x: Tensor, weights: Mapping[str, Tensor], config: TextConfig) -> Tensor:
    """A GDN layer over one sequence, x [T, hidden] to [T, hidden]; weights by their names inside ``linear_attn``."""
    T, HV = len(x), config.linear_num_value_heads
    qkv = silu(causal_conv1d(linear(x, weights["in_proj_qkv.weight"]), weights["conv1d.weight"]))
    q, k, v = qkv.tensor_split([config.key_dim, 2 * config.key_dim], dim=-1)
    o = gdn_outputs(
        q.reshape(1, T, -1, config.linear_key_head_dim),
        k.reshape(1, T, -1, config.linear_key_head_dim),
        v.reshape(1, T, HV, -1),
        linear(x, weights["in_proj_a.weight"])[None],
        linear(x, weights["in_proj_b.weight"])[None],
        weights["A_log"],
        weights["dt_bias"],
        dtype=x.dtype,
    )[0]
    z = linear(x, weights["in_proj_z.weight"]).view(T, HV, -1)
    o = gated_rms_norm(o, z, weights["norm.weight"], config.rms_norm_eps)
    return linear(o.reshape(T, -1), weights["out_proj.weight"])


def causal_conv1d(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution of x [T, C] with weight [C, 1, width]: the last tap meets the current token."""
    width = weight.shape[-1]
    padded = pad(x, (0, 0, width - 1, 0))
    return sum((padded[tap : tap + len(x)] * weight[:, 0, tap] for tap in range(width)), torch.zeros_like(x))
