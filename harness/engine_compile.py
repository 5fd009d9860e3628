"""A model that vLLM compiles as its engine opens: in caches of that engine alone, in sight of the watches, proven."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .compiled_kernels import make_visible
from .cpu_platform import has_cuda
from .engine_trace import EngineConfig
from .execution import asked_mode, may_compile

_STOCK = (1, "1", "STOCK_TORCH_COMPILE")


class NotCompiled(ValueError):
    """A compiled model was asked for that there will not be; the message names the argument."""


def prepare_compiling(config: EngineConfig, caches: Path | None) -> None:
    """Call before the engine is made; does nothing where it will be eager.

    ``caches``: a directory that nobody else reads or writes. vLLM's cache knows a compiled model by files of source,
    and a planted fault is in none: what one engine compiled must not be another's.
    """
    if not may_compile(config):
        return
    if asked_mode(config) in _STOCK and not has_cuda():
        raise NotCompiled(
            "compilation_config.mode: 1 (STOCK_TORCH_COMPILE) compiles anew under each watch of this harness; use 3"
        )
    if caches is None:
        raise ValueError("caches: an engine that compiles needs a directory of its own")
    os.environ["VLLM_CACHE_ROOT"] = str(caches / "vllm")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    if not has_cuda():
        make_visible()


def how_it_runs(config: EngineConfig, vllm_config: Any, model: Any) -> dict[str, str]:
    """Compilation mode and graph mode by vLLM's names, as they are in the open engine.

    Raises NotCompiled where a compiled model was asked for and this one runs eagerly.
    """
    settings = vllm_config.compilation_config
    asked = asked_mode(config)
    if asked is not None and not (settings.mode and _is_compiled(model)):
        raise NotCompiled(
            f"compilation_config.mode: {asked} was asked for, but vLLM runs the model eagerly; look for enforce_eager, "
            "TORCH_COMPILE_DISABLE or VLLM_USE_BREAKABLE_CUDAGRAPH"
        )
    return {"mode": settings.mode.name, "cudagraph_mode": settings.cudagraph_mode.name}


def _is_compiled(model: Any) -> bool:
    """Whether a part of the model has been compiled: there is a compiled callable, not only a setting."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        return True
    return any(getattr(module, "compiled", False) is True for module in model.modules())
