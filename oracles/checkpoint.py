"""A Qwen3.5 checkpoint on disk: the configuration and tensors of its language model.

Refused where the oracle does not implement it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .mlp import mlp_shapes
from .moe import MoeConfig, apart, moe_shapes

DENSE, MOE = "qwen3_5_text", "qwen3_5_moe_text"
# model_type of a multimodal model -> that of its language model
LANGUAGE = {"qwen3_5": DENSE, "qwen3_5_moe": MOE}
# what the names of the language model's tensors begin with, alone and inside a multimodal model
PREFIX, LANGUAGE_PREFIX, VISION_PREFIX = "model.", "model.language_model.", "model.visual."
LINEAR, FULL = "linear_attention", "full_attention"
# what of a model's config.json would change its mathematics, with the only value implemented
FIXED = {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True, "rope_scaling": None}
FIXED |= {"quantization_config": None}


class OracleError(ValueError):
    """A checkpoint or input that the oracle does not take; one line that names the field or tensor."""


@dataclass(frozen=True)
class TextConfig:
    """The fields of config.json that the mathematics needs, by their names there; rotary_dim in lanes, always even.

    ``intermediate_size`` is a dense model's, ``moe`` that of a mixture of experts; the other one is None. ``prefix`` is
    what its tensors' names begin with in the file, ``model.`` everywhere else.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    intermediate_size: int | None = None
    moe: MoeConfig | None = None
    prefix: str = PREFIX

    @property
    def key_dim(self) -> int:
        """Lanes of all key heads of a GDN layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Lanes of all value heads of a GDN layer."""
        return self.linear_num_value_heads * self.linear_value_head_dim


SIZES = tuple(name for name, kind in TextConfig.__annotations__.items() if kind == "int" and name != "rotary_dim")
MOE_SIZES = tuple(name for name, kind in MoeConfig.__annotations__.items() if kind == "int")


def read_config(directory: Path) -> TextConfig:
    """The configuration in ``directory``/config.json. Raises OracleError for anything the oracle does not implement."""
    try:
        whole = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OracleError(f"{directory}: config.json cannot be read: {error}") from None
    if not isinstance(whole, dict):
        raise OracleError(f"config.json: must be an object, got {type(whole).__name__}")
    raw = _language_model(whole)
    for field, value in FIXED.items():
        if raw.get(field, value) not in (value, None):
            raise OracleError(f"config.json: {field} = {raw[field]!r} is not implemented, only {value!r}")
    sizes = {name: _positive(raw, name, int) for name in SIZES}
    for many, few in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if sizes[many] % sizes[few]:
            raise OracleError(f"config.json: {many} = {sizes[many]} must be a multiple of {few} = {sizes[few]}")
    return TextConfig(
        **sizes,
        rms_norm_eps=_positive(raw, "rms_norm_eps", float),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layer_types=_layer_types(raw, sizes["num_hidden_layers"]),
        **_rope(raw, sizes["head_dim"]),
        **_mlp(raw),
        prefix=PREFIX if raw is whole else LANGUAGE_PREFIX,
    )


def tensor_shapes(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model reads."""
    D, N = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    HV, conv_dim = config.linear_num_value_heads, 2 * config.key_dim + config.value_dim
    mixers: dict[str, dict[str, tuple[int, ...]]] = {
        LINEAR: {
            "linear_attn.A_log": (HV,),
            "linear_attn.dt_bias": (HV,),
            "linear_attn.conv1d.weight": (conv_dim, 1, config.linear_conv_kernel_dim),
            "linear_attn.in_proj_qkv.weight": (conv_dim, D),
            "linear_attn.in_proj_z.weight": (config.value_dim, D),
            "linear_attn.in_proj_b.weight": (HV, D),
            "linear_attn.in_proj_a.weight": (HV, D),
            "linear_attn.norm.weight": (config.linear_value_head_dim,),
            "linear_attn.out_proj.weight": (D, config.value_dim),
        },
        FULL: {
            "self_attn.q_proj.weight": (2 * heads * N, D),
            "self_attn.k_proj.weight": (kv_heads * N, D),
            "self_attn.v_proj.weight": (kv_heads * N, D),
            "self_attn.o_proj.weight": (D, heads * N),
            "self_attn.q_norm.weight": (N,),
            "self_attn.k_norm.weight": (N,),
        },
    }
    shared: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    if config.moe is not None:
        mlp = moe_shapes(D, config.moe)
    else:
        assert config.intermediate_size is not None
        mlp = mlp_shapes(D, config.intermediate_size)
    shared |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, D),
        "model.norm.weight": (D,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    for index, kind in enumerate(config.layer_types):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in (mixers[kind] | shared).items()}
    return shapes


def read_tensors(directory: Path, config: TextConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of ``tensor_shapes`` from ``directory``/model*.safetensors, cast to ``dtype``.

    Raises OracleError for a missing, doubled or misshapen tensor, and for one that the model would leave unread
    (multi-token prediction, the vision tower and the head of a tied model aside): an unread tensor is mathematics left
    out.
    """
    shapes = tensor_shapes(config)
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for given in opened.keys():  # noqa: SIM118
                    if _left_unread(given, config):
                        continue
                    for name, tensor in apart(_plain_name(given, config), opened.get_tensor(given)):
                        if name not in shapes or name in tensors:
                            trouble = "doubled" if name in tensors else "unknown"
                            raise OracleError(f"{file.name}: tensor {given} is {trouble}")
                        tensors[name] = tensor.to(dtype)
        except (OSError, SafetensorError) as error:
            raise OracleError(f"{file.name} cannot be read: {error}") from None
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise OracleError(f"{directory}: {len(missing)} tensors missing in model*.safetensors, first {missing[0]}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise OracleError(f"tensor {name} must be {list(shape)} by config.json, got {[*tensors[name].shape]}")
    return tensors


def _language_model(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language model: ``whole`` itself, or its text_config."""
    found = whole.get("model_type")
    if found in (DENSE, MOE):
        return whole
    if found not in LANGUAGE:
        known = ", ".join(map(repr, (DENSE, MOE, *LANGUAGE)))
        raise OracleError(f"config.json: model_type must be one of {known}, got {found!r}")
    text = whole.get("text_config")
    if not isinstance(text, dict):
        raise OracleError(f"config.json: text_config must be an object, got {text!r}")
    if text.get("model_type") != LANGUAGE[found]:
        raise OracleError(
            f"config.json: text_config.model_type must be {LANGUAGE[found]!r}, got {text.get('model_type')!r}"
        )
    tied = [bool(place.get("tie_word_embeddings", False)) for place in (whole, text)]
    if tied[0] != tied[1]:
        raise OracleError(
            f"config.json: tie_word_embeddings = {tied[0]} and text_config.tie_word_embeddings = {tied[1]}: which?"
        )
    return text


def _mlp(raw: Mapping[str, Any]) -> dict[str, Any]:
    """intermediate_size of a dense model, or moe."""
    if raw["model_type"] == DENSE:
        if raw.get("num_experts"):
            raise OracleError(f"config.json: num_experts = {raw['num_experts']!r} is not implemented in {DENSE}")
        return {"intermediate_size": _positive(raw, "intermediate_size", int)}
    sizes = {name: _positive(raw, name, int) for name in MOE_SIZES}
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise OracleError(
            f"config.json: num_experts_per_tok = {sizes['num_experts_per_tok']} must be at most num_experts = "
            f"{sizes['num_experts']}"
        )
    return {"moe": MoeConfig(**sizes, norm_topk_prob=bool(raw.get("norm_topk_prob", True)))}


def _left_unread(name: str, config: TextConfig) -> bool:
    if config.prefix == LANGUAGE_PREFIX and name.startswith(VISION_PREFIX):
        return True
    return name.startswith("mtp.") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _plain_name(name: str, config: TextConfig) -> str:
    """A language model's tensor by the name it has in a text model; "", which none has, for one from elsewhere."""
    if config.prefix == PREFIX or name == "lm_head.weight":
        return name
    return PREFIX + name.removeprefix(config.prefix) if name.startswith(config.prefix) else ""


def _positive(raw: Mapping[str, Any], field: str, kind: type[int] | type[float]) -> Any:
    value: Any = raw.get(field)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
        raise OracleError(f"config.json: {field} must be a positive {kind.__name__}, got {value!r}")
    return value


def _layer_types(raw: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """One of the two mixers a layer; without the field, each full_attention_interval-th layer (4) is full attention."""
    layer_types = raw.get("layer_types")
    if layer_types is None:
        interval = _positive({"full_attention_interval": 4, **raw}, "full_attention_interval", int)
        layer_types = [FULL if (index + 1) % interval == 0 else LINEAR for index in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise OracleError(f"config.json: layer_types must be a list of {num_layers} names, got {layer_types!r}")
    for index, kind in enumerate(layer_types):
        if kind not in (LINEAR, FULL):
            raise OracleError(f"config.json: layer_types[{index}] = {kind!r} is not implemented")
    return tuple(layer_types)


def _rope(raw: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """rope_theta and rotary_dim: in rope_parameters, or one level deeper by layer type, or in the older flat fields."""
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise OracleError(f"config.json: rope_parameters must be an object, got {rope!r}")
    rope = rope.get(FULL, rope)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise OracleError(f"config.json: rope_type = {rope_type!r} is not implemented, only 'default'")
    theta = _positive({"rope_theta": raw.get("rope_theta"), **rope}, "rope_theta", float)
    factor = raw.get("partial_rotary_factor", 0.25)
    factor = _positive({"partial_rotary_factor": factor, **rope}, "partial_rotary_factor", float)
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise OracleError(
            f"config.json: partial_rotary_factor {factor} of head_dim {head_dim} gives {rotary_dim} rotary lanes, "
            f"expected an even number up to head_dim"
        )
    return {"rope_theta": float(theta), "rotary_dim": rotary_dim}
