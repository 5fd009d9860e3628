"""What this machine can run: one question a marker, answered with what is missing."""

from __future__ import annotations

from collections.abc import Callable

# marker -> how it is written and what it asks for
MARKERS = {
    "kernel": "kernel: the decode op alone",
    "schedule": "schedule: cursor, slots and op over a timeline",
    "engine": "engine: the real vLLM engine with Model Runner V2",
    "gpu": "gpu: a CUDA device",
    "sm": "sm(major, minor): a CUDA device of at least this compute capability",
    "multi_gpu": "multi_gpu(n): at least n CUDA devices",
}


def why_not(marker: str, *arguments: int) -> str | None:
    """None where the machine has what the marker asks for, else one line that says what it lacks.

    Raises ValueError for a marker used with the wrong number of arguments.
    """
    question = _QUESTIONS.get(marker)
    if question is None:
        return None
    try:
        return question(*arguments)
    except TypeError:
        raise ValueError(f"marker {MARKERS[marker].partition(':')[0]}: called with {arguments}") from None


def _no_engine() -> str | None:
    from .cpu_platform import why_no_engine

    return why_no_engine()


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device, torch sees none"


def _no_sm(major: int, minor: int) -> str | None:
    import torch

    missing = _no_gpu()
    if missing is not None:
        return missing
    have = torch.cuda.get_device_capability(0)
    return None if have >= (major, minor) else f"needs compute capability {major}.{minor}, this device has {have}"


def _too_few_gpus(count: int) -> str | None:
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if have >= count else f"needs {count} CUDA devices, torch sees {have}"


_QUESTIONS: dict[str, Callable[..., str | None]] = {
    "engine": _no_engine,
    "gpu": _no_gpu,
    "sm": _no_sm,
    "multi_gpu": _too_few_gpus,
}
