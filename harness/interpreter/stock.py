"""Triton's own interpreter, for kernels that ours does not run and to compare with it: 50-100 ms a program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
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


def _reflected(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: core.constexpr(operation(core._unwrap_if_constexpr(other), self.value))


_REFLECTED = {
    "__rmod__": _reflected(operator.mod),
    "__rand__": _reflected(operator.and_),
    "__ror__": _reflected(operator.or_),
    "__rxor__": _reflected(operator.xor),
    "__rlshift__": _reflected(operator.lshift),
    "__rrshift__": _reflected(operator.rshift),
}


def run_stock(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Launch a kernel of ``triton.jit``, in either mode, in Triton's own interpreter; pre-run hooks are not called."""
    with _language_put_back(), _device_functions(), _aliases(kernel.fn):
        _run_interpreted(_interpreted(kernel), *args, grid=grid, warmup=False, **kwargs)


def _interpreted(kernel: Any) -> Any:
    # the kernel itself cannot be the key: a JITFunction's hash covers all it calls
    return _interpreted_function(kernel.fn)


@cache
def _interpreted_function(function: Any) -> Any:
    return InterpretedFunction(function)


@contextmanager
def _device_functions() -> Iterator[None]:
    """Let functions that were made for the compiler be called, also as methods of tensors.

    The compiler holds every constant in a constexpr, the interpreter sizes of shapes only: for the mixture constexpr
    lacks some reflected operators.
    """
    call = JITFunction.__call__
    methods = {
        name: (vars(core.tensor)[name], value)
        for name, value in vars(standard).items()
        if is_device_function(value) and name in vars(core.tensor)
    }
    JITFunction.__call__ = lambda self, *args, **kwargs: _interpreted(self)(*args, **kwargs)
    for name, (_, function) in methods.items():
        setattr(core.tensor, name, _method(function))
    lacking = {name: operation for name, operation in _REFLECTED.items() if name not in vars(core.constexpr)}
    for name, operation in lacking.items():
        setattr(core.constexpr, name, operation)
    try:
        yield
    finally:
        for name in lacking:
            delattr(core.constexpr, name)
        JITFunction.__call__ = call
        for name, (before, _) in methods.items():
            setattr(core.tensor, name, before)


@contextmanager
def _aliases(function: Any) -> Iterator[None]:
    """Let builtins be called that a module of the kernel imported by name, which the interpreter does not exchange."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    namespaces = {id(function.__globals__): function.__globals__}
    waiting = [function.__globals__]
    while waiting:
        namespace = waiting.pop()
        for name, value in list(namespace.items()):
            if getattr(value, core.TRITON_BUILTIN, False) is True:
                changed.append((namespace, name, value))
            elif is_device_function(value) and id(value.fn.__globals__) not in namespaces:
                namespaces[id(value.fn.__globals__)] = value.fn.__globals__
                waiting.append(value.fn.__globals__)
    # the language itself is exchanged by the interpreter
    own = [vars(place) for place in (tl, core, tl_math, standard)]
    changed = [one for one in changed if all(one[0] is not namespace for namespace in own)]
    for namespace, name, value in changed:
        namespace[name] = _interpreting(value)
    try:
        yield
    finally:
        for namespace, name, value in changed:
            namespace[name] = value


def _interpreting(builtin: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_semantic", None)
        return builtin(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    return call


@contextmanager
def _language_put_back() -> Iterator[None]:
    """Undo what the interpreter exchanges in Triton's language: of device functions it leaves it behind."""
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
