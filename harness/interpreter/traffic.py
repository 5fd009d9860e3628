"""Bytes that kernels load and store, per line of their source and per program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .programs import Grid, Rows

Direction = Literal["load", "store"]


@dataclass(frozen=True)
class Line:
    """What one line of a launch moved: bytes of used lanes, (x, y, z) as the grid."""

    file: str
    line: int
    direction: Direction
    bytes: NDArray[np.int64]

    @property
    def total(self) -> int:
        """Bytes over all programs."""
        return int(self.bytes.sum())


class Launch:
    """The traffic of one launch; an atomic counts as a load and a store."""

    def __init__(self, kernel: str, grid: Grid) -> None:
        self.kernel = kernel
        self.grid = grid
        self._bytes: dict[tuple[str, int, Direction], NDArray[np.int64]] = {}
        # counted and not yet added up
        self._moves: list[tuple[tuple[str, int, Direction], Rows, NDArray[np.int64] | int]] = []

    def count(
        self, place: tuple[str, int], direction: Direction, programs: Rows, moved: NDArray[np.int64] | int
    ) -> None:
        """Add bytes to each of the programs: ``moved`` for all of them, or (P,) or (1,)."""
        self._moves.append(((*place, direction), programs, moved))

    @property
    def lines(self) -> list[Line]:
        """Every line that moved something, in order of file, line and direction."""
        for key, programs, moved in self._moves:
            if key not in self._bytes:
                self._bytes[key] = np.zeros(int(np.prod(self.grid)), np.int64)
            self._bytes[key][programs] += moved
        self._moves.clear()
        return [Line(*key, total.reshape(self.grid)) for key, total in sorted(self._bytes.items())]

    def bytes(self, direction: Direction) -> NDArray[np.int64]:
        """Bytes per program, shaped as the grid: sum over axes for a row or a head."""
        parts = [line.bytes for line in self.lines if line.direction == direction]
        return np.sum(parts, axis=0) if parts else np.zeros(self.grid, np.int64)


class Traffic:
    """The launches of a session, in order."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def of(self, kernel: str) -> list[Launch]:
        """The launches of one kernel."""
        return [launch for launch in self.launches if launch.kernel == kernel]

    def total(self, direction: Direction) -> int:
        """Bytes over all launches."""
        return sum(int(launch.bytes(direction).sum()) for launch in self.launches)
