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

    ``summands``: the sizes of what the truth's entries are sums of, None where a level does not know them.

    Where the layer levels store anything in 16 bits (the exact regime apart) the baseline is float32 all through, on
    the rounded inputs; ``rounding`` is the truth with only the roundings that storage makes unavoidable (outputs not
    rounded), ``undecided`` what roundings that may go either way can change in its entries; ``wide``, under 16-bit
    activations, is the subject once more on the same inputs in float32, because 16-bit outputs hide faults.

    ``float32`` (engine, where a plain comparison fails): the truth's formulas in float32, several times with other
    roundings. At a token whose sums nearly cancel one float32 evaluation, the baseline's, may be right by luck.
    ``execution`` (engine): vLLM's mode and cudagraph_mode of the subject's engine, None where it did not open.
    """

    level: str
    case: Case
    timeline: Timeline
    truth: Trace | None
    subject: Trace | None
    baseline: Trace | None
    failure: Failure | None = None
    rounding: Trace | None = None
    undecided: Trace | None = None
    summands: Trace | None = None
    wide: Trace | None = None
    float32: tuple[Trace, ...] = ()
    execution: dict[str, str] | None = None


class Path(Protocol):
    """One level and the implementation it drives; ``fault`` is planted in the subject's leg alone.

    ``options``: the words of a command line that open the path again, beside level and fault.
    """

    level: str
    target: str
    fault: str | None
    options: tuple[str, ...]

    def run(self, case: Case) -> Legs:
        """All three legs. What goes wrong inside a leg comes back as ``Legs.failure``, never as an exception."""
        ...
