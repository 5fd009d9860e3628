"""One launch of a kernel: its programs in groups that fit in memory, undone if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from .arguments import bind, kernel_values
from .builder import Builder
from .findings import KernelError
from .language import changes
from .memory import Watch
from .programs import Grid, Programs
from .scope import Scope
from .source import Source
from .statements import Statements
from .traffic import Launch

# programs of the first group; its largest array tells how many fit into one of later groups
_FIRST = 512
_LARGEST_ARRAY = 256 * 2**20


def launch(function: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch, most: int) -> Launch:
    """Run the kernel ``function`` (a plain Python function) over a grid; gives its traffic.

    Raises Unsupported, KernelError or BadAccess, each with memory as it was before.
    """
    source = Source.of(function)
    arguments = bind(source, args, kwargs)
    sizes = _grid(grid(arguments) if callable(grid) else grid)
    counted = Launch(source.name, sizes)
    watch = replace(watch, launch=None if watch.launch is None else counted)
    builder = Builder(watch, source.name)
    found = len(watch.findings)
    try:
        with _language(), np.errstate(all="ignore"):
            values = kernel_values(source, arguments, watch.regions)
            for programs in _groups(sizes, builder, most):
                builder.peak = 0
                # the caller of a kernel has no names
                Statements(builder).run_function(source, values, Scope(source, programs))
        builder.commit()
    except BaseException:
        builder.undo()
        del watch.findings[found:]
        raise
    finally:
        watch.regions.forget()
    return counted


def _grid(grid: Any) -> Grid:
    sizes = tuple(int(n) for n in (grid if isinstance(grid, tuple | list) else (grid,)))
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise KernelError(f"grid is {grid}: one to three sizes of at least 0")
    x, y, z = sizes + (1,) * (3 - len(sizes))
    return x, y, z


def _groups(grid: Grid, builder: Builder, most: int) -> Iterator[Programs]:
    """All programs in order, in groups."""
    total = int(np.prod(grid))
    done, size = 0, min(_FIRST, most)
    while done < total:
        group = Programs(np.arange(done, min(done + size, total), dtype=np.int64), grid)
        yield group
        done += len(group)
        each = max(1, builder.peak // len(group))
        size = max(1, min(_LARGEST_ARRAY // each, most))


@contextmanager
def _language() -> Iterator[None]:
    """Triton's functions and types as our builder needs them, put back whatever happens."""
    done: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in changes():
            done.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(done):
            setattr(owner, name, value)
