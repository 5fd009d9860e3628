"""Limits: in every class of dtypes a clean case passes; the same run with its error raised to just above a limit is
rejected, by RMS and by maximum; faults of the decode op stay caught where 16-bit storage hides most.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from replay_parity.cases.case import DTYPES, Cache, Case, Inputs, Replay, Request, Step
from replay_parity.cases.geometry import Geometry
from replay_parity.cases.inputs import layer_inputs
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.contract import Legs
from replay_parity.harness.evidence import REGIMES, measure
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.outcome import FAIL, PASS, UNKNOWN
from replay_parity.harness.paths import open_path
from replay_parity.harness.rounding_leg import RoundingError, rounding_trace
from replay_parity.harness.schedule_path import SchedulePath
from replay_parity.harness.three_leg import judged_runs, quantities
from replay_parity.harness.trace import Trace
from replay_parity.harness.verdict import judge
from replay_parity.oracles.rounding import undecided_step

BASE = scenarios()["two-flushes"].case
CLASSES = list(product(REGIMES, DTYPES, DTYPES, DTYPES))
FLOAT32 = ("float32", "float32", "float32")
PRODUCTION = ("float16", "float32", "bfloat16")
NUMERIC = [
    (name, level)
    for name, fault in FAULTS.items()
    for level in fault.levels
    if level != "engine" and name.startswith(("kernel.", "ring.", "cursor."))
]


def case_in(regime: str, dtypes: tuple[str, ...], case: Case = BASE, seed: int = 6) -> Case:
    return replace(case, inputs=Inputs(regime, seed), replay=Replay(case.replay.buffer_len, *dtypes))


def first_run(legs: Legs, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(truth, allowed RMS by head, allowed maximum by head) of a quantity with one request."""
    quantity = next(one for one in quantities(legs) if one.name == name)
    (run,) = judged_runs(legs, quantity)
    return quantity.truth, run.allowed_rms, run.allowed


def with_error(leg: Trace, truth: torch.Tensor, error: torch.Tensor) -> Trace:
    return replace(leg, outputs=truth + error)


@pytest.mark.parametrize(("regime", "ring", "state", "activation"), CLASSES)
def test_clean_passes_and_a_planted_error_does_not(regime: str, ring: str, state: str, activation: str) -> None:
    legs = SchedulePath().run(case_in(regime, (ring, state, activation)))
    assert judge(legs).outcome == PASS, judge(legs).reason
    assert legs.subject is not None and (legs.wide is None) == (activation == "float32")
    truth, allowed_rms, allowed = first_run(legs, "output")
    noise = torch.where(torch.rand(truth.shape, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)
    for factor, outcome in ((0.98, PASS), (1.02, FAIL)):
        even = noise * factor * torch.minimum(allowed_rms, 0.99 * allowed)[:, None]
        assert judge(replace(legs, subject=with_error(legs.subject, truth, even))).outcome == outcome
        single = torch.zeros_like(truth)
        single[4, 1, 0] = factor * allowed[1]
        verdict = judge(replace(legs, subject=with_error(legs.subject, truth, single)))
        # one entry may already be too much for the RMS
        assert verdict.outcome == outcome or (factor < 1 and "RMS" in str(verdict.reason))
    assert verdict.first_bad is not None and verdict.first_bad.head == 1


def test_16_bit_outputs_hide_what_the_float32_run_shows() -> None:
    """An error of 2e-5: a hundredth of what bfloat16 outputs round, a hundred times what arithmetic does."""
    legs = SchedulePath().run(case_in("model_like", ("float32", "float32", "bfloat16")))
    assert legs.subject is not None and legs.wide is not None
    blurred = [replace(leg, outputs=leg.outputs.float() * (1 + 2e-5)) for leg in (legs.subject, legs.wide)]
    assert judge(replace(legs, subject=blurred[0])).outcome == PASS
    verdict = judge(replace(legs, wide=blurred[1]))
    assert verdict.outcome == FAIL and "float32_output" in str(verdict.reason)


def test_a_small_head_is_not_hidden_by_a_large_one() -> None:
    """Heads are judged one by one: a wrong small head beside one 10^4 times larger."""
    legs = SchedulePath().run(case_in("model_like", FLOAT32))
    assert legs.truth and legs.subject and legs.baseline and legs.summands
    scale = torch.tensor([1e4, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    big = {
        name: replace(leg, outputs=leg.outputs.double() * scale)
        for name, leg in vars(legs).items()
        if isinstance(leg, Trace)
    }
    scaled = replace(legs, **big)  # type: ignore[arg-type]
    assert judge(scaled).outcome == PASS
    wrong = big["subject"].outputs.clone()
    wrong[3, 2] += 1e-5
    assert judge(replace(scaled, subject=replace(big["subject"], outputs=wrong))).outcome == FAIL


def test_a_bfloat16_checkpoint_is_not_an_excuse_in_others() -> None:
    """State rounded to bfloat16 where the Case says float32: what a 16-bit baseline would have let pass."""
    coarse = SchedulePath().run(case_in("model_like", ("float32", "bfloat16", "float32")))
    fine = SchedulePath().run(case_in("model_like", FLOAT32))
    assert judge(coarse).outcome == PASS
    assert judge(replace(fine, subject=coarse.subject)).outcome == FAIL


def _from_float16_state(
    geometry: Geometry, ring: str, activation: str, inputs: Inputs, requests: list[tuple[int, int]], *steps: Step
) -> Case:
    asked = tuple(Request(*request) for request in requests)
    return Case("undecided", geometry, Replay(1, ring, "float16", activation), Cache(), None, inputs, asked, steps)


# false alarms of campaigns: an entry next to a tie, on which float32 and float64 decide differently, in a decode and
# in a prefill chunk whose tie the next chunk carries on
FALSE_ALARMS = (
    _from_float16_state(
        Geometry(2, 6, 16, 4, 4),
        "float16",
        "float32",
        Inputs("adversarial", 65535),
        [(1, 1), (1, 1), (2, 1)],
        Step(((0, 1), (1, 1), (2, 1))),
        Step(((2, 1),)),
    ),
    _from_float16_state(
        Geometry(2, 6, 64, 16, 4),
        "float32",
        "float16",
        Inputs("model_like", 38113),
        [(6, 2)],
        Step(((0, 1),)),
        Step(((0, 5),)),
        Step(((0, 1),)),
    ),
)


@pytest.mark.parametrize("case", FALSE_ALARMS, ids=["decode", "chunk"])
def test_a_rounding_that_may_go_either_way_is_no_mismatch(case: Case) -> None:
    """Without the account of undecided roundings, or a few times further, each is a failure."""
    legs = SchedulePath().run(case)
    subject, truth = legs.wide or legs.subject, legs.truth
    assert subject is not None and truth is not None and legs.undecided is not None
    assert judge(legs).outcome == PASS
    assert judge(replace(legs, undecided=None)).outcome == FAIL
    further = replace(subject, outputs=subject.outputs + 4 * (subject.outputs.double() - truth.outputs).float())
    moved = replace(legs, wide=further) if legs.wide is not None else replace(legs, subject=further)
    assert judge(moved).outcome == FAIL


def test_a_step_is_undecided_next_to_a_tie_only() -> None:
    """float16 beside 1: numbers 2^-10 apart; bfloat16: 2^-7; below 2^-14 float16 keeps its smallest step, 2^-24."""
    size = torch.tensor(1.0, dtype=torch.float64)
    tie = 1 + 2.0**-11
    x = torch.tensor([tie, tie + 2e-7, tie - 2e-7, tie + 1e-6, 1.0, -tie, 2.0**-25], dtype=torch.float64)
    steps = undecided_step(x, torch.float16, size * 1e-3 * torch.tensor([1e3] * 6 + [1e-6]).double())
    assert steps.tolist() == [2.0**-10, 2.0**-10, 2.0**-10, 0.0, 0.0, 2.0**-10, 2.0**-24]
    assert undecided_step(torch.tensor([1 + 2.0**-8]).double(), torch.bfloat16, size).tolist() == [2.0**-7]
    assert undecided_step(x, torch.float32, size).abs().max() == 0


def test_overflow_in_storage_cannot_be_judged() -> None:
    case = case_in("model_like", ("float16", "float32", "float32"))
    legs = SchedulePath().run(case)
    assert legs.truth is not None and legs.truth.cursors is not None
    inputs = layer_inputs(case)
    with pytest.raises(RoundingError, match="overflows"):
        rounding_trace(case, legs.timeline, replace(inputs, v=inputs.v * 1e6), legs.truth.cursors)

    class Raises(SchedulePath):
        def run(self, case: Case) -> Legs:
            raise RoundingError("inputs: too large")

    assert judge_case(Raises(), case).record["verdict"] == UNKNOWN


@pytest.mark.parametrize("dtypes", [FLOAT32, PRODUCTION], ids=["float32", "production"])
@pytest.mark.parametrize(("name", "level"), NUMERIC)
def test_faults_stay_caught(name: str, level: str, dtypes: tuple[str, ...]) -> None:
    if name == "kernel.rounded_current" and dtypes == FLOAT32:
        pytest.skip("a float32 ring rounds nothing")
    cases = [case_in("model_like", dtypes, scenario.case) for scenario in scenarios().values()]
    clean, faulty = open_path(level, None), open_path(level, name)
    caught = next((case for case in cases if judge_case(faulty, case).record["verdict"] == FAIL), None)
    assert caught is not None
    assert judge_case(clean, caught).record["verdict"] == PASS


@pytest.mark.parametrize("activation", DTYPES)
def test_a_rounded_current_token_shows_before_the_ring_rounds(activation: str) -> None:
    """The smallest case: L = 1, where no token ever comes back from the ring, so that storage rounds nothing."""
    case = case_in("model_like", ("float16", "float32", activation), scenarios()["buffer-len-one"].case)
    assert judge_case(open_path("kernel", None), case).record["verdict"] == PASS
    assert judge_case(open_path("kernel", "kernel.rounded_current"), case).record["verdict"] == FAIL


def test_the_evidence_can_be_measured_again() -> None:
    table = measure("adversarial", PRODUCTION, 1, generated=2, long=1, side_by_side=1)
    assert {"longer storage", "longer arithmetic"} & set(table)
    assert all(worst.runs and 0.0 < worst.figures["share of the limit"] <= 1.0 for worst in table.values())
