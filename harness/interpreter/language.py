"""Which function a kernel means: Triton's own behind what its interpreter left in place of it, and ours for a few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton.language as tl
from triton.language import core, standard
from triton.language import math as tl_math
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .types import CHANGES

Change = tuple[Any, str, Any]

# where Triton's interpreter exchanges functions; it does not put all of them back
_PLACES: tuple[Any, ...] = (tl, core, tl_math, tl.tensor, core.tensor_descriptor_base)
# functions that need a builder of compiled code, and those that are called most
OURS = (
    "load",
    "store",
    "reduce",
    "associative_scan",
    "_reduce_with_indices",
    "static_assert",
    "static_print",
    "multiple_of",
    "max_contiguous",
    "max_constancy",
)


@dataclass(frozen=True)
class Bound:
    """A device function called as a method of a tensor."""

    function: Any
    owner: Any


def is_device_function(value: Any) -> bool:
    """True for what ``triton.jit`` makes, compiled or interpreted."""
    return isinstance(value, JITFunction | InterpretedFunction)


def pristine(function: Any) -> Any:
    """Triton's function, where its interpreter left a lambda around it."""
    while (inner := (getattr(function, "__kwdefaults__", None) or {}).get("member")) is not None:
        function = inner
    return function


def changes() -> list[Change]:
    """(object, name, value) to set while a launch runs: faster types, and builtins that were exchanged."""
    left = [(place, name, own) for place, name, own in _builtins() if vars(place)[name] is not own]
    return [*CHANGES, *left]


@cache
def _builtins() -> tuple[Change, ...]:
    """Every builtin of the language, with what its interpreter may have left in its place."""
    found = ((place, name, pristine(value)) for place in _PLACES for name, value in vars(place).items())
    return tuple((place, name, own) for place, name, own in found if getattr(own, core.TRITON_BUILTIN, False))


def ours() -> dict[int, str]:
    """id of a function of triton.language -> its name, for those that we run; as they are bound now."""
    found = {id(getattr(place, name)): name for place in (tl, core) for name in OURS if hasattr(place, name)}
    return {**found, id(standard.sum): "sum"}


def attribute(owner: Any, name: str) -> Any:
    """``owner.name`` as a kernel means it."""
    if isinstance(owner, tl.tensor):
        if name in OURS:
            return Bound(getattr(core, name), owner)
        if name in _standard_members():
            return Bound(getattr(standard, name), owner)
    elif name == "value" and isinstance(owner, bool | int | float | str | type(None) | core.dtype):
        # constants are held without their constexpr
        return owner
    return getattr(owner, name)


@cache
def _standard_members() -> frozenset[str]:
    return frozenset(
        name for name, value in vars(standard).items() if is_device_function(value) and hasattr(tl.tensor, name)
    )


@cache
def wants(function: Callable[..., Any]) -> tuple[bool, bool]:
    """Whether a builtin takes _semantic and _generator."""
    import inspect

    signature = getattr(function, "signature", None) or inspect.signature(function)
    return "_semantic" in signature.parameters, "_generator" in signature.parameters
