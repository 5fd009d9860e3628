"""The Path of each level, by name."""

from __future__ import annotations

from typing import Any

from ..cases.engine_scenarios import engine_scenarios
from .architectures import DEFAULT_ARCHITECTURE
from .contract import Path
from .cpu_platform import why_no_engine
from .decode_op import why_not
from .execution import why_not_compiled
from .faults import FaultError
from .faults import fault as planted_fault
from .kernel_path import KernelPath
from .levels import COMPILED_TARGET
from .schedule_path import SchedulePath

# vLLM's EngineArgs by name
EngineArgs = tuple[tuple[str, Any], ...]


class LevelUnavailable(RuntimeError):
    """A level that this machine cannot run; the message says what is missing and how to install it."""


def open_path(
    level: str,
    fault: str | None,
    target: str | None = None,
    engine_args: EngineArgs = (),
    architecture: str = DEFAULT_ARCHITECTURE,
) -> Path:
    """The Path of a level and a target, its first one if None.

    For the engine level alone: ``engine_args``, more of vLLM's EngineArgs by name, and ``architecture``, the model it
    loads. A fault that the first target does not run brings its own. Raises LevelUnavailable where the machine lacks
    what it needs.
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
    return _open_engine(fault, target or "plugin", engine_args, architecture)


def _open_engine(fault: str | None, target: str, engine_args: EngineArgs, architecture: str) -> Path:
    from .engine_path import EnginePath

    if target == COMPILED_TARGET:
        missing = why_not_compiled()
        if missing is not None:
            raise LevelUnavailable(f"{missing}; target plugin runs eagerly")
    if target != "vllm-native":
        return EnginePath(fault, target=target, engine_args=engine_args, architecture=architecture)
    if fault is not None:
        raise FaultError(f"fault: {fault} is planted in the plugin; vllm-native has none of it, use target plugin")
    path = EnginePath(target=target, engine_args=engine_args, architecture=architecture)
    refused = path.why_refused(engine_scenarios()["plain-flush"].case)
    if refused is not None:
        path.close()
        raise LevelUnavailable(f"this vLLM has no GDN ReplaySSM of its own: {refused}")
    return path


def close_path(path: Path) -> None:
    """Release what a path holds: engine processes."""
    close = getattr(path, "close", None)
    if close is not None:
        close()
