"""What a benchmark says: figures, or that there is nothing to measure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One line of a benchmark: what, how much, in which unit, and why it must not be so (empty where it may)."""

    name: str
    value: float
    unit: str
    complaint: str = ""


class NothingToMeasure(RuntimeError):
    """This machine lacks what the benchmark measures; the message says what."""
