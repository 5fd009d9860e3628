"""What the interpreter reports about a kernel's memory accesses, and the errors it raises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["out_of_bounds_load", "out_of_bounds_store", "poison"]


@dataclass(frozen=True)
class Access:
    """A load or store that must not be, first bad lane of one statement in one group of programs.

    program is (x, y, z) in the grid, lane the index inside the block (empty for a scalar), region the name of the
    argument the pointer was made from, offset the bytes from the start of that argument's storage, count how many
    lanes of the statement were bad.
    """

    kind: Kind
    kernel: str
    file: str
    line: int
    program: tuple[int, int, int]
    lane: tuple[int, ...]
    region: str
    offset: int
    count: int

    def __str__(self) -> str:
        what = {
            "out_of_bounds_load": "load outside",
            "out_of_bounds_store": "store outside",
            "poison": "NaN loaded from",
        }[self.kind]
        where = f"{self.file}:{self.line} in {self.kernel}, program {self.program}, lane {self.lane}"
        return f"{where}: {what} {self.region} at byte {self.offset} ({self.count} lanes)"


class BadAccess(RuntimeError):
    """A kernel touched what it must not; memory is as it was before the launch. ``access`` says where."""

    def __init__(self, access: Access) -> None:
        super().__init__(str(access))
        self.access = access


class KernelError(RuntimeError):
    """A kernel cannot be run: the message starts with its file and line, the cause is Triton's own error."""


class FallbackWarning(UserWarning):
    """A kernel ran in Triton's own interpreter, unchecked and uncounted; the message says why."""
