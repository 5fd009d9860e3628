"""Plants each fault and runs the campaign until it is caught or the examples are spent: a test of the tester."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cases.case import Case
from .campaign import Job, judge_job
from .explore import Chunk, chunks
from .fault_catalogue import FAULTS
from .fault_form import OF_GRAPHS
from .faults import forms
from .judge_case import Judged
from .outcome import FAIL, UNKNOWN
from .paths import LevelUnavailable, close_path, open_path
from .plan import named_cases
from .playable import cannot_play
from .record import Record

CAUGHT, SURVIVED, NOT_RUN = "caught", "survived", "not_run"


@dataclass(frozen=True)
class Hunt:
    """What became of one fault at one level: ``examples`` judged until it was caught, ``case`` the minimised one.

    ``reason``: the catch in words, or why some or all of the cases could not be judged.
    """

    fault: str
    level: str
    outcome: str
    examples: int
    seconds: float
    symptom: str | None
    reason: str | None
    case: Case | None

    def to_json(self) -> dict[str, Any]:
        """An entry of faults.json."""
        size = None if self.case is None else {"requests": len(self.case.requests), "steps": len(self.case.steps)}
        return {
            "fault": self.fault,
            "level": self.level,
            "outcome": self.outcome,
            "examples": self.examples,
            "seconds": round(self.seconds, 2),
            "symptom": self.symptom,
            "reason": self.reason,
            "size": size,
            "case": None if self.case is None else self.case.to_json(),
        }


def hunts(levels: Sequence[str], target: str | None = None) -> list[tuple[str, str]]:
    """(fault, level) of every form that the catalogue has at these levels, by level."""
    return sorted((pair for pair in forms(target) if pair[1] in levels), key=lambda pair: levels.index(pair[1]))


def hunt_all(
    pairs: Sequence[tuple[str, str]], examples: int, seed: int, workers: int, target: str | None = None
) -> Iterator[Hunt]:
    """One Hunt a pair, in their order; engine hunts one after the other in this process."""
    from joblib import Parallel, delayed

    layer = [pair for pair in pairs if pair[1] != "engine"]
    if layer:
        pool = Parallel(n_jobs=workers, return_as="generator")
        yield from pool(delayed(hunt)(name, level, examples, seed, target) for name, level in layer)
    yield from (hunt(name, level, examples, seed, target) for name, level in pairs if level == "engine")


def hunt(fault: str, level: str, examples: int, seed: int, target: str | None = None) -> Hunt:
    """Plant one fault at one level and look for it."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    try:
        path = open_path(level, fault, target)
    except LevelUnavailable as error:
        return Hunt(fault, level, NOT_RUN, 0, 0.0, None, str(error), None)
    judged: list[Judged] = []
    try:
        for job in _jobs(fault, level, examples, seed):
            judged += judge_job(path, job)
            if _is_caught(fault, judged[-1].record):
                break
    finally:
        close_path(path)
    return _outcome(fault, level, judged, time.perf_counter() - started)


def _jobs(fault: str, level: str, examples: int, seed: int) -> Sequence[Job]:
    """Generated cases; in the engine the named ones first, a generated case costs seconds there.

    For a fault of graphs those that have graphs: no other can show it.
    """
    generated: list[Chunk] = chunks(level, seed, examples)
    if level != "engine":
        return generated
    named = [planned for planned in named_cases(level) if cannot_play(level, planned.case) is None]
    if fault.startswith(OF_GRAPHS):
        named = [planned for planned in named if planned.case.graphs is not None]
    return [*named[:examples], *generated]


def _is_caught(fault: str, record: Record) -> bool:
    """Judged wrong, or refused in the very words that the catalogue asks for."""
    refusal = FAULTS[fault].refusal
    if refusal is None:
        return bool(record["verdict"] == FAIL)
    return record["symptom"] == "exception" and refusal in record["reason"]


def _outcome(fault: str, level: str, judged: list[Judged], seconds: float) -> Hunt:
    last = judged[-1].record if judged else None
    if last is None:
        return Hunt(fault, level, NOT_RUN, 0, seconds, None, "no examples were asked for", None)
    if _is_caught(fault, last):
        return Hunt(fault, level, CAUGHT, len(judged), seconds, last["symptom"], last["reason"], judged[-1].case)
    reason = _not_judged(judged)
    if all(entry.record["verdict"] == UNKNOWN for entry in judged):
        return Hunt(fault, level, NOT_RUN, len(judged), seconds, last["symptom"], reason, None)
    return Hunt(fault, level, SURVIVED, len(judged), seconds, None, reason, None)


def _not_judged(judged: Sequence[Judged]) -> str | None:
    """How many cases came out unknown and why the first did; None where none did."""
    unknown = [entry.record for entry in judged if entry.record["verdict"] == UNKNOWN]
    if not unknown:
        return None
    return f"{len(unknown)} of {len(judged)} cases could not be judged, the first: {unknown[0]['reason']}"
