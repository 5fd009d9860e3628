"""The vLLM plugin's entry point (group ``vllm.general_plugins``)."""

from __future__ import annotations

from .vllm_config import ARCHITECTURE

MODEL_CLASS = "replay_parity.kernels.vllm_model:ReplayQwen3_5ForCausalLM"


def register() -> None:
    """Make vLLM build ``Qwen3_5ForCausalLM`` from our subclass; safe to call any number of times in any process.

    On a GPU the class is only named: its module's imports ask CUDA for the device, and a process that later forks must
    not have done that. vLLM inspects a named class in a fresh process, where the set-up that interpreted Triton needs
    on a CPU is missing; there the class itself is registered. Importing its module installs the GDN layer.
    """
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
        return
    from .vllm_model import ReplayQwen3_5ForCausalLM

    ModelRegistry.register_model(ARCHITECTURE, ReplayQwen3_5ForCausalLM)
