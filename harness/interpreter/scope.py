"""Local names of a kernel for a group of programs, how a group splits at a branch and comes together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .handle import ANYWHERE, Handle, Origin
from .programs import Programs, Rows

if TYPE_CHECKING:
    from .source import Source

ToTensor = Callable[[Any], Any]


class _Nothing:
    """Stands for a value that is not there."""


# a name that is not local, and a local one that some of the programs never set
ABSENT, MISSING = _Nothing(), _Nothing()


class Scope:
    """Local names for some programs. A scope that was split is not written any more: its parts hold what follows."""

    __slots__ = ("parent", "programs", "rows", "source", "values", "written")

    def __init__(self, source: Source, programs: Programs, parent: Scope | None = None, rows: Rows | None = None):
        self.source = source
        self.programs = programs
        self.parent = parent
        self.rows = rows
        self.values: dict[str, Any] = {}
        self.written: set[str] = set()

    def get(self, name: str) -> Any:
        """The value for these programs, ABSENT if the name is not local, MISSING if some of them have not set it."""
        owner: Scope = self
        below: list[Rows] = []
        while name not in owner.values:
            if owner.parent is None or owner.rows is None:
                return ABSENT
            below.append(owner.rows)
            owner = owner.parent
        value = owner.values[name]
        if type(value) is _Deferred:
            value = owner.values[name] = value.merged(name)
        if below and value is not MISSING:
            rows = below.pop()
            while below:
                rows = rows[below.pop()]
            value = self.values[name] = take(value, rows)
        return value

    def bind(self, name: str, value: Any) -> None:
        """Bind a name."""
        self.values[name] = value
        self.written.add(name)

    def part(self, rows: Rows) -> Scope:
        """The scope of the programs at ``rows``."""
        return Scope(self.source, self.programs.take(rows), self, rows)

    def written_since(self, base: Scope) -> set[str]:
        """Names bound between ``base``, an ancestor, and here."""
        names: set[str] = set()
        scope: Scope | None = self
        while scope is not None and scope is not base:
            names |= scope.written
            scope = scope.parent
        return names


class _Deferred:
    """A name of joined scopes that is merged when it is asked for: the last use of a tile is often in a branch."""

    def __init__(self, parts: list[Scope], rows: list[Rows], to_tensor: ToTensor) -> None:
        self._parts = parts
        self._rows = rows
        self._to_tensor = to_tensor

    def merged(self, name: str) -> Any:
        """The value."""
        return merge([part.get(name) for part in self._parts], self._rows, self._to_tensor, name)


def join(base: Scope, parts: list[Scope], to_tensor: ToTensor, now: bool) -> Scope | None:
    """One scope for the programs of parts that were split from ``base``; None without parts.

    Values are merged ``now`` or when they are asked for; a loop would otherwise keep those of all its rounds.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    programs = parts[0].programs.union([part.programs for part in parts[1:]])
    joined = Scope(base.source, programs, base, base.programs.rows_of(programs))
    rows = [programs.rows_of(part.programs) for part in parts]
    written: set[str] = set().union(*(part.written_since(base) for part in parts))
    for name in sorted(written):
        deferred = _Deferred(parts, rows, to_tensor)
        joined.bind(name, deferred.merged(name) if now else deferred)
    return joined


def take(value: Any, rows: Rows) -> Any:
    """A local value for the programs at ``rows``."""
    if isinstance(value, tl.tensor):
        handle = value.handle
        if len(handle.data) == 1 and isinstance(handle.origin, int):
            return value
        return tl.tensor(handle.take(rows), value.type)
    if isinstance(value, tuple):
        return _like(value, [take(item, rows) for item in value])
    if isinstance(value, list):
        return [take(item, rows) for item in value]
    return value


def merge(values: list[Any], rows: list[Rows], to_tensor: ToTensor, name: str) -> Any:
    """One value from those of disjoint groups, whose programs stand at ``rows`` of the result.

    Raises TypeError where types differ, as Triton's compiler does.
    """
    first = values[0]
    if any(value is MISSING or value is ABSENT for value in values):
        return MISSING
    if all(value is first for value in values) and not _per_program(first):
        return first
    if isinstance(first, tuple | list):
        if any(type(value) is not type(first) or len(value) != len(first) for value in values):
            raise TypeError(f"{name} is a tuple of another length in another branch")
        columns = zip(*values, strict=True)
        return _like(first, [merge(list(column), rows, to_tensor, name) for column in columns])
    if not any(isinstance(value, tl.tensor) for value in values) and all(_same(value, first) for value in values):
        return first
    tensors = [to_tensor(value) for value in values]
    kind = next((value.type for value in values if isinstance(value, tl.tensor)), tensors[0].type)
    if any(tensor.type != kind for tensor in tensors):
        types = " and ".join(sorted({str(tensor.type) for tensor in tensors}))
        raise TypeError(f"{name} has types {types} in branches that come together")
    return tl.tensor(_scatter([tensor.handle for tensor in tensors], rows), kind)


def _per_program(value: Any) -> bool:
    if isinstance(value, tl.tensor):
        return len(value.handle.data) > 1 or not isinstance(value.handle.origin, int)
    return isinstance(value, tuple | list) and any(_per_program(item) for item in value)


def _same(value: Any, first: Any) -> bool:
    return value is first or (type(value) is type(first) and bool(value == first))


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _scatter(handles: list[Handle], rows: list[Rows]) -> Handle:
    size = sum(len(part) for part in rows)
    data = np.empty((size, *handles[0].data.shape[1:]), handles[0].data.dtype)
    origins = np.full(size, ANYWHERE, np.int64)
    for handle, part in zip(handles, rows, strict=True):
        data[part] = handle.data
        origins[part] = handle.origin
    origin: Origin = int(origins[0]) if (origins == origins[0]).all() else origins
    return Handle(data, handles[0].dtype, origin, all(handle.aligned for handle in handles))
