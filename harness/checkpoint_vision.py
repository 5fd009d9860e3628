"""What makes a tiny text checkpoint a multimodal one: nested config.json, prefixed names, a vision tower of one block.

No test shows it a picture. The tower is there because published checkpoints have one, which readers of the language
model must step over.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from .draws import Draws

LANGUAGE_PREFIX = "model.language_model."
# lanes of each M-RoPE axis, together half of the rotary lanes; text has one position for all three
MROPE = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
PLACEHOLDERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Tower:
    """Sizes by their names in ``vision_config``."""

    depth: int = 1
    hidden_size: int = 32
    intermediate_size: int = 64
    num_heads: int = 2
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    num_position_embeddings: int = 16


TOWER = Tower()


def with_vision(text: dict[str, Any], name: str, model_type: str) -> dict[str, Any]:
    """config.json of the multimodal model ``name`` whose language model is ``text``.

    Placeholder ids lie behind the vocabulary, so no text prompt holds one.
    """
    language = {field: value for field, value in text.items() if field != "architectures"}
    language["rope_parameters"] = text["rope_parameters"] | MROPE
    tower = asdict(TOWER) | {
        "model_type": f"{model_type}_vision",
        "out_hidden_size": text["hidden_size"],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {
        "architectures": [name],
        "model_type": model_type,
        "dtype": text["dtype"],
        "text_config": language,
        "vision_config": tower,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{field: text["vocab_size"] + index for index, field in enumerate(PLACEHOLDERS)},
    }


def with_tower(language: dict[str, torch.Tensor], draws: Draws, hidden: int) -> dict[str, torch.Tensor]:
    """Tensors of the whole: the language model's under their longer names, and a tower from ``draws``.

    ``hidden`` is the language model's width, which the tower's merger ends in.
    """
    _draw_tower(draws, "model.visual", hidden)
    # the head stands beside both parts
    renamed = {name.replace("model.", LANGUAGE_PREFIX, 1): tensor for name, tensor in language.items()}
    return renamed | draws.tensors


def _draw_tower(draws: Draws, prefix: str, hidden: int) -> None:
    width = TOWER.hidden_size
    patch = (TOWER.in_channels, TOWER.temporal_patch_size, TOWER.patch_size, TOWER.patch_size)
    draws.normal(f"{prefix}.patch_embed.proj.weight", width, *patch, std=0.02)
    draws.constant(f"{prefix}.patch_embed.proj.bias", width, 0.0)
    draws.normal(f"{prefix}.pos_embed.weight", TOWER.num_position_embeddings, width, std=0.02)
    for block in range(TOWER.depth):
        below = f"{prefix}.blocks.{block}"
        _norm(draws, f"{below}.norm1", width)
        _norm(draws, f"{below}.norm2", width)
        _affine(draws, f"{below}.attn.qkv", 3 * width, width)
        _affine(draws, f"{below}.attn.proj", width, width)
        _affine(draws, f"{below}.mlp.linear_fc1", TOWER.intermediate_size, width)
        _affine(draws, f"{below}.mlp.linear_fc2", width, TOWER.intermediate_size)
    merged = width * TOWER.spatial_merge_size**2
    _norm(draws, f"{prefix}.merger.norm", width)
    _affine(draws, f"{prefix}.merger.linear_fc1", merged, merged)
    _affine(draws, f"{prefix}.merger.linear_fc2", hidden, merged)


def _affine(draws: Draws, name: str, rows: int, columns: int) -> None:
    draws.linear(f"{name}.weight", rows, columns)
    draws.constant(f"{name}.bias", rows, 0.0)


def _norm(draws: Draws, name: str, size: int) -> None:
    draws.constant(f"{name}.weight", size, 1.0)
    draws.constant(f"{name}.bias", size, 0.0)
