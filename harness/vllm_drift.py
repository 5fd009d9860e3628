"""Holds a seam beside the vLLM that is installed: by import, signature and source, nothing is run."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from .seam import Kind, Seam

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Missing(LookupError):
    """A name that is not there; the message says from where on."""


def drifts(seam: Seam) -> list[str]:
    """What of the seam is not as the table has it, a line each; none where all is. Imports what the seam names."""
    try:
        if seam.kind == "entry_point":
            return _entry_point(seam)
        if seam.kind == "environment":
            return _environment(seam)
        if seam.kind == "operator":
            return _operator(seam)
        found, static = _find(seam.name)
    except Missing as missing:
        return [str(missing)]
    if not _IS[seam.kind](found):
        return [f"is no {seam.kind} but a {type(found).__name__}"]
    lines = []
    if seam.kind in ("class", "function", "method") and (seam.in_order or seam.by_name or seam.others == "none"):
        lines += _parameters(seam, _signature(found, seam.kind, static))
    lines += [f"attribute {name} is missing" for name in seam.attributes.split() if not _has(found, name)]
    if seam.uses:
        mentioned = _mentioned(found)
        lines += [f"its code does not mention {name}" for name in seam.uses.split() if name not in mentioned]
    if seam.value is not None and seam.value not in str(found):
        lines.append(f"is {found!r}, not {seam.value!r}")
    return lines


_IS: dict[Kind, Callable[[Any], bool]] = {
    "module": inspect.ismodule,
    "class": inspect.isclass,
    "function": callable,
    "method": callable,
    "attribute": lambda found: True,
}


def _find(name: str) -> tuple[Any, Any]:
    """The object of a dotted path, and as its holder's dictionary has it. Raises Missing."""
    words = name.split(".")
    found: Any = _import(words[0], "")
    static = found
    for place, word in enumerate(words[1:], start=1):
        holder = ".".join(words[:place])
        if inspect.ismodule(found) and not hasattr(found, word):
            found = static = _import(f"{holder}.{word}", holder)
            continue
        try:
            static = inspect.getattr_static(found, word, None)
            found = getattr(found, word)
        except AttributeError:
            raise Missing(f"{holder} has no {word}") from None
    return found, static


def _import(module: str, holder: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module or (holder and not hasattr(importlib.import_module(holder), "__path__")):
            raise Missing(f"{holder} has no {module.rpartition('.')[2]}" if holder else f"no {module}") from None
        raise Missing(f"{module} cannot be imported: {error}") from None
    except Exception as error:
        raise Missing(f"{module} cannot be imported: {type(error).__name__}: {error}") from None


def _entry_point(seam: Seam) -> list[str]:
    found = importlib.metadata.entry_points(group=seam.name)
    targets = [entry.value for entry in found]
    return [] if seam.value in targets else [f"no entry point {seam.value} in group {seam.name}: it has {targets}"]


def _environment(seam: Seam) -> list[str]:
    module, _, name = seam.name.rpartition(".")
    known, _ = _find(f"{module}.environment_variables")
    return [] if name in known else [f"vLLM knows no {name}"]


def _operator(seam: Seam) -> list[str]:
    import torch

    namespace, _, name = seam.name.partition("::")
    # the package's extension registers it
    _find("vllm._custom_ops")
    return [] if hasattr(getattr(torch.ops, namespace), name) else [f"there is no operator {seam.name}"]


def _signature(found: Any, kind: Kind, static: Any) -> list[inspect.Parameter]:
    """Parameters as a caller gives them, without self."""
    parameters = list(inspect.signature(found).parameters.values())
    bound = kind != "method" or isinstance(static, (classmethod, staticmethod))
    return parameters if bound else parameters[1:]


def _parameters(seam: Seam, found: Sequence[inspect.Parameter]) -> list[str]:
    in_order, by_name = seam.in_order.split(), seam.by_name.split()
    there = [parameter.name for parameter in found]
    positions = [parameter.name for parameter in found if parameter.kind in _POSITIONAL]
    gathers = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found)
    lines = [f"parameter {name} is missing" for name in in_order if name not in positions]
    lines += [f"parameter {name} is missing" for name in by_name if name not in there and not gathers]
    first = positions[: len(in_order)]
    if not lines and first != in_order:
        lines.append(f"parameters in another order: ({', '.join(first)}), we pass ({', '.join(in_order)})")
    others = [parameter for parameter in found if parameter.name not in (*in_order, *by_name)]
    if seam.others == "none":
        lines += [f"takes {parameter}, which our override does not" for parameter in others]
    if seam.others == "optional":
        needed = [entry for entry in others if entry.default is entry.empty and entry.kind not in _VARIADIC]
        lines += [f"needs {parameter.name}, which we do not pass" for parameter in needed]
    return lines


def _has(holder: Any, name: str) -> bool:
    """A class attribute, a declared field, or what the methods of the class set on self."""
    if hasattr(holder, name):
        return True
    return any(name in getattr(base, "__annotations__", {}) or name in _set_on_self(base) for base in holder.__mro__)


@cache
def _set_on_self(holder: type) -> frozenset[str]:
    return frozenset(
        node.attr
        for node in _nodes(holder)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _mentioned(found: Any) -> set[str]:
    """Names, attributes and texts in the source of a function."""
    mentioned = set()
    for node in _nodes(inspect.unwrap(found)):
        if isinstance(node, ast.Name):
            mentioned.add(node.id)
        elif isinstance(node, ast.Attribute):
            mentioned.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned.add(node.value)
    return mentioned


def _nodes(found: Any) -> Iterator[ast.AST]:
    """Nodes of the source; none where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError):
        return iter(())
    return ast.walk(ast.parse(source))
