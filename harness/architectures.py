"""The architectures that the engine level can be asked for, by the name vLLM registers them under."""

from __future__ import annotations

from dataclasses import dataclass

from ..cases.refusal import Refusal

DEFAULT_ARCHITECTURE = "Qwen3_5ForCausalLM"


@dataclass(frozen=True)
class Architecture:
    """One of vLLM's model classes that the plugin serves, and what sets its checkpoint apart.

    ``model_type`` is the one at the top of config.json, ``text_model_type`` that of the language model: the same where
    the model is text only, ``text_config.model_type`` where it is ``multimodal``. ``moe``: a mixture of experts in each
    layer.
    """

    name: str
    model_type: str
    text_model_type: str
    moe: bool
    multimodal: bool


ARCHITECTURES = {
    entry.name: entry
    for entry in (
        Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", "qwen3_5_text", moe=False, multimodal=False),
        Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "qwen3_5_moe_text", moe=True, multimodal=False),
        Architecture("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text", moe=False, multimodal=True),
        Architecture(
            "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", moe=True, multimodal=True
        ),
    )
}


def known_architecture(name: str) -> Architecture:
    """The entry of a name. Raises Refusal, in one line that names the choices."""
    if name not in ARCHITECTURES:
        raise Refusal(f"--architecture {name}: is not served; use one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
