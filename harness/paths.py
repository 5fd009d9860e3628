"""The Path of each level, by name."""

from __future__ import annotations

from .contract import Path
from .kernel_path import KernelPath
from .schedule_path import SchedulePath

TARGETS = {"kernel": ("torch",), "schedule": ("torch",), "engine": ("plugin",)}


class LevelUnavailable(RuntimeError):
    """A level that this machine cannot run; the message says what is missing and how to install it."""


def open_path(level: str, fault: str | None) -> Path:
    """The Path of a level. Raises LevelUnavailable where the machine lacks what it needs."""
    if level == "kernel":
        return KernelPath(fault)
    if level == "schedule":
        return SchedulePath(fault)
    from .cpu_platform import why_no_engine

    missing = why_no_engine()
    if missing is not None:
        raise LevelUnavailable(missing)
    from .engine_path import EnginePath

    return EnginePath(fault)


def close_path(path: Path) -> None:
    """Release what a path holds: engine processes."""
    close = getattr(path, "close", None)
    if close is not None:
        close()
