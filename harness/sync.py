"""Host reads of device values, and uploads that block, found on a CPU where they cost nothing and so never show.

A sentinel marks the tensors that would live on a device and, while it watches, all that is computed from them. A call
that would stop the host until the device has caught up, on one of these, is kept with the source line that made it.

A host-to-device copy on a CPU is no copy: a function that stands for one is named to the sentinel, and so is each
`.to(device)` of an unmarked tensor; the result is then a tensor of its own. By the device's spelling: "cpu" in quotes
is the host, a torch.device is the device that tensors are made on. A torch.device("cpu") written out as the target of a
read therefore goes unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .compiled_kernels import watching
from .sync_reads import FROM_HOST, FUNCTIONS, OPERATORS, Reads, operator_name

_MARK = "_replay_parity_on_device"
_PACKAGE = __name__.rpartition(".harness.")[0]
# frames that are passed over: what reads is their caller
_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names})
# below one of these the code stands for the device's own
_DEVICE_SIDE = ("triton.", f"{_PACKAGE}.harness.interpreter", f"{_PACKAGE}.harness.graph")
# its reads are not the subject's
STOCK = "vllm"
_CHECK = "vllm.utils.gpu_sync_debug"


@dataclass(frozen=True)
class HostRead:
    """One call that waited for the device: what was called, where ("kernels/vllm_metadata.py:131"), by whose code."""

    what: str
    place: str
    stock: bool

    def __str__(self) -> str:
        return f"{self.place}: {self.what} waits for the device"


def _never() -> bool:
    return False


class Sentinel:
    """Marks device tensors; while it watches, ``reads`` gets each place that reads one, once.

    ``uploads``: code of functions whose result is a device copy of what they are given. ``allowed`` says whether a read
    is permitted where the program stands.
    """

    def __init__(self, uploads: Collection[CodeType] = (), allowed: Callable[[], bool] = _never) -> None:
        self.reads: list[HostRead] = []
        self.uploads = frozenset(uploads)
        self.allowed = allowed
        self._seen: set[HostRead] = set()
        self._functions, self._operators = _Functions(self), _Operators(self)

    def mark(self, *tensors: Tensor) -> None:
        """From now on these live on the device; views made before are not marked with them."""
        for tensor in tensors:
            setattr(tensor, _MARK, True)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow what the block computes from marked tensors, and keep its reads."""
        with self._functions, self._operators, watching(self):
            yield

    def launched(self, kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """A compiled kernel has run: there is one device, so all of its tensors live where one of them does."""
        if _touches(args):
            _mark_all(args)

    def viewed(self, base: Tensor, view: Tensor) -> None:
        """Compiled code has taken a view of one of its buffers."""
        if is_marked(base):
            setattr(view, _MARK, True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """See nothing of the block: what runs there stands for the device."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield

    def take(self) -> list[HostRead]:
        """The reads since the last call; a place that was named once is not named again until ``forget``."""
        reads, self.reads = self.reads, []
        return reads

    def forget(self) -> None:
        """Name every place anew."""
        self.reads = []
        self._seen.clear()

    def keep(self, what: str) -> None:
        """Keep a read by the code that is running, unless it is allowed or on the device's side."""
        if self.allowed():
            return
        frames = _stack(sys._getframe(1))
        reader = _innermost(frames)
        # such a function's copy is taken for a non-blocking one
        if reader is not None and reader.f_code in self.uploads:
            return
        read = blame(what, frames)
        if read is not None and read not in self._seen:
            self._seen.add(read)
            self.reads.append(read)


def is_marked(value: object) -> bool:
    """Whether this is a tensor that lives on the device."""
    return isinstance(value, Tensor) and getattr(value, _MARK, False)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators: what is computed from a marked tensor is marked."""

    def __init__(self, sentinel: Sentinel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sentinel = sentinel
        self.known: dict[int, _Known] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here, and the wrapper that keeps dynamo out costs more than this mode
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # an operator hashes slowly, and there is one object of each
        known = self.known.get(id(func)) or self._learn(func)
        if known.reads is not None and known.reads(args, kwargs, is_marked):
            self.sentinel.keep(operator_name(func))
        touched = _touches(args) or (kwargs and _touches(kwargs.values()))
        if touched:
            # there is one device: what an operator writes lives where its other arguments do
            for place, name in known.written:
                _mark_all(args[place] if place < len(args) else kwargs.get(name))
        if known.function is not None:
            with self.sentinel.watch():
                return known.function(*args, **kwargs)
        out = func(*args, **kwargs)
        if touched and not (known.copies and not is_marked(args[0])):
            _mark_all(out)
        return out

    def _learn(self, func: Any) -> _Known:
        known = _Known(
            operator=func,
            reads=OPERATORS.get(func),
            copies=func is torch.ops.aten.copy_.default,
            function=_python_function(func) if _is_python(func) else None,
            written=_written(func),
        )
        self.known[id(func)] = known
        return known


@dataclass(frozen=True)
class _Known:
    """What there is to know of an operator.

    ``reads``: whether a call waits. ``copies``: it may write the host. ``function``: what it runs where that is Python,
    which is watched. ``written``: (place, name) of arguments that it writes and need not return.
    """

    operator: Any
    reads: Reads | None
    copies: bool
    function: Callable[..., Any] | None
    written: tuple[tuple[int, str], ...]


def _is_python(func: Any) -> bool:
    """Whether an operator may be written in Python, as vLLM's and those of plugins are."""
    compiled = func.namespace in ("aten", "prims") or func.namespace.startswith("_C")
    return not compiled and bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"))


def _python_function(func: Any) -> Callable[..., Any] | None:
    """The function that was registered as the operator: the one of its name, as all of vLLM's are called."""
    name = func.overloadpacket.__name__
    loaded = [(module, getattr(module, "__dict__", {}).get(name)) for module in list(sys.modules.values())]
    own = [f for module, f in loaded if isinstance(f, FunctionType) and f.__module__ == module.__name__]
    return own[0] if len(own) == 1 else None


def _written(func: Any) -> tuple[tuple[int, str], ...]:
    # torch's own return them
    if func.namespace == "aten":
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((place, entry.name) for place, entry in arguments if entry.alias_info and entry.alias_info.is_write)


def _touches(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            if getattr(value, _MARK, False):
                return True
        elif type(value) in (list, tuple) and _touches(value):
            return True
    return False


def _mark_all(out: Any) -> None:
    if isinstance(out, Tensor):
        setattr(out, _MARK, True)
    elif type(out) in (list, tuple):
        for entry in out:
            _mark_all(entry)


class _Functions(TorchFunctionMode):
    """Sees calls of torch's Python interface: reads that reach no operator, and where a tensor is put."""

    def __init__(self, sentinel: Sentinel) -> None:
        super().__init__()
        self.sentinel = sentinel

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        moves = _MOVES.get(func)
        if moves is not None:
            return moves(self.sentinel, sys._getframe(1), func, args, kwargs)
        reads = FUNCTIONS.get(func)
        if reads is not None and reads(args, kwargs, is_marked):
            self.sentinel.keep(_name(func))
        out = func(*args, **kwargs)
        if "device" in kwargs and isinstance(out, Tensor):
            if func in FROM_HOST and isinstance(kwargs["device"], torch.device) and not _touches(args):
                self.sentinel.keep(_name(func))
            _place(out, kwargs["device"])
        if func is torch.tensor and sys._getframe(1).f_code in self.sentinel.uploads:
            setattr(out, _MARK, True)
        return out


def _name(func: Any) -> str:
    return f"{'torch' if getattr(torch, func.__name__, None) is func else 'Tensor'}.{func.__name__}"


def _place(out: Tensor, device: object) -> None:
    """A tensor that was just made lives where its device argument says."""
    if isinstance(device, torch.device):
        setattr(out, _MARK, True)
    elif _is_host(device) and is_marked(out):
        delattr(out, _MARK)


def _is_host(device: object) -> bool:
    return isinstance(device, str) and device.split(":")[0] == "cpu"


def _cpu(sentinel: Sentinel, caller: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensor.cpu() waits."""
    if not is_marked(args[0]):
        return func(*args, **kwargs)
    sentinel.keep("Tensor.cpu")
    return _host_copy(args[0])


def _to(sentinel: Sentinel, caller: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
    """Tensor.to: to the host it waits unless it may be late, to the device it copies, otherwise it stays."""
    tensor = args[0]
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    out = func(*args, **kwargs)
    if is_marked(tensor):
        if _is_host(target) or (isinstance(target, Tensor) and not is_marked(target)):
            if not _non_blocking(args, kwargs):
                sentinel.keep("Tensor.to")
            return _host_copy(out)
    elif isinstance(target, torch.device) or is_marked(target) or caller.f_code in sentinel.uploads:
        if not _non_blocking(args, kwargs):
            sentinel.keep("Tensor.to")
        return _device_copy(out, tensor)
    return out


def _non_blocking(args: Any, kwargs: Any) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    # to(device, dtype, non_blocking), to(other, non_blocking)
    return any(value is True for value in args[2:4])


def _getitem(sentinel: Sentinel, caller: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
    """A slice, which an upload returns where host and device share memory."""
    out = func(*args, **kwargs)
    if sentinel.uploads and caller.f_code in sentinel.uploads:
        setattr(out, _MARK, True)
    return out


def _host_copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    if is_marked(copy):
        delattr(copy, _MARK)
    return copy


def _device_copy(out: Tensor, given: Tensor) -> Tensor:
    copy = out.clone() if out is given else out
    setattr(copy, _MARK, True)
    return copy


def _one_hot(sentinel: Sentinel, caller: FrameType, func: Any, args: Any, kwargs: Any) -> Any:
    """one_hot takes the number of classes from the largest value, unless it is given; on a CPU it checks all values."""
    if not is_marked(args[0]):
        return func(*args, **kwargs)
    if kwargs.get("num_classes", args[1] if len(args) > 1 else -1) == -1:
        sentinel.keep("one_hot")
    with sentinel.pause():
        out = func(*args, **kwargs)
    setattr(out, _MARK, True)
    return out


_MOVES: dict[Any, Callable[[Sentinel, FrameType, Any, Any, Any], Any]] = {
    Tensor.cpu: _cpu,
    Tensor.to: _to,
    Tensor.__getitem__: _getitem,
    torch.nn.functional.one_hot: _one_hot,
}


def blame(what: str, frames: Sequence[FrameType]) -> HostRead | None:
    """The read by the innermost of ``frames``, outermost first, that is no library's.

    None where the device's own code is among them.
    """
    reader = _innermost(frames)
    if reader is None or any(_module(frame).startswith(_DEVICE_SIDE) for frame in frames):
        return None
    module = _module(reader)
    return HostRead(what, f"{_path(module)}:{reader.f_lineno}", module.partition(".")[0] == STOCK)


def _innermost(frames: Sequence[FrameType]) -> FrameType | None:
    for frame in reversed(frames):
        module = _module(frame)
        # vLLM's check itself stands between CUDA's warning and the caller
        if module not in (__name__, _CHECK) and module.partition(".")[0] not in _LIBRARIES:
            return frame
    return None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _path(module: str) -> str:
    return module.removeprefix(f"{_PACKAGE}.").replace(".", "/") + ".py"
