"""FULL CUDA graphs emulated on a CPU: what ran during capture, run again on the same memory, with no Python in between.

A CUDA graph holds kernels and the addresses they were launched with. So a capture records each operator with its very
tensors, and a replay runs the operators again on them: what the captured forward allocated is filled anew in place, and
whatever was not written into a tensor that the capture saw is not seen by the replay. Not modelled: streams and their
races, reuse of the pool's memory, host memory that changes while a copy is under way. Unlike on a GPU the operators
already run during the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .compiled_kernels import watching

# operators whose kernels are compiled: they are what a graph holds. All others are Python around such operators
_COMPILED = ("aten", "prims")
_COMPILED_PREFIX = "_C"
_ALLOCATE_ONLY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"))
# depend on values where the index is a mask, and only there
_INDEXING = frozenset(("index", "index_put", "index_put_"))


class CaptureError(RuntimeError):
    """Something that a CUDA graph cannot hold was asked for while capturing; the message names the operator."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One recorded operator: ``fresh`` are its outputs that own memory of their own, by place among all outputs.

    ``remade`` holds arguments that the host makes anew for each call, by place: how to make them.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...] = ()
    remade: dict[int, Callable[[], Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Once more, on the memory it had."""
        args = self.args
        if self.remade:
            args = tuple(self.remade[place]() if place in self.remade else arg for place, arg in enumerate(args))
        outputs = self.func(*args, **self.kwargs)
        if self.fresh:
            leaves = tree_leaves(outputs)
            for place, captured in self.fresh:
                captured.copy_(leaves[place])


class Graph:
    """Stands in for ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Operation] = []
        # memory that nothing else holds: it must stay where it is
        self.held: list[Tensor] = []

    def replay(self) -> None:
        """Run every operation again, in order."""
        with torch.inference_mode(), _disable_current_modes():
            for operation in self.operations:
                operation.run()

    def reset(self) -> None:
        """Forget everything."""
        self.operations, self.held = [], []


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records into ``graph`` what runs inside it; ``host`` knows arguments that a replay must make anew."""

    def __init__(self, graph: Graph, host: HostCalls | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph
        self.host = host

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_compiled(func):
            with self:
                return _body(func)(*args, **kwargs)
        _refuse_masks(func, args)
        outputs = func(*args, **kwargs)
        self._record(func, args, kwargs, outputs)
        return outputs

    def launch(self, run: Callable[..., None], grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a kernel launch and run it; a grid that is a function is asked once, as at capture."""
        asked: list[Any] = []

        def remember(meta: Any) -> Any:
            asked.append(grid(meta))
            return asked[-1]

        with _disable_current_modes():
            run(*args, grid=remember if callable(grid) else grid, **kwargs)
        frozen = asked[0] if asked else grid
        self.graph.operations.append(Operation(run, args, {**kwargs, "grid": frozen}))

    def launched(self, kernel: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Record a compiled kernel, which has run: it writes into its arguments."""
        self.graph.operations.append(Operation(kernel, args, {}))

    def viewed(self, base: Tensor, view: Tensor) -> None:
        """A view in compiled code needs no operation: it is the same memory."""

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        known = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        leaves = tree_leaves(outputs)
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in leaves):
            raise _host_read(func)
        fresh = tuple(
            (place, leaf)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and _memory(leaf) not in known
        )
        self.graph.held += [leaf for _, leaf in fresh]
        if func.overloadpacket.__name__ in _ALLOCATE_ONLY or not (fresh or func._schema.is_mutable):
            # memory without contents, or a view
            return
        remade = {} if self.host is None else self.host.remade(args)
        self.graph.operations.append(Operation(func, args, kwargs, fresh, remade))


class HostCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers how arguments came about that a CPU kernel wants from the host for each call.

    vLLM's attention kernel for CPUs takes a plan of the batch, made before the forward. A GPU graph has no such thing:
    there the kernel finds out by itself. So a replay makes the plan anew, from the tensors of the captured call.
    ``makers``: qualified names of operators whose results are such arguments.
    """

    def __init__(self, makers: frozenset[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.makers = makers
        self.made: dict[int, tuple[Tensor, Callable[[], Any]]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name in self.makers:
            # held, so that no other tensor gets its memory
            self.made[_memory(result)] = result, lambda: func(*args, **kwargs)
        return result

    def remade(self, args: tuple[Any, ...]) -> dict[int, Callable[[], Any]]:
        """Places of such arguments, and how each is made."""
        return {
            place: self.made[_memory(arg)][1]
            for place, arg in enumerate(args)
            if isinstance(arg, Tensor) and _memory(arg) in self.made
        }


@contextlib.contextmanager
def capture(graph: Graph, host: HostCalls | None = None) -> Iterator[Recorder]:
    """Record what runs inside the block, Triton's interpreted launches and compiled kernels included."""
    recorder = Recorder(graph, host)
    with recorder, _recorded_launches(recorder), watching(recorder):
        yield recorder


@contextlib.contextmanager
def _recorded_launches(recorder: Recorder) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(function: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        recorder.launch(run.__get__(function), grid, args, kwargs)

    InterpretedFunction.run = recorded
    try:
        yield
    finally:
        InterpretedFunction.run = run


def _is_compiled(func: Any) -> bool:
    return func.namespace in _COMPILED or func.namespace.startswith(_COMPILED_PREFIX)


def _body(func: Any) -> Callable[..., Any]:
    """The CPU kernel of an operator that is written in Python."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
        raise CaptureError(f"{func.name()} has no CPU kernel to look into")
    return lambda *args, **kwargs: func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


def _refuse_masks(func: Any, args: tuple[Any, ...]) -> None:
    """Shapes that depend on values are read by the host: on a GPU the capture ends with an error."""
    by_value = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if func.overloadpacket.__name__ in _INDEXING:
        masks = (torch.bool, torch.uint8)
        by_value = any(isinstance(leaf, Tensor) and leaf.dtype in masks for leaf in tree_leaves(args[1]))
    if by_value:
        raise _host_read(func)


def _host_read(func: Any) -> CaptureError:
    return CaptureError(f"{func.name()} reads a value on the host while a graph is captured")


def _memory(tensor: Tensor) -> int:
    """What two tensors have in common that share memory."""
    return int(tensor.untyped_storage()._cdata)
