"""Greedy and top-k parity of log-probabilities: only a near-tie of the oracle excuses another greedy token."""

from __future__ import annotations

import torch

from .contract import Legs
from .finding import Finding, place

# each side's greedy token must be among the other's first five: the rule of vLLM's own model tests
TOP_K = 5
# the oracle's margin below which two tokens are a tie, in log-probability: ten times the 1e-4 that a clean float32
# engine is held to; a clean run's largest error is 3e-5, a planted fault's 0.1 and more
NEAR_TIE = 1e-3


def topk_findings(legs: Legs) -> list[Finding]:
    """Positions where the subject's greedy token is not the oracle's and no near-tie excuses it, first one first."""
    assert legs.truth is not None and legs.subject is not None
    if legs.level != "engine":
        return []
    truth, subject = legs.truth.outputs, legs.subject.outputs.double()
    right, got = truth.argmax(-1), subject.argmax(-1)
    findings = []
    for entry in (right != got).nonzero()[:, 0].tolist():
        want, have = int(right[entry]), int(got[entry])
        margin = float(truth[entry, want] - truth[entry, have])
        tops = (torch.topk(truth[entry], TOP_K).indices, torch.topk(subject[entry], TOP_K).indices)
        mutual = bool((tops[0] == have).any()) and bool((tops[1] == want).any())
        if mutual and margin <= NEAR_TIE:
            continue
        where = place(legs.truth.rows, entry, None)
        message = f"{where}: greedy token {have}, the oracle's is {want}, ahead by {margin:.3g} in log-probability"
        findings.append(Finding("mismatch", message, where))
    return findings
