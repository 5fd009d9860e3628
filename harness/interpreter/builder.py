"""Triton's builder over numpy: what ``triton.language.semantic`` calls for each operation of a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterOptions

from .handle import Handle, Unsupported
from .memory import Memory, Watch
from .programs import Programs


class Builder(Memory):
    """All operations, for one launch."""

    def __init__(self, watch: Watch, kernel: str) -> None:
        super().__init__(watch)
        self.kernel = kernel
        self.arch = None
        # overflow checks double the work of integer sums and report only in debug builds
        self.options = InterpreterOptions(sanitize_overflow=False)
        self.codegen_fns = {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def at(self, programs: Programs, file: str, line: int) -> None:
        """The statement at file and line runs for these programs."""
        self.programs = programs
        self.place = (file, line)

    def create_get_program_id(self, axis: int) -> Handle:
        return Handle(self.programs.coordinates[axis], tl.int32)

    def create_get_num_programs(self, axis: int) -> Handle:
        return Handle(np.array([self.programs.grid[axis]], np.int32), tl.int32)

    def get_cache_policy(self, *policy: Any) -> None:
        """Caches are not modelled."""

    def create_barrier(self) -> None:
        """Programs are not split into threads."""

    def create_assume(self, condition: Handle) -> None:
        """A hint."""

    def create_assert(self, condition: Handle, message: str) -> None:
        """Runs in debug builds only."""

    def create_print(self, prefix: str, hex: bool, values: list[Handle], is_signed: list[bool]) -> None:
        for row in range(len(self.programs)):
            shown = (value.data[min(row, len(value.data) - 1)] for value in values)
            print(f"{self.programs.at(row)} {prefix}", *shown)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("create_", "get_", "new_")):
            raise Unsupported(f"the operation {name.removeprefix('create_')}")
        raise AttributeError(name)
