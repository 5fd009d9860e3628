"""Limits, each with the evidence for it. Loosening one is a decision with a reason in the change."""

from __future__ import annotations

from dataclasses import dataclass

from ..cases.case import Case


@dataclass(frozen=True)
class Limit:
    """How large the replay's error against float64 may be, by run and head; see three_leg.py.

    ``rms_ratio`` (RMS over a run), ``max_ratio`` (maximum over a run): factors on the float32 baseline's error, which
    counts as ``floor`` times the size (RMS or maximum) of the summands at least: in few numbers it is small by luck.
    ``storage_rms``, ``storage_max``: factors on the error that 16-bit storage makes by itself. ``baseline_error``: the
    baseline's own maximum error over a run, as a share of the largest true value of the head: beyond it both legs share
    a fault.
    """

    rms_ratio: float
    max_ratio: float
    storage_rms: float
    storage_max: float
    floor: float
    baseline_error: float
    evidence: str


# a run with fewer outputs, or fewer flushed states, than this is judged by the short limits: few numbers are noisy
SHORT_RUN = 8


def layer_limit(case: Case, entries: int) -> Limit:
    """The limit for one run's outputs or flushed states, of which there are ``entries``."""
    short, long = _LAYER[case.inputs.regime]
    return short if entries < SHORT_RUN else long


_LAYER = {
    "model_like": (
        Limit(2.0, 4.0, 1.1, 1.3, 1e-7, 1e-5, ""),
        Limit(1.5, 4.0, 1.1, 1.3, 6e-8, 1e-5, ""),
    ),
    "adversarial": (
        Limit(2.0, 4.0, 1.1, 1.3, 2e-7, 1e-5, ""),
        Limit(1.5, 4.0, 1.1, 1.3, 2e-7, 1e-5, ""),
    ),
}
# log-probabilities of a whole model, all in float32
ENGINE_FLOAT32 = Limit(
    1.5, 3.0, 1.0, 1.0, 2e-7, 1e-5, "log-probabilities of the named scenarios: see the measured figures"
)
