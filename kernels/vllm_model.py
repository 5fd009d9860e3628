"""Qwen3.5 models whose GDN layers decode by replay; importing this module installs the layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from .vllm_config import replay_settings
from .vllm_layer import install_layer, ring_dtypes, ring_shapes
from .vllm_model_state import ReplayModelState

install_layer()


class ReplayDecode:
    """Before a stock model class: the ring in its cache pages, and the model state that feeds the cursors.

    None of these stock classes names a model state of its own: for each of them, the multimodal ones too, Model Runner
    V2 takes its class for hybrid models.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        settings = replay_settings(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self.replay = settings

    def get_model_state_cls(self) -> type[MambaHybridModelState]:
        """Model Runner V2's state class; stock's own choice for a hybrid model where the switch is off."""
        return MambaHybridModelState if self.replay is None else ReplayModelState

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Shapes of one slot's tensors; vLLM sizes cache pages by them."""
        stock: tuple[tuple[int, ...], ...] = tuple(super().get_mamba_state_shape_from_config(vllm_config))  # type: ignore[misc]
        settings = replay_settings(vllm_config)
        if settings is None:
            return stock
        num_k_heads = vllm_config.model_config.hf_text_config.linear_num_key_heads
        return stock + ring_shapes(stock[1], num_k_heads, settings)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Dtypes of one slot's tensors, in the order of the shapes."""
        stock: tuple[torch.dtype, ...] = tuple(super().get_mamba_state_dtype_from_config(vllm_config))  # type: ignore[misc]
        settings = replay_settings(vllm_config)
        return stock if settings is None else stock + ring_dtypes(settings)


class ReplayQwen3_5ForCausalLM(ReplayDecode, Qwen3_5ForCausalLM):  # type: ignore[misc]
    """The dense text model."""


class ReplayQwen3_5MoeForCausalLM(ReplayDecode, Qwen3_5MoeForCausalLM):  # type: ignore[misc]
    """The text model with a mixture of experts."""


class ReplayQwen3_5ForConditionalGeneration(ReplayDecode, Qwen3_5ForConditionalGeneration):  # type: ignore[misc]
    """The dense multimodal model, asked for text."""


class ReplayQwen3_5MoeForConditionalGeneration(ReplayDecode, Qwen3_5MoeForConditionalGeneration):  # type: ignore[misc]
    """The multimodal model with a mixture of experts, asked for text."""
