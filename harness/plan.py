"""Which cases a profile runs at which level, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..cases.case import Case
from ..cases.scenarios import engine_scenarios, scenarios

LEVELS = ("kernel", "schedule", "engine")
PROFILES = ("smoke", "ci", "nightly")


@dataclass(frozen=True)
class Planned:
    """One Case to run at one level; ``guards`` is the sentence of a named scenario."""

    case: Case
    level: str
    guards: str | None


@dataclass(frozen=True)
class LeftOut:
    """A Case that a level cannot play, and why: listed in the summary, never counted as a pass."""

    id: str
    level: str
    reason: str


def named_cases(level: str) -> list[Planned]:
    """Every named scenario with the layer shapes of the level."""
    table = engine_scenarios() if level == "engine" else scenarios()
    planned = [Planned(scenario.case, level, scenario.guards) for scenario in table.values()]
    # a new engine only where settings change
    return sorted(planned, key=lambda entry: astuple(entry.case.replay)) if level == "engine" else planned


def plan(levels: Sequence[str]) -> tuple[list[Planned], list[LeftOut]]:
    """Cases of all levels, one level after the other, and those that a level cannot play."""
    cases, left_out = [], []
    for level in levels:
        for planned in named_cases(level):
            reason = cannot_play(level, planned.case)
            if reason is None:
                cases.append(planned)
            else:
                left_out.append(LeftOut(planned.case.id, level, reason))
    return cases, left_out


def cannot_play(level: str, case: Case) -> str | None:
    """None where the level can play the Case, else one line that names the field."""
    if level != "engine":
        return None
    if case.graphs is not None:
        return "graphs.capture_sizes: the engine level runs eagerly, FULL graphs are not emulated yet; use null"
    if case.replay.activation_dtype != "float32":
        return "replay.activation_dtype: the engine is judged in float32 only"
    return None
