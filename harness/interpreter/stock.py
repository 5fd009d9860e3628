"""Triton's own interpreter, for kernels that ours does not run and to compare with it: 50-100 ms a program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core, standard
from triton.language import math as tl_math
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .language import is_device_function

_run_interpreted = InterpretedFunction.run
_PLACES = (tl, core, tl_math, core.tensor, core.dtype, core.condition, core.tensor_descriptor_base)


def run_stock(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Launch a kernel of ``triton.jit``, in either mode, in Triton's own interpreter; pre-run hooks are not called."""
    with _language_put_back(), _device_functions():
        _run_interpreted(_interpreted(kernel), *args, grid=grid, warmup=False, **kwargs)


def _interpreted(kernel: Any) -> Any:
    # the kernel itself cannot be the key: a JITFunction's hash covers all it calls
    return _interpreted_function(kernel.fn)


@cache
def _interpreted_function(function: Any) -> Any:
    return InterpretedFunction(function)


@contextmanager
def _device_functions() -> Iterator[None]:
    """Let functions that were made for the compiler be called, also as methods of tensors."""
    call = JITFunction.__call__
    methods = {
        name: (vars(core.tensor)[name], value)
        for name, value in vars(standard).items()
        if is_device_function(value) and name in vars(core.tensor)
    }
    JITFunction.__call__ = lambda self, *args, **kwargs: _interpreted(self)(*args, **kwargs)
    for name, (_, function) in methods.items():
        setattr(core.tensor, name, _method(function))
    try:
        yield
    finally:
        JITFunction.__call__ = call
        for name, (before, _) in methods.items():
            setattr(core.tensor, name, before)


@contextmanager
def _language_put_back() -> Iterator[None]:
    """Undo what the interpreter exchanges in Triton's language: of device functions it leaves it behind.

    Where somebody has it exchanged once for a whole process (cpu_platform), it stays exchanged.
    """
    if interpreter._patch_lang.__name__ != "_patch_lang":
        yield
        return
    before = [(place, dict(vars(place))) for place in _PLACES]
    try:
        yield
    finally:
        for place, names in before:
            for name, value in list(vars(place).items()):
                if name not in names:
                    delattr(place, name)
                elif names[name] is not value:
                    setattr(place, name, names[name])


def _method(function: Any) -> Any:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)
