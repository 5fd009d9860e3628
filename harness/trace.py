"""What a run leaves behind: outputs, states at flushes, cursors, events, counts; columns, one entry a row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowIndex:
    """Which row an entry belongs to, [N] each: step and row of the Case, request, position of the row's last token."""

    step: IntArray
    row: IntArray
    request: IntArray
    position: IntArray

    def __len__(self) -> int:
        return len(self.step)

    def select(self, places: IntArray) -> RowIndex:
        """The entries at ``places``, in their order."""
        return RowIndex(self.step[places], self.row[places], self.request[places], self.position[places])

    def labels(self) -> list[tuple[int, int]]:
        """(step, row) of each entry: what two traces of one Case are matched by."""
        return list(zip(self.step.tolist(), self.row.tolist(), strict=True))


@dataclass(frozen=True)
class Cursors:
    """What the decode op was told, an entry for each row that ran as decode, [N] each."""

    rows: RowIndex
    write_pos: IntArray
    is_flush: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Event:
    """Something that must not happen, seen while running: its symptom, where, and one line for a person."""

    symptom: str
    step: int
    row: int | None
    message: str


@dataclass(frozen=True)
class Failure:
    """A run that did not end: symptom (exception, timeout, crash, not_entered), stage, one line."""

    symptom: str
    stage: str
    message: str


@dataclass(frozen=True)
class Trace:
    """One leg of one Case at one level.

    ``outputs`` [N, HV, V] (layer levels) or log-probabilities [N, vocab] (engine), float32 or float64, by ``rows``;
    ``states`` [F, HV, V, K] after each flush, by ``state_rows``, where a level can see them.
    ``counts``: replay_steps (rows that the replay op ran), flushes (of those). ``stock_reads``: host reads of device
    values by vLLM's own code, which are listed and not judged.
    """

    rows: RowIndex
    outputs: Tensor
    state_rows: RowIndex | None = None
    states: Tensor | None = None
    cursors: Cursors | None = None
    events: tuple[Event, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    stock_reads: tuple[str, ...] = ()


def row_index(entries: list[tuple[int, int, int, int]]) -> RowIndex:
    """A RowIndex from (step, row, request, position) tuples."""
    table = np.array(entries, dtype=np.int64).reshape(-1, 4)
    return RowIndex(table[:, 0], table[:, 1], table[:, 2], table[:, 3])
