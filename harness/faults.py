"""Planted faults: each is one small change to the source of the correct path, switched on for one run."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType

from ..cases.refusal import Refusal
from .fault_catalogue import FAULTS
from .fault_form import Edit, Fault

# of the kernel level: what runs is the Triton kernel
TRITON_TARGETS = ("triton", "triton_gpu")


class FaultError(Refusal):
    """A fault that does not exist, has no form at the level asked for, or no longer fits the source it changes."""


def fault(name: str) -> Fault:
    """The fault of that name. Raises FaultError with the names there are."""
    found = FAULTS.get(name)
    if found is None:
        raise FaultError(f"fault: there is no {name!r}; there are {', '.join(FAULTS)}")
    return found


@contextmanager
def plant(name: str | None, level: str, target: str | None = None) -> Iterator[None]:
    """Run the block with the fault in place; None plants nothing. ``target``: of the level, its first one if None.

    The functions' code is exchanged in place, so every holder of them sees the fault, and put back afterwards.
    Raises FaultError for an unknown name, a level without it, or source that has moved on.
    """
    with planted(_edits(name, level, target)):
        yield


@contextmanager
def plant_after_capture(name: str | None) -> Iterator[None]:
    """Run the block with what of the fault is planted once an engine has captured its graphs."""
    with planted(() if name is None else fault(name).after_capture):
        yield


@contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[None]:
    """Run the block with all these edits in place."""
    with ExitStack() as stack:
        for where in dict.fromkeys(edit.where for edit in edits):
            stack.enter_context(edited(where, [edit for edit in edits if edit.where == where]))
        yield


@contextmanager
def edited(where: str, edits: Sequence[Edit]) -> Iterator[None]:
    """Run the block with one function's source changed. Raises FaultError where an edit does not fit it."""
    kernel = _triton_function(where)
    if kernel is not None:
        from .interpreter import rewritten

        with rewritten(kernel, _changed_source(kernel, edits)):
            yield
        return
    function = _function(where)
    original = function.__code__
    function.__code__ = _changed_code(function, edits)
    try:
        yield
    finally:
        function.__code__ = original


def forms(target: str | None) -> list[tuple[str, str]]:
    """(fault, level) of every form there is; of a Triton target those in the Triton kernel."""
    if target in TRITON_TARGETS:
        return [(name, "kernel") for name, entry in FAULTS.items() if entry.triton]
    return [(name, level) for name, entry in FAULTS.items() for level in entry.levels]


def _edits(name: str | None, level: str, target: str | None) -> tuple[Edit, ...]:
    if name is None:
        return ()
    found = fault(name)
    if target in TRITON_TARGETS:
        if target != "triton" or not found.triton:
            raise FaultError(f"fault: {name} has no form for target {target}; use target torch or another fault")
        return found.triton
    if level not in found.edits:
        raise FaultError(f"fault: {name} has no form at level {level}; it has one at {', '.join(found.edits)}")
    return found.edits[level]


def _triton_function(where: str) -> FunctionType | None:
    """The Python function of a Triton kernel, None where something else stands there."""
    function = getattr(_found(where), "fn", None)
    return function if isinstance(function, FunctionType) else None


def _function(where: str) -> FunctionType:
    found = _found(where)
    unwrapped = inspect.unwrap(found) if callable(found) else found
    if not isinstance(unwrapped, FunctionType):
        raise FaultError(f"{where}: is no function")
    return unwrapped


def _found(where: str) -> object:
    module, _, path = where.partition(":")
    ours = f"{__package__.rsplit('.', 1)[0]}.{module}"
    found: object = importlib.import_module(module if module.split(".")[0] == "vllm" else ours)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    return found


def _changed_source(function: FunctionType, edits: Sequence[Edit]) -> str:
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise FaultError(f"{edit.where}: {edit.old!r} stands there {source.count(edit.old)} times, it must be once")
        source = source.replace(edit.old, edit.new)
    return source


def _changed_code(function: FunctionType, edits: Sequence[Edit]) -> CodeType:
    source, first = _changed_source(function, edits), function.__code__.co_firstlineno
    # inside a class, so that super() finds its cell; line numbers stay those of the file
    wrapped = "class _:\n" + textwrap.indent(source, " ")
    module = compile("\n" * (first - 2) + wrapped, function.__code__.co_filename, "exec")
    for code in _nested(module):
        if code.co_name == function.__name__ and code.co_freevars == function.__code__.co_freevars:
            return code.replace(co_qualname=function.__code__.co_qualname)
    raise FaultError(f"{edits[0].where}: the changed source has no function {function.__name__} like the original")


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)
