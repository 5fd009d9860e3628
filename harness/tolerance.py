"""Limits, each with the evidence for it. Loosening one is a decision with a reason in the change."""

from __future__ import annotations

from dataclasses import dataclass

from ..cases.case import Replay


@dataclass(frozen=True)
class Limit:
    """How much larger than the baseline's error the replay's may be, both against the float64 truth.

    ``rms_ratio``: RMS over a run; ``max_ratio``: maximum over a run. Where the baseline is exact or nearly so its
    error counts as ``floor`` times the size (RMS or maximum) of the true values. ``baseline_error``: the baseline's own
    maximum error over a run, as a share of the largest true value: beyond it both legs share a fault.
    """

    rms_ratio: float
    max_ratio: float
    floor: float
    baseline_error: float
    evidence: str


# a run of fewer tokens than this is judged by the short limits: RMS over few entries is noisy
SHORT_RUN = 16


def layer_limit(replay: Replay, tokens: int) -> Limit:
    """The limit for outputs and states of one run of ``tokens`` decode rows."""
    if replay.state_dtype != "float32" or replay.activation_dtype != "float32" or replay.ring_dtype != "float32":
        raise NotImplementedError("replay: limits for 16-bit state, ring or activations have no evidence yet")
    return FLOAT32_SHORT if tokens < SHORT_RUN else FLOAT32


FLOAT32 = Limit(
    1.5, 4.0, 2e-7, 1e-4, "prototype: 300 clean runs of 264 steps, K = 16: RMS ratio at most 1.04 (collinear 1.21)"
)
FLOAT32_SHORT = Limit(2.0, 4.0, 2e-7, 1e-4, "prototype: runs under 16 tokens")
ENGINE_FLOAT32 = Limit(1.5, 3.0, 2e-7, 1e-5, "log-probabilities of the named scenarios: see the measured figures")
