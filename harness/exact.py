"""The judge of the exact regime: every output and every flushed state has the very value the dictionaries give."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.inputs import TORCH_DTYPES, layer_inputs
from .contract import Legs
from .explain import Explainer
from .finding import Finding, FirstBad, place
from .reading import Seen
from .three_leg import Measured
from .trace import RowIndex, Trace
from .whole import shows, slack


def judged_exactly(legs: Legs) -> bool:
    """True where a run is judged by bits: the exact regime at the layer levels. A whole model has no exact regime."""
    return legs.case.inputs.regime == "exact" and legs.level != "engine"


def exact_findings(legs: Legs) -> tuple[Measured, list[Finding]]:
    """The first wrong output and the first wrong state, explained. The legs' rows are known to match.

    Right is what the truth is rounded to in the dtype under test, by value; where 1 / sqrt(K) is no power of two, what
    an integer within ``whole.SCALED_SLACK`` of the true one is rounded to. States are integers for every K. Packed
    decode has to be right too: it is looked at where the subject is.
    """
    assert legs.truth is not None and legs.subject is not None and legs.baseline is not None
    wrong = {"output": wrong_outputs(legs.case, legs.truth, legs.subject), "state": _wrong_states(legs, legs.subject)}
    measured = Measured(
        {f"{name}_wrong_heads": float(mask.sum()) for name, (mask, _, _) in wrong.items()},
        dict.fromkeys((f"{name}_wrong_heads" for name in wrong), 0.0),
    )
    findings = [_explained(legs, name, *found) for name, found in wrong.items() if bool(found[0].any())]
    return measured, findings or _baseline_findings(legs)


def wrong_outputs(case: Case, truth: Trace, leg: Trace) -> tuple[Tensor, Tensor, RowIndex]:
    """(wrong [N, HV], outputs, their rows) of one leg."""
    stored = leg.outputs.to(TORCH_DTYPES[case.replay.activation_dtype])
    right = shows(stored, truth.outputs, _allowed(case, truth.rows)) & (stored.double() == leg.outputs.double())
    return ~right.all(-1), stored, truth.rows


def _wrong_states(legs: Legs, leg: Trace) -> tuple[Tensor, Tensor, RowIndex]:
    """(wrong [F, HV], states, their rows) after flushes that both the leg and the truth have.

    A flush that should not be, or is missing, is the cursor judge's finding.
    """
    assert legs.truth is not None and legs.truth.states is not None and legs.truth.state_rows is not None
    assert leg.states is not None and leg.state_rows is not None
    places = {key: entry for entry, key in enumerate(leg.state_rows.labels())}
    labels = legs.truth.state_rows.labels()
    here = np.array([entry for entry, key in enumerate(labels) if key in places], np.int64)
    states = leg.states[[places[labels[entry]] for entry in here.tolist()]]
    right = states.double() == legs.truth.states[torch.from_numpy(here)]
    return ~right.flatten(2).all(-1), states, legs.truth.state_rows.select(here)


def _allowed(case: Case, rows: RowIndex) -> Tensor:
    """[N, HV, 1]: how far an output may lie from the truth before rounding; 0 where the scale is exact."""
    geometry = case.geometry
    near = slack(geometry.head_k_dim)
    if not near:
        return torch.zeros((), dtype=torch.float64)
    asked = (layer_inputs(case).q != 0).sum(-1).double()[rows.request, rows.position]
    # integers are n / sqrt(K) apart for a one-hot query, n / K for one of all ones
    divisor = torch.sqrt(geometry.head_k_dim * asked).repeat_interleave(geometry.heads_per_key, dim=1)
    return (near / divisor)[..., None]


def _explained(legs: Legs, name: str, wrong: Tensor, values: Tensor, rows: RowIndex) -> Finding:
    """The first wrong row, explained on the head that names a token where one does."""
    assert legs.truth is not None and legs.truth.cursors is not None
    entry, bad = _first_row(wrong)
    where = place(rows, entry, bad[0])
    seen = Seen(values[entry], None, bad) if name == "output" else Seen(None, values[entry], bad)
    told = Explainer(legs.case, legs.timeline, legs.truth.cursors).explain(where.step, where.row, seen)
    where = FirstBad(where.step, where.row, told.head, where.request, where.position)
    poisoned = bool((~torch.isfinite(values[entry])).any()) or told.reason == "poison"
    return Finding("poison" if poisoned else "mismatch", told.sentence, where, told.reason)


def _baseline_findings(legs: Legs) -> list[Finding]:
    assert legs.truth is not None and legs.baseline is not None
    outputs = wrong_outputs(legs.case, legs.truth, legs.baseline)
    for name, (wrong, _, rows) in (("output", outputs), ("state", _wrong_states(legs, legs.baseline))):
        if bool(wrong.any()):
            entry, bad = _first_row(wrong)
            where = place(rows, entry, bad[0])
            text = f"{name} of the baseline is not exact (packed decode is wrong, replay is right)"
            return [Finding("mismatch", f"{where}: {text}", where)]
    return []


def _first_row(wrong: Tensor) -> tuple[int, tuple[int, ...]]:
    """(entry, wrong heads) of the first entry of wrong [N, HV] that has one."""
    entry = int(wrong.any(1).int().argmax())
    return entry, tuple(wrong[entry].nonzero()[:, 0].tolist())
