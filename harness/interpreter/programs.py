"""Programs of a launch, by number: the group that a statement runs for."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Grid = tuple[int, int, int]


class Programs:
    """Some programs of a grid, in the order in which Triton's own interpreter runs them: x slowest, z fastest."""

    def __init__(self, flat: Rows, grid: Grid) -> None:
        self.flat = flat
        self.grid = grid

    def __len__(self) -> int:
        return len(self.flat)

    @cached_property
    def coordinates(self) -> tuple[NDArray[np.int32], ...]:
        """program_id along x, y and z, each (P,), or (1,) where all programs agree."""
        return tuple(_uniform(axis.astype(np.int32)) for axis in np.unravel_index(self.flat, self.grid))

    def at(self, row: int) -> Grid:
        """(x, y, z) of the program at ``row``."""
        x, y, z = (int(i) for i in np.unravel_index(int(self.flat[row]), self.grid))
        return x, y, z

    def take(self, rows: Rows) -> Programs:
        """The programs at ``rows``."""
        return Programs(self.flat[rows], self.grid)

    def union(self, others: list[Programs]) -> Programs:
        """All programs of disjoint groups, in order."""
        return Programs(np.sort(np.concatenate([self.flat, *(other.flat for other in others)])), self.grid)

    def rows_of(self, part: Programs) -> Rows:
        """Where the programs of ``part`` stand among these."""
        return np.searchsorted(self.flat, part.flat)


def _uniform(axis: NDArray[np.int32]) -> NDArray[np.int32]:
    return axis[:1] if len(axis) and (axis == axis[0]).all() else axis
