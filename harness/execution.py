"""How an engine runs the model: eagerly, in FULL graphs, compiled. What a Case and the user ask for, as EngineArgs."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cpu_platform import has_cuda
from .engine_trace import EngineConfig
from .graphs import graph_config

# the EngineArgs that decide it
DECIDING = ("enforce_eager", "compilation_config")
# vLLM's VLLM_COMPILE, which the original work's own check ran in. On a CPU vLLM itself makes DYNAMO_TRACE_ONCE of it,
# with the same Inductor: passes of its own backend name operators that only a CUDA build has
COMPILED = {"mode": 3}
_OFF = (0, "0", "NONE")
_EAGER = {"mode": 0, "cudagraph_mode": "NONE"}


def execution_args(config: EngineConfig) -> dict[str, Any]:
    """``enforce_eager`` and, where that is not set, ``compilation_config``; entries of ``config.extra`` win one by one.

    The baseline runs eagerly whatever is asked for: what graphs or compiled code do to both legs would not show.
    """
    extra = dict(config.extra) if config.judged else {}
    asked = extra.get("compilation_config") or {}
    if not isinstance(asked, Mapping):
        # an object of vLLM's own is whole
        return {"enforce_eager": extra.get("enforce_eager", False), "compilation_config": asked}
    of_case = _EAGER if config.capture_sizes is None else graph_config(config.capture_sizes)
    settings = {**of_case, **asked}
    if extra.get("enforce_eager") is False and "mode" not in asked:
        # only that it is not eager was asked for: vLLM's own mode
        del settings["mode"]
    eager = extra.get("enforce_eager", _is_off(settings, "mode") and _is_off(settings, "cudagraph_mode"))
    return {"enforce_eager": True} if eager else {"enforce_eager": False, "compilation_config": settings}


def compiled_args(extra: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """``extra`` with a compiled model in it; what it says of the compilation itself wins."""
    asked = dict(extra).get("compilation_config", {})
    if not isinstance(asked, Mapping):
        return extra
    return (*((name, value) for name, value in extra if name != "compilation_config"),
            ("compilation_config", {**COMPILED, **asked}))  # fmt: skip


def asked_mode(config: EngineConfig) -> object:
    """The compilation mode that was asked for in so many words, None where none was or it is eager."""
    asked = dict(config.extra).get("compilation_config") if config.judged else None
    mode = asked.get("mode") if isinstance(asked, Mapping) else None
    return None if mode in _OFF else mode


def may_compile(config: EngineConfig) -> bool:
    """Whether vLLM may compile the model of an engine opened with this."""
    args = execution_args(config)
    settings = args.get("compilation_config")
    return not args["enforce_eager"] and not (isinstance(settings, Mapping) and _is_off(settings, "mode"))


def why_not_compiled() -> str | None:
    """None where vLLM can compile on this device, else one line: what is missing and what to do."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return "compiled: TORCH_COMPILE_DISABLE=1 switches torch.compile off; unset it"
    if os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1":
        return "compiled: VLLM_USE_BREAKABLE_CUDAGRAPH=1 switches compilation off; unset it"
    if has_cuda():
        return None
    # by the name that Inductor calls it
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"compiled: there is no C++ compiler {compiler}, which Inductor needs on a CPU; install g++ or set CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "compiled: Python.h is missing, which Inductor's kernels include; install Python's headers"
    return None


def _is_off(settings: Mapping[str, Any], name: str) -> bool:
    return settings.get(name) in _OFF
