"""The Path of each level, by name."""

from __future__ import annotations

from .contract import Path
from .cpu_platform import why_no_engine
from .decode_op import why_not
from .faults import fault as planted_fault
from .kernel_path import KernelPath
from .schedule_path import SchedulePath


class LevelUnavailable(RuntimeError):
    """A level that this machine cannot run; the message says what is missing and how to install it."""


def open_path(level: str, fault: str | None, target: str | None = None) -> Path:
    """The Path of a level and a target, its first one if None.

    A fault that the first target does not run brings its own. Raises LevelUnavailable where the machine lacks what it
    needs.
    """
    if target is None and fault is not None:
        target = planted_fault(fault).targets.get(level)
    if level == "kernel":
        chosen = target or "torch"
        missing = why_not(chosen)
        if missing is not None:
            raise LevelUnavailable(missing)
        return KernelPath(fault, chosen)
    if level == "schedule" and target != "builder":
        return SchedulePath(fault)
    missing = why_no_engine()
    if missing is not None:
        raise LevelUnavailable(missing)
    if level == "schedule":
        from .builder_path import BuilderPath

        return BuilderPath(fault)
    from .engine_path import EnginePath

    return EnginePath(fault)


def close_path(path: Path) -> None:
    """Release what a path holds: engine processes."""
    close = getattr(path, "close", None)
    if close is not None:
        close()
