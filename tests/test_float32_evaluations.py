"""How this tests, in plain words: what the engine level does where the baseline may have been right by luck.

Log-probabilities are written down by hand: at one token the subject is off four times as far as the baseline. Alone
that fails. Beside float32 evaluations of the truth that are off as far it passes, and fails again where the subject is
off a few times further than the worst of them. The evaluations themselves, a model with each weight one unit in the
last place off, are tried on a tiny checkpoint: they differ from the float64 answers as float32 does, and among each
other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from replay_parity.cases.geometry import ENGINE
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.timeline import play
from replay_parity.harness.checkpoint import tiny_checkpoint
from replay_parity.harness.contract import Legs
from replay_parity.harness.outcome import FAIL, PASS
from replay_parity.harness.trace import Trace, row_index
from replay_parity.harness.verdict import judge
from replay_parity.oracles.qwen3_5 import Qwen3_5Oracle

CASE = scenarios()["plain-flush"].case
POSITIONS, VOCAB = 12, 64
# what float32 makes of a log-probability of about 10, and the token whose sums nearly cancel
USUAL, AT = 4e-6, 7


def _truth() -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.log_softmax(4 * torch.randn(POSITIONS, VOCAB, generator=random, dtype=torch.float64), -1)


def _off(truth: torch.Tensor, by: float, seed: int) -> torch.Tensor:
    """``truth`` with errors of the usual size, and of size ``by`` at one token."""
    random = torch.Generator().manual_seed(seed)
    errors = USUAL * (2 * torch.rand(truth.shape, generator=random, dtype=torch.float64) - 1)
    errors[AT, 5] = by
    return truth + errors


def _legs(subject_by: float, *float32_by: float) -> Legs:
    truth = _truth()
    rows = row_index([(step, 0, 0, 5 + step) for step in range(POSITIONS)])
    subject, baseline, *others = (
        Trace(rows, _off(truth, by, seed), counts={"replay_steps": 5, "flushes": 1})
        for seed, by in enumerate((subject_by, USUAL, *float32_by))
    )
    return Legs("engine", CASE, play(CASE), Trace(rows, truth), subject, baseline, float32=tuple(others))


def test_a_lucky_baseline_alone_makes_a_failure() -> None:
    verdict = judge(_legs(4 * USUAL))
    assert verdict.outcome == FAIL and verdict.first_bad is not None and verdict.first_bad.step == AT
    # evaluations that are no worse than the baseline excuse nothing
    assert judge(_legs(4 * USUAL, USUAL, USUAL)).outcome == FAIL


def test_float32_evaluations_as_far_off_account_for_it() -> None:
    legs = _legs(4 * USUAL, USUAL, 3 * USUAL)
    assert judge(legs).outcome == PASS
    assert judge(replace(legs, float32=())).outcome == FAIL


def test_further_off_than_all_of_them_fails() -> None:
    assert judge(_legs(12 * USUAL, USUAL, 3 * USUAL)).outcome == FAIL
    # what they say of one token is no licence for a whole run
    legs = _legs(4 * USUAL, USUAL, 3 * USUAL)
    assert legs.truth is not None and legs.subject is not None
    noisy = legs.truth.outputs + 3 * USUAL
    assert judge(replace(legs, subject=replace(legs.subject, outputs=noisy))).outcome == FAIL


def test_nudged_models_are_float32_evaluations() -> None:
    exact = Qwen3_5Oracle.load(tiny_checkpoint(ENGINE), dtype=torch.float64)
    tokens = torch.randint(256, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    truth = exact.log_probs(tokens)
    plain = Qwen3_5Oracle.load(tiny_checkpoint(ENGINE)).log_probs(tokens)
    answers = [exact.nudged(seed).log_probs(tokens) for seed in (0, 1, 1)]
    assert torch.equal(answers[1], answers[2]) and not torch.equal(answers[0], answers[1])
    usual = float((plain - truth).abs().max())
    for answer in answers:
        assert answer.dtype == torch.float32
        assert usual / 5 < float((answer - truth).abs().max()) < 5 * usual


def test_a_nudge_is_one_unit_in_the_last_place() -> None:
    exact = Qwen3_5Oracle.load(tiny_checkpoint(ENGINE), dtype=torch.float64)
    moved = exact.nudged(2)
    compared = 0
    for name, tensor in exact.tensors.items():
        bits, was = moved.tensors[name].view(torch.int32), tensor.float().view(torch.int32)
        if not bool((tensor == 0).any()):
            assert set((bits - was).flatten().tolist()) <= {-1, 1}
            compared += 1
    assert compared > 20
