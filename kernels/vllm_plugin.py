"""The vLLM plugin's entry point (group ``vllm.general_plugins``)."""

from __future__ import annotations

from .vllm_config import MODEL_TYPES

MODULE = "replay_parity.kernels.vllm_model"


def register() -> None:
    """Make vLLM build the Qwen3.5 models from our subclasses; safe to call any number of times in any process.

    On a GPU the classes are only named: their module's imports ask CUDA for the device, and a process that later forks
    must not have done that. vLLM inspects a named class in a fresh process, where the set-up that interpreted Triton
    needs on a CPU is missing; there the classes themselves are registered. Importing their module installs the GDN
    layer.
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        for architecture in MODEL_TYPES:
            ModelRegistry.register_model(architecture, f"{MODULE}:{class_name(architecture)}")
        return
    from . import vllm_model

    for architecture in MODEL_TYPES:
        ModelRegistry.register_model(architecture, getattr(vllm_model, class_name(architecture)))


def class_name(architecture: str) -> str:
    """Our subclass of an architecture, in MODULE."""
    return f"Replay{architecture}"
