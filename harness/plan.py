"""Which cases a profile runs at which level, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..cases.case import Case
from ..cases.corpus import corpus, for_engine
from ..cases.engine_scenarios import engine_scenarios
from ..cases.scenarios import scenarios
from .architectures import DEFAULT_ARCHITECTURE
from .explore import Chunk, chunks
from .levels import EXAMPLES
from .playable import cannot_play


@dataclass(frozen=True)
class Planned:
    """One Case to run at one level."""

    case: Case
    level: str


@dataclass(frozen=True)
class LeftOut:
    """A Case that a level cannot play, and why: listed in the summary, never counted as a pass."""

    id: str
    level: str
    reason: str


def named_cases(level: str) -> list[Planned]:
    """Every named scenario with the layer shapes of the level."""
    table = engine_scenarios() if level == "engine" else scenarios()
    planned = [Planned(scenario.case, level) for scenario in table.values()]
    return sorted(planned, key=_engine_settings) if level == "engine" else planned


def _engine_settings(planned: Planned) -> tuple[object, ...]:
    """What cases must share to be played by one engine."""
    case = planned.case
    sizes = () if case.graphs is None else case.graphs.capture_sizes
    few = case.cache.num_blocks or 0
    return case.inputs.regime == "trained", case.cache.mode, few, astuple(case.replay), sizes


def kept_cases(level: str) -> list[Planned]:
    """The corpus; in the engine each of its schedules once, those of one ring length together."""
    if level != "engine":
        return [Planned(case, level) for case in corpus()]
    schedules = {(case.replay, case.cache, case.requests, case.steps): case for case in map(for_engine, corpus())}
    return [Planned(case, level) for case in sorted(schedules.values(), key=lambda case: astuple(case.replay))]


def plan(
    levels: Sequence[str],
    profile: str,
    examples: int | None,
    seed: int,
    architecture: str = DEFAULT_ARCHITECTURE,
) -> tuple[list[Planned | Chunk], list[LeftOut]]:
    """Jobs of all levels, one level after the other, named cases first; and the cases that a level cannot play.

    ``examples`` generated cases a level, or the profile's own number. ``architecture`` is what the engine level loads.
    """
    jobs: list[Planned | Chunk] = []
    left_out = []
    for level in levels:
        for planned in (*kept_cases(level), *named_cases(level)):
            reason = cannot_play(level, planned.case, architecture)
            if reason is None:
                jobs.append(planned)
            else:
                left_out.append(LeftOut(planned.case.id, level, reason))
        jobs += chunks(level, seed, EXAMPLES[profile][level] if examples is None else examples)
    return jobs, left_out


def size(jobs: Sequence[Planned | Chunk]) -> int:
    """Cases in a plan."""
    return sum(job.size if isinstance(job, Chunk) else 1 for job in jobs)
