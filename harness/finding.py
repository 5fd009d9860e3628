"""One thing that a judge found wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass

from .trace import RowIndex


@dataclass(frozen=True)
class FirstBad:
    """The first bad entry: step and row of the Case, head (None where a row is judged whole), request, position."""

    step: int
    row: int
    head: int | None
    request: int
    position: int

    def __str__(self) -> str:
        head = "" if self.head is None else f" head {self.head}"
        return f"step {self.step} row {self.row}{head}: request {self.request} token {self.position}"


@dataclass(frozen=True)
class Finding:
    """What is wrong: symptom, one line for a person, the place and the likely reason where there is one."""

    symptom: str
    message: str
    first_bad: FirstBad | None = None
    cause: str | None = None


def place(rows: RowIndex, entry: int, head: int | None) -> FirstBad:
    """The place of one entry of a trace."""
    where = (int(column[entry]) for column in (rows.step, rows.row, rows.request, rows.position))
    step, row, request, position = where
    return FirstBad(step, row, head, request, position)
