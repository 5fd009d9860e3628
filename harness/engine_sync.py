"""Host reads of device values inside a real engine: watched by a sentinel on a CPU, by vLLM's own check with CUDA."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

from .cpu_platform import has_cuda
from .sync import Sentinel, blame
from .trace import Event

# objects of these packages are searched for tensors
_SEARCHED = (__name__.partition(".")[0], "vllm")
# in every message of vLLM's own check
CUDA_CHECK_WORDS = "GPU<->CPU sync detected"
# the methods of a worker in which vLLM's own check is armed; the first begins a step and is given its schedule
_BEGINS, _GOES_ON = "execute_model", "sample_tokens"
# watching costs three quarters of a step: of equal steps one in so many is watched
SHARE = 3


def watch_host_reads(worker: Any, watching: bool) -> SyncWatch | CudaCheck:
    """Watch the steps of an open engine by what this machine has; with CUDA vLLM's check watches in any case."""
    return CudaCheck() if has_cuda() else SyncWatch(worker, watching)


class SyncWatch:
    """Watches one engine's steps on a CPU from the worker down: metadata, forward, sampling.

    Not all: in each Case the first step of every kind (how many rows of how many tokens), then every third of the kind.
    Which these are follows from the Case alone. ``watching`` False watches none.
    """

    def __init__(self, worker: Any, watching: bool) -> None:
        self.sentinel = vllm_sentinel()
        self.watching = watching
        self.stock: list[str] = []
        self.sentinel.mark(*device_tensors(worker.model_runner))
        self.kinds: Counter[tuple[int, ...]] = Counter()
        self.due = False
        begin, go_on = self._watched(getattr(worker, _BEGINS)), self._watched(getattr(worker, _GOES_ON))

        def begun(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.due = self._is_due(scheduled.num_scheduled_tokens.values())
            return begin(scheduled, *args, **kwargs)

        setattr(worker, _BEGINS, begun)
        setattr(worker, _GOES_ON, go_on)

    def start(self) -> None:
        """A new Case: every place is named once again."""
        self.sentinel.forget()
        self.stock.clear()
        self.kinds.clear()

    def events(self, step: int, error: Exception | None = None) -> list[Event]:
        """The subject's own reads since the last call; vLLM's go to ``stock``."""
        reads = self.sentinel.take()
        self.stock += [str(read) for read in reads if read.stock]
        return [host_sync(step, str(read)) for read in reads if not read.stock]

    def _is_due(self, num_tokens: Iterable[int]) -> bool:
        kind = tuple(sorted(num_tokens))
        before = self.kinds[kind]
        self.kinds[kind] += 1
        return before % SHARE == 0

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not (self.watching and self.due):
                return method(*args, **kwargs)
            with allowed_regions(), self._unseen_launches(), self.sentinel.watch():
                return method(*args, **kwargs)

        return watched

    @contextmanager
    def _unseen_launches(self) -> Iterator[None]:
        """A kernel that Triton interprets stands for the device's; to look into it would double a step's time."""
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def unseen(function: Any, *args: Any, **kwargs: Any) -> Any:
            with self.sentinel.pause():
                return run(function, *args, **kwargs)

        InterpretedFunction.run = unseen
        try:
            yield
        finally:
            InterpretedFunction.run = run


class CudaCheck:
    """vLLM's own check with CUDA, which raises in mid-step (VLLM_GPU_SYNC_CHECK=error, set before vLLM is imported)."""

    def __init__(self) -> None:
        self.stock: list[str] = []

    def start(self) -> None:
        """A new Case."""

    def events(self, step: int, error: Exception | None = None) -> list[Event]:
        """The event of a step that the check ended, named by the innermost frame outside torch; vLLM's own is none."""
        if error is None or CUDA_CHECK_WORDS not in str(error):
            return []
        read = blame("a call", [frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        return [host_sync(step, str(read))] if read is not None and not read.stock else []


def vllm_sentinel() -> Sentinel:
    """A sentinel that knows vLLM's uploads and the regions in which vLLM allows reads."""
    from vllm.utils import gpu_sync_debug, torch_utils
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer

    uploads = (torch_utils.async_tensor_h2d.__code__, UvaBuffer.uva.__code__)
    return Sentinel(uploads, allowed=lambda: gpu_sync_debug._allow_depth.get() > 0)


@contextmanager
def allowed_regions() -> Iterator[None]:
    """Let vLLM keep track of its `gpu_sync_allowed` blocks, which it does with CUDA only."""
    from vllm.utils import gpu_sync_debug

    before = gpu_sync_debug._SYNC_CHECK_MODE
    gpu_sync_debug._SYNC_CHECK_MODE = "error"
    try:
        yield
    finally:
        gpu_sync_debug._SYNC_CHECK_MODE = before


def host_sync(step: int, message: str) -> Event:
    """The event of one read."""
    return Event("host_sync", step, None, message)


def device_tensors(root: Any) -> list[Tensor]:
    """Tensors that an object of ours or vLLM's holds, at any depth, but those that its attributes call the host's."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            left += _held(value)
    return found


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, (type, ModuleType)) or type(value).__module__.partition(".")[0] not in _SEARCHED:
        # a torch module is searched too: layers that vLLM takes from torch hold weights
        return list(vars(value).values()) if type(value).__module__.startswith("torch.nn.") else ()
    return [entry for name, entry in getattr(value, "__dict__", {}).items() if not _on_host(name)]


def _on_host(name: str) -> bool:
    return name in ("cpu", "np") or name.endswith(("_cpu", "_np")) or name.startswith("cpu_")
