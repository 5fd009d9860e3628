"""The plugin's switch and its one guard: what of a VllmConfig ReplaySSM decode is able to serve.

Nothing here imports vLLM, so the rules can be tested on any object with a VllmConfig's fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# where the settings stand: VllmConfig.additional_config[KEY]
KEY = "gdn_replay"
# architecture -> model_type of its language model
MODEL_TYPES = {
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
RING_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CACHE_MODES = ("none", "align")


class ReplayConfigError(ValueError):
    """ReplaySSM decode was asked for where it cannot run.

    ``field`` names the setting as a user writes it, ``fix`` says what to change; the message is one line.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field
        self.fix = fix


@dataclass(frozen=True)
class ReplaySettings:
    """Validated ``additional_config["gdn_replay"]``.

    ``buffer_len`` is the ring's length L in tokens; ``ring_dtype`` is what d and k are kept in (g is always float32).
    """

    buffer_len: int = 16
    ring_dtype: str = "float16"

    @property
    def torch_ring_dtype(self) -> torch.dtype:
        """``ring_dtype`` as torch names it."""
        return RING_DTYPES[self.ring_dtype]


def replay_settings(vllm_config: Any) -> ReplaySettings | None:
    """The settings in ``vllm_config``, or None where the key is absent and stock code is to run.

    Raises ReplayConfigError for settings that are malformed or that this configuration cannot serve.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping) or KEY not in additional:
        return None
    settings = parse_settings(additional[KEY])
    require_supported(vllm_config)
    return settings


def parse_settings(raw: object) -> ReplaySettings:
    """``{"buffer_len": 16, "ring_dtype": "float16"}`` as ReplaySettings; raises ReplayConfigError on anything else."""
    where = f"additional_config.{KEY}"
    if not isinstance(raw, Mapping):
        raise ReplayConfigError(where, f"must be a mapping, got {raw!r}", 'use {"buffer_len": 16}')
    unknown = sorted(set(map(str, raw)) - {"buffer_len", "ring_dtype"})
    if unknown:
        raise ReplayConfigError(f"{where}.{unknown[0]}", "is no setting", "use buffer_len and ring_dtype only")
    buffer_len = raw.get("buffer_len", ReplaySettings.buffer_len)
    if isinstance(buffer_len, bool) or not isinstance(buffer_len, int) or buffer_len < 1:
        raise ReplayConfigError(f"{where}.buffer_len", f"must be an integer >= 1, got {buffer_len!r}", "16 is usual")
    ring_dtype = raw.get("ring_dtype", ReplaySettings.ring_dtype)
    if not isinstance(ring_dtype, str) or ring_dtype not in RING_DTYPES:
        names = ", ".join(RING_DTYPES)
        raise ReplayConfigError(f"{where}.ring_dtype", f"unknown dtype {ring_dtype!r}", f"use one of {names}")
    return ReplaySettings(buffer_len=buffer_len, ring_dtype=ring_dtype)


def require_supported(vllm_config: Any) -> None:
    """The guard: raise ReplayConfigError unless ReplaySSM decode can serve this configuration.

    vLLM itself refuses its ``--use-replayssm`` for GDN and for Model Runner V2; this is the one place where that is
    relaxed, for Qwen3.5's language models on V2 without speculation or model parallelism.
    """
    _require_model(vllm_config.model_config)
    _require_text_prompts(vllm_config.model_config)
    _require_parallel(vllm_config.parallel_config)
    if vllm_config.speculative_config is not None:
        raise ReplayConfigError(
            "speculative_config", f"{KEY} replays one token a step and keeps no draft states", "remove it"
        )
    mode = vllm_config.cache_config.mamba_cache_mode
    if mode not in CACHE_MODES:
        raise ReplayConfigError("mamba_cache_mode", f"{KEY} does not serve {mode!r}", "use none or align")
    if not vllm_config.use_v2_model_runner:
        raise ReplayConfigError("VLLM_USE_V2_MODEL_RUNNER", f"{KEY} needs Model Runner V2, which is off", "set it to 1")


def _require_model(model_config: Any) -> None:
    architecture = model_config.architecture
    model_type = getattr(model_config.hf_text_config, "model_type", None)
    if architecture not in MODEL_TYPES or model_type != MODEL_TYPES[architecture]:
        served = ", ".join(f"{name} ({kind})" for name, kind in MODEL_TYPES.items())
        raise ReplayConfigError(
            "model",
            f"{KEY} does not serve {architecture} ({model_type})",
            f"remove additional_config.{KEY} or serve one of {served}",
        )


def _require_text_prompts(model_config: Any) -> None:
    """Pictures reach the language model as prefill, which is stock code; but no run has shown it one."""
    multimodal = getattr(model_config, "multimodal_config", None)
    if multimodal is None:
        return
    allowed = [modality for modality in ("image", "video") if multimodal.get_limit_per_prompt(modality) > 0]
    if allowed:
        raise ReplayConfigError(
            "language_model_only", f"{KEY} is untested with {' and '.join(allowed)} prompts", "set it to true"
        )


def _require_parallel(parallel_config: Any) -> None:
    if parallel_config.tensor_parallel_size > 1:
        size = parallel_config.tensor_parallel_size
        raise ReplayConfigError("tensor_parallel_size", f"{KEY} is untested with {size}", "set it to 1")
    if parallel_config.pipeline_parallel_size > 1:
        size = parallel_config.pipeline_parallel_size
        raise ReplayConfigError("pipeline_parallel_size", f"{KEY} does not support {size}", "set it to 1")
