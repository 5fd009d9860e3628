"""What a benchmark says: figures, or that there is nothing to measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One line of a benchmark: what, how much, in which unit, and why it must not be so (empty where it may).

    ``low`` and ``high``: the smallest and the largest of several rounds, both None where there was one.
    """

    name: str
    value: float
    unit: str
    complaint: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def line(self) -> str:
        """For a person."""
        spread = "" if self.low is None else f"  ({self.low:.4g} to {self.high:.4g})"
        return f"{self.name:56} {self.value:12.4g} {self.unit}{spread}"


@dataclass(frozen=True)
class Note:
    """A line of a benchmark without a number: how to read the figures, or what was not measured and why.

    ``complaint``: why it must not be so, empty where it may.
    """

    name: str
    text: str
    complaint: str = ""

    @property
    def line(self) -> str:
        """For a person."""
        return f"{self.name}: {self.text}"


class NothingToMeasure(RuntimeError):
    """This machine lacks what the benchmark measures; the message says what."""
