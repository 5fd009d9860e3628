"""The three-leg rule: replay's error against float64, beside the errors that arithmetic and storage account for.

A run is the rows of one request; each value head of it is judged by itself, because heads may differ by orders of
magnitude and a large one would hide a small one. What is allowed has two shares:

- arithmetic: the baseline's error in the head, that of all heads together, the floor that the summands behind the
  values set or that of another float32 evaluation, whichever is largest (a few numbers may be right by luck), times a
  factor;
- storage: the error of the leg that only rounds what must be stored in 16 bits, in the head itself, times a factor;
  with what roundings may change that can go either way.

Shares add up as independent errors do: by squares for the RMS, plainly for the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..cases.inputs import TORCH_DTYPES
from .contract import Legs
from .distance import RunErrors, entry_errors, first_true, run_errors, run_sizes
from .finding import Finding, place
from .tolerance import ENGINE_FLOAT32, Limit, layer_limit
from .trace import RowIndex, Trace

# keeps divisions whole where the truth is zero
TINY = 1e-300
# what the subject's second run adds to the names of its quantities
WIDE = "float32_"


@dataclass(frozen=True)
class Measured:
    """Worst ratios over all runs of a Case and the limits that applied there, same keys in both."""

    distances: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantity:
    """Outputs, or states after flushes, of all legs, entries matched: [N, heads, ...] each.

    ``rounding`` is the truth as storage rounds it, equal to ``truth`` where all is float32; ``undecided``: how far a
    rounding that may go either way can move an entry of it, 0 where none can; ``summands``: what the true
    values would be if nothing cancelled.
    """

    name: str
    rows: RowIndex
    truth: Tensor
    subject: Tensor
    baseline: Tensor
    rounding: Tensor
    undecided: Tensor
    summands: Tensor


@dataclass(frozen=True)
class Share:
    """An error of one run by head, [heads]: what came out, and what arithmetic and storage account for."""

    error: Tensor
    arithmetic: Tensor
    storage: Tensor

    @property
    def expected(self) -> Tensor:
        """What is accounted for."""
        return torch.hypot(self.arithmetic, self.storage)

    @property
    def ratio(self) -> Tensor:
        """The error over what is accounted for."""
        return self.error / self.expected

    @property
    def source(self) -> str:
        """Where the expected error comes from, for a person."""
        return "baseline's and the rounding that storage makes" if bool(self.storage.any()) else "baseline's"


@dataclass(frozen=True)
class Run:
    """One request's rows in one quantity. ``sizes`` are those of the summands behind the true values."""

    request: int
    rms: Share
    largest: Share
    baseline: RunErrors
    sizes: RunErrors
    limit: Limit

    @property
    def allowed_rms(self) -> Tensor:
        """Largest RMS error of each head."""
        return torch.hypot(self.limit.rms_ratio * self.rms.arithmetic, self.limit.storage_rms * self.rms.storage)

    @property
    def allowed(self) -> Tensor:
        """Largest absolute error that one entry of each head may have."""
        return self.limit.max_ratio * self.largest.arithmetic + self.limit.storage_max * self.largest.storage

    @property
    def strain(self) -> Tensor:
        """By head, the larger of both errors over what is allowed: above 1 is bad."""
        return torch.maximum(self.rms.error / self.allowed_rms, self.largest.error / self.allowed)

    @property
    def bad(self) -> bool:
        """True where a head is."""
        return not bool((self.strain <= 1.0).all())


def numeric_findings(legs: Legs) -> tuple[Measured, list[Finding]]:
    """Outputs first, then states after flushes; the subject's float32 run after its own. Rows are known to match."""
    measured = Measured()
    findings: list[Finding] = []
    for quantity in quantities(legs):
        runs = judged_runs(legs, quantity)
        for run in runs:
            _keep_worst(measured, quantity.name, run)
        findings += _findings(quantity, runs) or _shared(quantity, runs)
    return measured, findings


def quantities(legs: Legs) -> Iterator[Quantity]:
    """What is compared, in the order in which it is reported."""
    assert legs.truth is not None and legs.subject is not None and legs.baseline is not None
    truth = legs.truth
    rounding = legs.rounding or truth
    summands = legs.summands or truth
    undecided = legs.undecided or replace(
        truth,
        outputs=torch.zeros_like(truth.outputs),
        states=None if truth.states is None else torch.zeros_like(truth.states),
    )
    stored = TORCH_DTYPES[legs.case.replay.activation_dtype] if legs.rounding is not None else torch.float64
    for prefix, subject in (("", legs.subject), (WIDE, legs.wide)):
        if subject is None:
            continue
        rounded = rounding.outputs if prefix else rounding.outputs.to(stored).double()
        others = (subject.outputs, legs.baseline.outputs, rounded, undecided.outputs, summands.outputs)
        yield Quantity(f"{prefix}output", truth.rows, truth.outputs, *others)
        yield from _states(f"{prefix}state", truth, subject, legs.baseline, rounding, undecided, summands)


def _states(name: str, truth: Trace, *legs: Trace) -> Iterator[Quantity]:
    """States where all legs flushed: a flush that should not be, or is missing, is the cursor judge's finding."""
    kept = [(leg.state_rows, leg.states) for leg in (truth, *legs)]
    known = [(rows, states) for rows, states in kept if rows is not None and states is not None]
    if len(known) < len(kept):
        return
    places = [{key: entry for entry, key in enumerate(rows.labels())} for rows, _ in known]
    keys = [key for key in places[0] if all(key in mine for mine in places)]
    if not keys:
        return
    found = [[mine[key] for key in keys] for mine in places]
    values = [states[here] for (_, states), here in zip(known, found, strict=True)]
    yield Quantity(name, known[0][0].select(np.array(found[0], np.int64)), *values)


def judged_runs(legs: Legs, quantity: Quantity) -> list[Run]:
    """Each request's errors in a quantity beside its limit."""
    requests = quantity.rows.request
    errors, baselines, roundings = (
        run_errors(values, quantity.truth, requests)
        for values in (quantity.subject, quantity.baseline, quantity.rounding)
    )
    others = [run_errors(trace.outputs, quantity.truth, requests) for trace in legs.float32]
    sizes, summands = (run_sizes(values, requests) for values in (quantity.truth, quantity.summands))
    undecided = run_sizes(quantity.undecided, requests)
    runs = []
    for one in errors:
        limit = _limit(legs, int((requests == one).sum()))
        expected = _worst([baselines[one], *(other[one] for other in others)])
        rms = _arithmetic(expected.rms, sizes[one].rms, limit.rms_floor * summands[one].rms)
        largest = _arithmetic(expected.largest, sizes[one].rms, limit.max_floor * summands[one].largest)
        shares = (
            Share(errors[one].rms, rms, torch.hypot(roundings[one].rms, undecided[one].rms)),
            Share(errors[one].largest, largest, roundings[one].largest + undecided[one].largest),
        )
        runs.append(Run(one, *shares, baselines[one], summands[one], limit))
    return runs


def _worst(errors: list[RunErrors]) -> RunErrors:
    """The largest errors of several evaluations of the same run, by head."""
    return RunErrors(
        torch.stack([each.rms for each in errors]).amax(0), torch.stack([each.largest for each in errors]).amax(0)
    )


def _arithmetic(baseline: Tensor, sizes: Tensor, floor: Tensor) -> Tensor:
    """The baseline's error, at least what the run's worst head has for its size, and at least the floor, [heads]."""
    sizes = sizes.clamp_min(TINY)
    common = (baseline / sizes).square().mean().sqrt() * sizes
    return torch.maximum(torch.maximum(baseline, common), floor).clamp_min(TINY)


def _limit(legs: Legs, entries: int) -> Limit:
    return ENGINE_FLOAT32 if legs.level == "engine" else layer_limit(entries)


def _keep_worst(measured: Measured, name: str, run: Run) -> None:
    """Keep the ratios and limits of the head that comes nearest to its limit, or passes it by most."""
    for kind, share, allowed in (("rms", run.rms, run.allowed_rms), ("max", run.largest, run.allowed)):
        head = int((share.error / allowed).argmax())
        ratio, limit = (float(x[head] / share.expected[head]) for x in (share.error, allowed))
        key = f"{name}_{kind}_ratio"
        if key not in measured.distances or ratio / limit > measured.distances[key] / measured.limits[key]:
            measured.distances[key], measured.limits[key] = ratio, limit
            if kind == "max":
                measured.distances[f"{name}_max_abs"] = float(share.error[head])
                measured.limits[f"{name}_max_abs"] = float(allowed[head])


def _findings(quantity: Quantity, runs: list[Run]) -> list[Finding]:
    bad = {run.request: run for run in runs if run.bad}
    if not bad:
        return []
    name, rows = quantity.name, quantity.rows
    errors = entry_errors(quantity.subject, quantity.truth)
    never = torch.full((errors.shape[1],), torch.inf, dtype=torch.float64)
    limit = torch.stack([bad[one].allowed if one in bad else never for one in rows.request.tolist()])
    over = first_true(errors > limit)
    if over is None:
        run = max(bad.values(), key=lambda one: float(one.strain.max()))
        head = int(run.strain.argmax())
        mine = np.flatnonzero(rows.request == run.request)
        worst = int(mine[int(errors[torch.from_numpy(mine), head].argmax())])
        where = place(rows, worst, head if errors.shape[1] > 1 else None)
        ratio, most = (float(x[head] / run.rms.expected[head]) for x in (run.rms.error, run.allowed_rms))
        text = f"RMS error over the run is {ratio:.3g} times the {run.rms.source} (limit {most:.3g})"
        return [Finding("mismatch", f"{where}: {name}: {text}; worst entry shown", where)]
    entry, head = over
    where = place(rows, entry, head if errors.shape[1] > 1 else None)
    if bool(torch.isnan(quantity.subject[entry]).any()):
        return [Finding("poison", f"{where}: {name} is NaN: something that must not be read was read", where)]
    off, most = float(errors[entry, head]), float(limit[entry, head])
    return [Finding("mismatch", f"{where}: {name} off by {off:.3g} (limit {most:.3g})", where)]


def _shared(quantity: Quantity, runs: list[Run]) -> list[Finding]:
    """A fault that both legs have keeps their ratio at 1: the baseline itself must be near the truth."""
    for run in runs:
        most = run.limit.baseline_error * run.sizes.largest
        if bool((run.baseline.largest <= most).all()):
            continue
        mine = np.flatnonzero(quantity.rows.request == run.request)
        errors = entry_errors(quantity.baseline, quantity.truth)[torch.from_numpy(mine)]
        over = first_true(errors > most)
        assert over is not None
        where = place(quantity.rows, int(mine[over[0]]), over[1] if errors.shape[1] > 1 else None)
        off = float(errors[over])
        text = f"the baseline is off by {off:.3g} too (limit {float(most[over[1]]):.3g}): a fault that both legs share"
        return [Finding("mismatch", f"{where}: {quantity.name}: {text}", where)]
    return []
