"""Names: levels, their targets, profiles and how many generated cases each runs."""

from __future__ import annotations

LEVELS = ("kernel", "schedule", "engine")
# of the engine level: the plugin in a model that vLLM has compiled
COMPILED_TARGET = "plugin-compiled"
# the first of each level is what runs unless another one is asked for
TARGETS = {
    "kernel": ("torch", "triton", "triton_gpu"),
    "schedule": ("torch", "builder"),
    "engine": ("plugin", COMPILED_TARGET, "vllm-native"),
}
# generated cases by profile and level
EXAMPLES = {
    "smoke": {"kernel": 50, "schedule": 100, "engine": 0},
    "ci": {"kernel": 500, "schedule": 2000, "engine": 150},
    "nightly": {"kernel": 5000, "schedule": 20000, "engine": 500},
}
PROFILES = tuple(EXAMPLES)
