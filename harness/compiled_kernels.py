"""Inductor's C++ kernels made visible on a CPU: compiled code calls them past the dispatcher, where the watches are.

On a GPU a CUDA graph holds a compiled kernel like any other. Here the recorder of graphs and the sentinel of host reads
are told of each launch and of each view that compiled code takes of its buffers, by the two names that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Kernel = Callable[..., Any]


class Watcher(Protocol):
    """Who is told what compiled code does."""

    def launched(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """A kernel has run on ``args``: tensors that it reads or writes, and integers."""
        ...

    def viewed(self, base: Tensor, view: Tensor) -> None:
        """``view`` was taken of ``base``."""
        ...


_watchers: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Tell ``watcher`` of what compiled code does inside the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()


@cache
def make_visible() -> None:
    """From now on in this process: kernels that Inductor builds, and views in code that it generates, are told of."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    built = CppPythonBindingsCodeCache.load_pybinding_async.__func__  # type: ignore[attr-defined]
    guards: Any = torch._C._dynamo.guards
    reinterpret = guards._reinterpret_tensor

    def load_pybinding_async(cls: Any, *args: Any, **kwargs: Any) -> Callable[[], Kernel]:
        get = built(cls, *args, **kwargs)
        # a subclass loads whole graphs by it
        return (lambda: _visible(get())) if cls is CppPythonBindingsCodeCache else get

    def reinterpret_tensor(base: Tensor, *args: Any) -> Tensor:
        view: Tensor = reinterpret(base, *args)
        for watcher in _watchers:
            watcher.viewed(base, view)
        return view

    CppPythonBindingsCodeCache.load_pybinding_async = classmethod(load_pybinding_async)  # type: ignore[method-assign, assignment]
    guards._reinterpret_tensor = reinterpret_tensor


def _visible(kernel: Kernel) -> Kernel:
    def launch(*args: Any) -> None:
        kernel(*args)
        for watcher in _watchers:
            watcher.launched(kernel, args)

    return launch
