"""One Case at one level, from run to record: what workers call."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..cases.case import Case
from .architectures import DEFAULT_ARCHITECTURE
from .contract import Legs, Path
from .outcome import UNKNOWN
from .playable import cannot_play
from .record import Record, make_record
from .verdict import Verdict, judge


@dataclass(frozen=True)
class Judged:
    """A record and what it cost, in seconds of wall clock."""

    case: Case
    record: Record
    seconds: float


def judge_case(path: Path, case: Case) -> Judged:
    """Run and judge. An error of the harness itself is unknown, with its stage; it never ends a campaign."""
    started = time.perf_counter()
    legs: Legs | None = None
    # of a level that loads no model there is none
    architecture = getattr(path, "architecture", DEFAULT_ARCHITECTURE)
    refused = cannot_play(path.level, case, architecture)
    if refused is not None:
        verdict = Verdict(UNKNOWN, "not_entered", "plan", refused)
    else:
        try:
            legs = path.run(case)
            verdict = judge(legs)
        except Exception as error:
            verdict = Verdict(UNKNOWN, "exception", "harness", f"{type(error).__name__}: {error}")
    record = make_record(case, path, verdict, legs)
    return Judged(case, record, time.perf_counter() - started)
