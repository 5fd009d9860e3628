"""The judges must reject. Each test takes a clean run that passes, changes one thing in the subject's trace, and asks
for a verdict that says so; what could not be judged must come out as unknown, never as a pass.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.contract import Legs
from replay_parity.harness.kernel_path import KernelPath
from replay_parity.harness.outcome import FAIL, PASS, UNKNOWN
from replay_parity.harness.schedule_path import SchedulePath
from replay_parity.harness.trace import Event, Failure, RowIndex, Trace
from replay_parity.harness.verdict import judge

CASE = scenarios()["two-flushes"].case


@pytest.fixture(scope="module")
def clean() -> Legs:
    legs = SchedulePath().run(CASE)
    assert judge(legs).outcome == PASS
    return legs


def with_subject(legs: Legs, **changes: object) -> Legs:
    assert legs.subject is not None
    return replace(legs, subject=replace(legs.subject, **changes))  # type: ignore[arg-type]


def subject(legs: Legs) -> Trace:
    assert legs.subject is not None
    return legs.subject


@pytest.mark.parametrize("name", scenarios())
@pytest.mark.parametrize("path", [KernelPath(), SchedulePath()], ids=["kernel", "schedule"])
def test_clean_scenarios_pass(path: KernelPath | SchedulePath, name: str) -> None:
    verdict = judge(path.run(scenarios()[name].case))
    assert verdict.outcome == PASS, verdict.reason


def test_one_wrong_head_is_found_and_named(clean: Legs) -> None:
    outputs = subject(clean).outputs.clone()
    outputs[5, 2] += 1e-3
    verdict = judge(with_subject(clean, outputs=outputs))
    assert (verdict.outcome, verdict.symptom) == (FAIL, "mismatch")
    assert verdict.first_bad is not None and (verdict.first_bad.step, verdict.first_bad.head) == (5, 2)
    assert verdict.distances["output_max_ratio"] > verdict.limits["output_max_ratio"]


def test_a_slightly_noisy_run_is_rejected_by_rms(clean: Legs) -> None:
    """Four times the baseline's error everywhere: no single entry is far off, the run is."""
    assert clean.truth is not None and clean.baseline is not None
    usual = (clean.baseline.outputs.double() - clean.truth.outputs).square().mean((0, 2), keepdim=True).sqrt()
    noise = 4.0 * usual * torch.ones_like(clean.truth.outputs)
    verdict = judge(with_subject(clean, outputs=clean.truth.outputs + noise))
    assert verdict.outcome == FAIL and verdict.reason is not None and "RMS" in verdict.reason


def test_nan_is_poison(clean: Legs) -> None:
    outputs = subject(clean).outputs.clone()
    outputs[4, 0, 3] = float("nan")
    verdict = judge(with_subject(clean, outputs=outputs))
    assert (verdict.outcome, verdict.symptom) == (FAIL, "poison")


def test_wrong_flushed_state_is_found(clean: Legs) -> None:
    states = subject(clean).states
    assert states is not None
    changed = states.clone()
    changed[1, 3, 0, 0] += 1e-3
    verdict = judge(with_subject(clean, states=changed))
    assert verdict.outcome == FAIL and verdict.reason is not None and "state off by" in verdict.reason


def test_wrong_cursor_alone_is_found(clean: Legs) -> None:
    cursors = subject(clean).cursors
    assert cursors is not None
    write_pos = cursors.write_pos.copy()
    write_pos[2] += 1
    verdict = judge(with_subject(clean, cursors=replace(cursors, write_pos=write_pos)))
    assert (verdict.outcome, verdict.symptom) == (FAIL, "cursor")
    assert verdict.reason is not None and "write_pos 3 append, right is write_pos 2 append" in verdict.reason


def test_a_missing_row_fails(clean: Legs) -> None:
    rows = subject(clean).rows
    shorter = RowIndex(rows.step[:-1], rows.row[:-1], rows.request[:-1], rows.position[:-1])
    verdict = judge(with_subject(clean, rows=shorter, outputs=subject(clean).outputs[:-1]))
    assert verdict.outcome == FAIL and verdict.reason is not None and "rows came out" in verdict.reason


def test_an_event_fails(clean: Legs) -> None:
    event = Event("out_of_bounds", 3, 0, "slot 1: state[0, 0, 0] was written")
    verdict = judge(with_subject(clean, events=(event,)))
    assert (verdict.outcome, verdict.symptom) == (FAIL, "out_of_bounds")


def test_a_fault_that_both_legs_share_is_found(clean: Legs) -> None:
    """The ratio of two equally wrong legs is 1: the baseline's own distance from the truth must be small."""
    assert clean.truth is not None and clean.baseline is not None
    wrong = clean.truth.outputs + 0.05
    both = replace(with_subject(clean, outputs=wrong), baseline=replace(clean.baseline, outputs=wrong.clone()))
    verdict = judge(both)
    assert verdict.outcome == FAIL and verdict.reason is not None and "baseline" in verdict.reason


def test_a_missing_leg_is_unknown(clean: Legs) -> None:
    for legs in (replace(clean, truth=None), replace(clean, subject=None), replace(clean, baseline=None)):
        assert judge(legs).outcome == UNKNOWN


def test_a_crash_is_unknown(clean: Legs) -> None:
    verdict = judge(replace(clean, failure=Failure("crash", "play", "child ended by signal 9")))
    assert (verdict.outcome, verdict.symptom, verdict.stage) == (UNKNOWN, "crash", "play")


def test_a_path_that_was_never_entered_is_unknown(clean: Legs) -> None:
    verdict = judge(with_subject(clean, counts={"replay_steps": 0, "flushes": 0}))
    assert (verdict.outcome, verdict.symptom) == (UNKNOWN, "not_entered")


def engine_like(truth: torch.Tensor, got: torch.Tensor) -> Legs:
    """Legs of log-probabilities [N, vocab] as the engine level has them."""
    count = len(truth)
    rows = RowIndex(np.arange(count), np.zeros(count, int), np.zeros(count, int), np.arange(count))
    timeline = SchedulePath().run(CASE).timeline
    counts = {"replay_steps": count, "flushes": 1}
    legs = [Trace(rows, values, counts=counts) for values in (truth, got, truth.float())]
    return Legs("engine", CASE, timeline, legs[0], legs[1], legs[2])


def peaked(*leaders: tuple[int, float]) -> torch.Tensor:
    """Log-probabilities of one position over 16 tokens with the given leads."""
    logits = -torch.arange(16).double() * 0.5
    for token, lead in leaders:
        logits[token] += lead
    return logits.log_softmax(-1)


def test_engine_values_are_compared_not_only_tokens() -> None:
    truth = peaked((3, 5.0))[None]
    assert judge(engine_like(truth, truth.float())).outcome == PASS
    wrong = truth.clone()
    wrong[0, 9] += 0.01
    assert judge(engine_like(truth, wrong.float())).outcome == FAIL


def test_another_greedy_token_needs_a_near_tie() -> None:
    from replay_parity.harness.topk import topk_findings

    clear, close = peaked((3, 5.0), (4, 4.0))[None], peaked((3, 5.0), (4, 5.5 - 1e-5))[None]
    swapped = close.clone()
    swapped[0, [3, 4]] = close[0, [4, 3]]
    assert topk_findings(engine_like(close, swapped)) == []
    swapped = clear.clone()
    swapped[0, [3, 4]] = clear[0, [4, 3]]
    assert "greedy token 4, the oracle's is 3" in topk_findings(engine_like(clear, swapped))[0].message
