"""What each level implements: a Path takes a Case and leaves a Trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..cases.case import Case
from ..cases.timeline import Timeline
from .trace import Failure, Trace


@dataclass(frozen=True)
class Legs:
    """The three legs of one Case at one level, or why there are none.

    ``truth`` is the oracle in float64, ``subject`` the replay path, ``baseline`` packed decode (layer levels) or
    replay with L = 1 (engine). ``failure`` is set where a leg did not end; ``subject`` is then what it left till there.
    """

    level: str
    case: Case
    timeline: Timeline
    truth: Trace | None
    subject: Trace | None
    baseline: Trace | None
    failure: Failure | None = None


class Path(Protocol):
    """One level and the implementation it drives; ``fault`` is planted in the subject's leg alone."""

    level: str
    target: str
    fault: str | None

    def run(self, case: Case) -> Legs:
        """All three legs. What goes wrong inside a leg comes back as ``Legs.failure``, never as an exception."""
        ...
