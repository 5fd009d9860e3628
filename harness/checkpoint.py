"""Tiny seeded Qwen3.5 checkpoints whose recurrent state matters, kept in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..cases.geometry import Geometry
from .architectures import DEFAULT_ARCHITECTURE, Architecture, known_architecture
from .checkpoint_moe import draw_experts, with_experts
from .checkpoint_vision import with_tower, with_vision
from .draws import Draws

# goes into the name: raise it whenever the bytes of a checkpoint change
VERSION = 1
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class Shape:
    """The fixed part of the model: three GDN layers, one full attention layer, sizes a CPU serves in milliseconds.

    The attention layer is wide on purpose: vLLM's block is as many tokens as fill a page of GDN state, so a
    large key/value row keeps blocks short and lets short prompts cross them.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 128

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Every fourth layer is full attention, as in the published models."""
        return tuple(
            "linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(self.num_hidden_layers)
        )


SHAPE = Shape()
VOCAB_SIZE = SHAPE.vocab_size


def tiny_checkpoint(
    geometry: Geometry, seed: int = 0, cache_dir: Path | None = None, architecture: str = DEFAULT_ARCHITECTURE
) -> Path:
    """Path of a directory with config.json and model.safetensors (float32) for ``geometry``, made on first use.

    ``architecture`` is one of ARCHITECTURES; tensors that two of them share have the same values in both.
    There is no tokenizer: engines take prompt token ids, each below VOCAB_SIZE. The same arguments give the same
    bytes. Two processes may ask at once: each writes its own temporary directory and one of them is renamed.
    ``cache_dir`` defaults to REPLAY_PARITY_CACHE or the platform's cache directory. Raises OSError if it cannot be
    written, Refusal for another ``architecture``.
    """
    root = cache_dir if cache_dir is not None else default_cache_dir()
    kind = known_architecture(architecture)
    config = _config(kind, geometry, SHAPE)
    key = json.dumps([VERSION, seed, asdict(geometry), asdict(SHAPE), _dumped(config)], sort_keys=True)
    path = root / f"qwen3_5-tiny-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not path.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        _publish(path, config, _weights(kind, geometry, SHAPE, seed))
    return path


def default_cache_dir() -> Path:
    """REPLAY_PARITY_CACHE if set, else replay-parity/ in the platform's cache directory."""
    chosen = os.environ.get("REPLAY_PARITY_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "replay-parity"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "replay-parity"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replay-parity"


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors into a directory that is there."""
    (folder / "config.json").write_text(_dumped(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def gate_laws(geometry: Geometry, shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """A_log and dt_bias [HV] of every GDN layer by parameter name, drawn as Mamba2 and Gated DeltaNet draw them."""
    draws = Draws(seed)
    for layer, kind in enumerate(shape.layer_types):
        if kind == "linear_attention":
            draws.log_decay_rate(f"model.layers.{layer}.linear_attn.A_log", geometry.num_v_heads)
            draws.dt_bias(f"model.layers.{layer}.linear_attn.dt_bias", geometry.num_v_heads)
    return draws.tensors


def _dumped(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _publish(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=path.parent))
    try:
        write_checkpoint(temporary, config, weights)
        temporary.chmod(0o755)
        try:
            temporary.rename(path)
        except OSError:
            # another process was first; its bytes are the same
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _config(kind: Architecture, geometry: Geometry, shape: Shape) -> dict[str, Any]:
    text = model_config(geometry, shape)
    if kind.moe:
        text = with_experts(text)
    text["model_type"] = kind.text_model_type
    if kind.multimodal:
        return with_vision(text, kind.name, kind.model_type)
    return text | {"architectures": [kind.name]}


def model_config(geometry: Geometry, shape: Shape) -> dict[str, Any]:
    """config.json of a Qwen3.5 text model."""
    fixed = asdict(shape)
    return {
        **fixed,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "float32",
        "layer_types": list(shape.layer_types),
        "linear_num_key_heads": geometry.num_k_heads,
        "linear_num_value_heads": geometry.num_v_heads,
        "linear_key_head_dim": geometry.head_k_dim,
        "linear_value_head_dim": geometry.head_v_dim,
        "linear_conv_kernel_dim": geometry.conv_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }


def _weights(kind: Architecture, geometry: Geometry, shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    draws = Draws(seed)
    _text_model(draws, kind, geometry, shape)
    if not kind.multimodal:
        return draws.tensors
    return with_tower(draws.tensors, Draws(seed), shape.hidden_size)


def _text_model(draws: Draws, kind: Architecture, geometry: Geometry, shape: Shape) -> None:
    hidden = shape.hidden_size
    draws.normal("model.embed_tokens.weight", shape.vocab_size, hidden, std=1.0)
    for layer, layer_type in enumerate(shape.layer_types):
        prefix = f"model.layers.{layer}"
        if layer_type == "linear_attention":
            _linear_attention(draws, f"{prefix}.linear_attn", geometry, hidden)
        else:
            _full_attention(draws, f"{prefix}.self_attn", shape)
        if kind.moe:
            draw_experts(draws, f"{prefix}.mlp", hidden)
        else:
            draws.linear(f"{prefix}.mlp.gate_proj.weight", shape.intermediate_size, hidden)
            draws.linear(f"{prefix}.mlp.up_proj.weight", shape.intermediate_size, hidden)
            draws.linear(f"{prefix}.mlp.down_proj.weight", hidden, shape.intermediate_size)
        # Qwen3.5 multiplies by 1 + weight
        draws.constant(f"{prefix}.input_layernorm.weight", hidden, 0.0)
        draws.constant(f"{prefix}.post_attention_layernorm.weight", hidden, 0.0)
    draws.constant("model.norm.weight", hidden, 0.0)
    # the last norm gives unit-variance inputs, so logits have this standard deviation
    draws.linear("lm_head.weight", shape.vocab_size, hidden, gain=2.0)


def _linear_attention(draws: Draws, prefix: str, geometry: Geometry, hidden: int) -> None:
    key_dim = geometry.num_k_heads * geometry.head_k_dim
    value_dim = geometry.num_v_heads * geometry.head_v_dim
    channels = 2 * key_dim + value_dim
    draws.linear(f"{prefix}.in_proj_qkv.weight", channels, hidden, gain=1.0)
    draws.linear(f"{prefix}.in_proj_z.weight", value_dim, hidden)
    draws.linear(f"{prefix}.in_proj_b.weight", geometry.num_v_heads, hidden)
    # half a nat of spread around dt_bias: gates depend on the token and still remember
    draws.linear(f"{prefix}.in_proj_a.weight", geometry.num_v_heads, hidden, gain=0.5)
    draws.normal(f"{prefix}.conv1d.weight", channels, 1, geometry.conv_width, std=1 / math.sqrt(geometry.conv_width))
    draws.log_decay_rate(f"{prefix}.A_log", geometry.num_v_heads)
    draws.dt_bias(f"{prefix}.dt_bias", geometry.num_v_heads)
    # the gated norm multiplies by weight itself, not by 1 + weight
    draws.constant(f"{prefix}.norm.weight", geometry.head_v_dim, 1.0)
    # gain 2: the layer's output weighs about as much as the residual it joins
    draws.linear(f"{prefix}.out_proj.weight", hidden, value_dim, gain=2.0)


def _full_attention(draws: Draws, prefix: str, shape: Shape) -> None:
    hidden, query_dim = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    key_dim = shape.num_key_value_heads * shape.head_dim
    # queries and their output gates side by side, head by head
    draws.linear(f"{prefix}.q_proj.weight", 2 * query_dim, hidden)
    draws.linear(f"{prefix}.k_proj.weight", key_dim, hidden)
    draws.linear(f"{prefix}.v_proj.weight", key_dim, hidden)
    draws.linear(f"{prefix}.o_proj.weight", hidden, query_dim)
    draws.constant(f"{prefix}.q_norm.weight", shape.head_dim, 0.0)
    draws.constant(f"{prefix}.k_norm.weight", shape.head_dim, 0.0)
