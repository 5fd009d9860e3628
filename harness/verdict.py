"""pass, fail or unknown, and why: the judge of one Case at one level. The worst finding wins."""

from __future__ import annotations

from dataclasses import dataclass, field

from .contract import Legs
from .exact import exact_findings, judged_exactly
from .finding import Finding, FirstBad
from .invariants import cursor_findings, event_findings, row_findings
from .outcome import FAIL, PASS, UNKNOWN
from .three_leg import Measured, numeric_findings
from .topk import topk_findings
from .trace import Failure


@dataclass(frozen=True)
class Verdict:
    """The outcome of one Case at one level.

    ``symptom`` (mismatch, poison, out_of_bounds, slot, stale_graph, cursor, host_sync, exception, timeout, crash,
    not_entered) and ``stage`` are None on a pass. ``distances`` and ``limits`` share their keys.
    """

    outcome: str
    symptom: str | None = None
    stage: str | None = None
    reason: str | None = None
    first_bad: FirstBad | None = None
    distances: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)


def judge(legs: Legs) -> Verdict:
    """The verdict on three legs: what could not be judged is unknown, never a pass."""
    if legs.failure is not None:
        return _ended_early(legs, legs.failure)
    if legs.truth is None or legs.subject is None or legs.baseline is None:
        return Verdict(UNKNOWN, "not_entered", "judge", "a leg is missing: nothing to compare")
    if not legs.subject.counts.get("replay_steps"):
        return Verdict(UNKNOWN, "not_entered", "judge", "the replay op never ran a row: nothing was tested")
    findings = row_findings(legs.truth, legs.subject) or row_findings(legs.truth, legs.baseline)
    measured, numeric = Measured(), list[Finding]()
    if not findings:
        measured, numeric = exact_findings(legs) if judged_exactly(legs) else numeric_findings(legs)
        findings = event_findings(legs.subject) + numeric + topk_findings(legs)
    cursors = cursor_findings(legs.truth.cursors, legs.subject.cursors)
    if not findings and not cursors:
        return Verdict(PASS, distances=measured.distances, limits=measured.limits)
    worst = (findings or cursors)[0]
    reason = _sentence(worst, numeric, cursors)
    return Verdict(FAIL, worst.symptom, "judge", reason, worst.first_bad, measured.distances, measured.limits)


def _ended_early(legs: Legs, failure: Failure) -> Verdict:
    """What a leg showed before it broke off: a wrong cursor or event is a failure, the rest was not judged."""
    findings: list[Finding] = []
    if legs.truth is not None and legs.subject is not None:
        findings = event_findings(legs.subject) + cursor_findings(legs.truth.cursors, legs.subject.cursors, whole=False)
    if not findings:
        return Verdict(UNKNOWN, failure.symptom, failure.stage, failure.message)
    message = f"{findings[0].message}; then {failure.message}"
    return Verdict(FAIL, findings[0].symptom, failure.stage, message, findings[0].first_bad)


def _sentence(worst: Finding, numeric: list[Finding], cursors: list[Finding]) -> str:
    """The finding, what it did to the values where it is none itself, and the first wrong cursor, its likely cause."""
    parts = [worst.message]
    if numeric and worst is not numeric[0]:
        parts.append(f"first wrong value: {numeric[0].message}")
    if cursors and worst is not cursors[0]:
        parts.append(f"first wrong cursor: {cursors[0].message}")
    return "; ".join(parts)
