"""The source of a kernel or device function: its syntax tree with the lines of its file, and its outer names."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from triton.runtime.jit import KernelParam

from .handle import Unsupported

_sources: dict[Callable[..., Any], Source] = {}


@dataclass(frozen=True, eq=False)
class Source:
    """One function; line numbers of ``body`` are those of ``file``."""

    function: Callable[..., Any]
    name: str
    file: str
    body: list[ast.stmt]
    signature: inspect.Signature

    @staticmethod
    def of(function: Callable[..., Any]) -> Source:
        """The source of a Python function, parsed once. Raises Unsupported where there is none."""
        source = _sources.get(function)
        if source is None:
            source = _sources[function] = _parse(function)
        return source

    @cached_property
    def parameters(self) -> tuple[Any, ...]:
        """Triton's view of each parameter: its name, annotation and whether it is a constexpr."""
        return tuple(KernelParam(i, p, False, False) for i, p in enumerate(self.signature.parameters.values()))

    def bind(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Values by parameter name, defaults filled in."""
        if not kwargs and len(args) == len(self.parameters):
            return {parameter.name: value for parameter, value in zip(self.parameters, args, strict=True)}
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def outer(self, name: str) -> Any:
        """A name that is not local: of an enclosing function, the module or Python itself. Raises NameError."""
        code = self.function.__code__
        if name in code.co_freevars:
            closure = self.function.__closure__ or ()
            return closure[code.co_freevars.index(name)].cell_contents
        namespace = self.function.__globals__
        if name in namespace:
            return namespace[name]
        try:
            return getattr(builtins, name)
        except AttributeError:
            raise NameError(f"{name} is not defined") from None


@contextmanager
def rewritten(function: Callable[..., Any], text: str) -> Iterator[None]:
    """Inside the block ``function`` runs as if ``text`` were its source, with the outer names that it has."""
    before = Source.of(function)
    _sources[function] = _parse(function, text)
    try:
        yield
    finally:
        _sources[function] = before


def _parse(function: Callable[..., Any], text: str | None = None) -> Source:
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise Unsupported(f"{function.__name__} has no source") from None
    tree = ast.parse(textwrap.dedent("".join(lines)) if text is None else text)
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise Unsupported(f"{function.__name__} is not a plain function")
    file = inspect.getsourcefile(function) or function.__code__.co_filename
    return Source(function, function.__name__, file, definition.body, inspect.signature(function))
