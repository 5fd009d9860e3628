"""The three-leg rule: replay's error against float64, beside the baseline's error against float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .contract import Legs
from .distance import RunErrors, entry_errors, first_true, run_errors
from .finding import Finding, place
from .tolerance import ENGINE_FLOAT32, Limit, layer_limit
from .trace import RowIndex, Trace


@dataclass(frozen=True)
class Measured:
    """Worst ratios over all runs of a Case and the limits that applied, same keys in both."""

    distances: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Run:
    """One request's rows in one quantity (output or state): errors of both legs and the limit."""

    request: int
    subject: RunErrors
    baseline: RunErrors
    limit: Limit

    @property
    def rms_ratio(self) -> float:
        return self.subject.rms / max(self.baseline.rms, self.limit.floor * self.baseline.true_rms, 1e-300)

    @property
    def max_ratio(self) -> float:
        return self.subject.largest / max(self.baseline.largest, self.limit.floor * self.baseline.true_largest, 1e-300)

    @property
    def allowed(self) -> float:
        """Largest absolute error that one entry of the run may have."""
        return self.limit.max_ratio * max(self.baseline.largest, self.limit.floor * self.baseline.true_largest)

    @property
    def bad(self) -> bool:
        return not (self.rms_ratio <= self.limit.rms_ratio and self.max_ratio <= self.limit.max_ratio)


def numeric_findings(legs: Legs) -> tuple[Measured, list[Finding]]:
    """Outputs first, then states after flushes. The legs' rows are known to match."""
    assert legs.truth is not None and legs.subject is not None and legs.baseline is not None
    distances: dict[str, float] = {}
    limits: dict[str, float] = {}
    findings: list[Finding] = []
    for name, truth, subject, baseline, rows in _quantities(legs.truth, legs.subject, legs.baseline):
        runs = _runs(legs, truth, subject, baseline, rows)
        for run in runs:
            _raise_to(distances, f"{name}_rms_ratio", run.rms_ratio)
            _raise_to(distances, f"{name}_max_ratio", run.max_ratio)
            _raise_to(distances, f"{name}_max_abs", run.subject.largest)
            _raise_to(limits, f"{name}_rms_ratio", run.limit.rms_ratio)
            _raise_to(limits, f"{name}_max_ratio", run.limit.max_ratio)
            _raise_to(limits, f"{name}_max_abs", run.allowed)
        findings += _findings(name, runs, truth, subject, rows) or _shared(name, runs, truth, baseline, rows)
    return Measured(distances, limits), findings


def _quantities(truth: Trace, subject: Trace, baseline: Trace) -> list[tuple[str, Tensor, Tensor, Tensor, RowIndex]]:
    quantities = [("output", truth.outputs, subject.outputs, baseline.outputs, truth.rows)]
    if truth.states is None or subject.states is None or baseline.states is None:
        return quantities
    assert truth.state_rows is not None and subject.state_rows is not None and baseline.state_rows is not None
    # a flush that should not be, or is missing, is the cursor judge's finding: compare where both flushed
    places = {key: entry for entry, key in enumerate(subject.state_rows.labels())}
    based = {key: entry for entry, key in enumerate(baseline.state_rows.labels())}
    keys = [key for key in truth.state_rows.labels() if key in places and key in based]
    if not keys:
        return quantities
    mine = {key: entry for entry, key in enumerate(truth.state_rows.labels())}
    here = np.array([mine[key] for key in keys], np.int64)
    quantities.append(
        (
            "state",
            truth.states[torch.from_numpy(here)],
            subject.states[[places[key] for key in keys]],
            baseline.states[[based[key] for key in keys]],
            truth.state_rows.select(here),
        )
    )
    return quantities


def _runs(legs: Legs, truth: Tensor, subject: Tensor, baseline: Tensor, rows: RowIndex) -> list[_Run]:
    ours = run_errors(subject, truth, rows.request)
    theirs = run_errors(baseline, truth, rows.request)
    return [_Run(request, ours[request], theirs[request], _limit(legs, request)) for request in ours]


def _limit(legs: Legs, request: int) -> Limit:
    assert legs.truth is not None
    if legs.level == "engine":
        return ENGINE_FLOAT32
    return layer_limit(legs.case.replay, int((legs.truth.rows.request == request).sum()))


def _findings(name: str, runs: list[_Run], truth: Tensor, subject: Tensor, rows: RowIndex) -> list[Finding]:
    bad = [run for run in runs if run.bad]
    if not bad:
        return []
    allowed = {run.request: run.allowed for run in bad}
    limit = torch.tensor([allowed.get(request, float("inf")) for request in rows.request.tolist()])[:, None]
    errors = entry_errors(subject, truth)
    over = first_true(errors > limit)
    if over is None:
        run = max(bad, key=lambda one: one.rms_ratio)
        mine = torch.from_numpy(np.flatnonzero(rows.request == run.request))
        worst = int(mine[int(errors[mine].amax(-1).argmax())])
        where = place(rows, worst, int(errors[worst].argmax()))
        text = f"RMS error over the run is {run.rms_ratio:.3g} times the baseline's (limit {run.limit.rms_ratio:g})"
        return [Finding("mismatch", f"{where}: {name}: {text}; worst entry shown", where)]
    entry, head = over
    where = place(rows, entry, head if errors.shape[1] > 1 else None)
    if bool(torch.isnan(subject[entry]).any()):
        return [Finding("poison", f"{where}: {name} is NaN: something that must not be read was read", where)]
    off, most = float(errors[entry, head]), float(limit[entry, 0])
    return [Finding("mismatch", f"{where}: {name} off by {off:.3g} (limit {most:.3g})", where)]


def _shared(name: str, runs: list[_Run], truth: Tensor, baseline: Tensor, rows: RowIndex) -> list[Finding]:
    """A fault that both legs have keeps their ratio at 1: the baseline itself must be near the truth."""
    for run in runs:
        if run.baseline.largest <= run.limit.baseline_error * run.baseline.true_largest:
            continue
        mine = torch.from_numpy(np.flatnonzero(rows.request == run.request))
        errors = entry_errors(baseline[mine], truth[mine])
        most = run.limit.baseline_error * run.baseline.true_largest
        over = first_true(errors > most)
        assert over is not None
        where = place(rows, int(mine[over[0]]), over[1] if errors.shape[1] > 1 else None)
        off = float(errors[over])
        text = f"the baseline is off by {off:.3g} too (limit {most:.3g}): a fault that both legs share"
        return [Finding("mismatch", f"{where}: {name}: {text}", where)]
    return []


def _raise_to(table: dict[str, float], name: str, value: float) -> None:
    table[name] = max(table.get(name, 0.0), value)
