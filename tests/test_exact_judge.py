"""The judge of the exact regime: clean runs pass in every dtype, and the smallest wrong thing is rejected.

Clean: all 27 combinations of activation, state and ring dtype, at kernel and schedule level, with NaN and with stale
poison, rings of 1, 2, 4 and 16 tokens. Wrong: one output or one state off by one unit in the last place.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from replay_parity.cases.case import DTYPES, Case, Inputs, Replay
from replay_parity.cases.geometry import TINY, Geometry
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.contract import Legs
from replay_parity.harness.exact import exact_findings
from replay_parity.harness.kernel_path import KernelPath
from replay_parity.harness.outcome import FAIL, PASS
from replay_parity.harness.schedule_path import SchedulePath
from replay_parity.harness.trace import Trace
from replay_parity.harness.verdict import judge
from replay_parity.harness.whole import SCALED_SLACK, shows

COMBINATIONS = list(itertools.product(DTYPES, DTYPES, DTYPES))
# small schedules: a ring that wraps, a resume, a recycled slot, a padded step
SMALL = ("plain-flush", "resume-at-phase-1", "slot-reuse-mid-ring", "padded-step")
RINGS = (1, 2, 4, 16)


def exact_case(name: str, *, seed: int = 0, geometry: Geometry = TINY, replay: Replay | None = None) -> Case:
    case = scenarios(geometry)[name].case
    return replace(case, inputs=Inputs("exact", seed), replay=replay or case.replay)


@pytest.mark.parametrize("path", [KernelPath(), SchedulePath()], ids=["kernel", "schedule"])
@pytest.mark.parametrize("number", range(27), ids=["-".join(names) for names in COMBINATIONS])
def test_clean_in_every_dtype(path: KernelPath | SchedulePath, number: int) -> None:
    activation, state, ring = COMBINATIONS[number]
    # two runs each, one a poison, so that four neighbours share all rings and schedules
    for seed in (0, 1):
        turn = number + 2 * seed
        replay = Replay(RINGS[turn % 4], ring, state, activation)
        case = exact_case(SMALL[(turn + number // 4) % 4], seed=seed, replay=replay)
        verdict = judge(path.run(case))
        assert verdict.outcome == PASS, (case.id, replay, verdict.reason)
        assert verdict.distances == {"output_wrong_heads": 0, "state_wrong_heads": 0}


@pytest.mark.parametrize("name", scenarios())
def test_clean_scenarios_pass(name: str) -> None:
    verdict = judge(SchedulePath().run(exact_case(name, seed=sum(map(ord, name)))))
    assert verdict.outcome == PASS, verdict.reason


@pytest.mark.parametrize(
    "geometry", [Geometry(2, 4, 128, 8, 4), Geometry(1, 2, 32, 4, 4), Geometry(1, 1, 2, 1, 2)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clean_where_the_scale_rounds(geometry: Geometry, dtype: str) -> None:
    replay = Replay(4, dtype, dtype, dtype)
    verdict = judge(KernelPath().run(exact_case("two-flushes", geometry=geometry, replay=replay)))
    assert verdict.outcome == PASS, verdict.reason


@pytest.fixture(scope="module", params=DTYPES)
def clean(request: pytest.FixtureRequest) -> Legs:
    replay = Replay(4, request.param, request.param, request.param)
    legs = SchedulePath().run(exact_case("two-flushes", replay=replay))
    assert judge(legs).outcome == PASS
    return legs


def subject(legs: Legs) -> Trace:
    assert legs.subject is not None
    return legs.subject


def with_subject(legs: Legs, **changes: torch.Tensor) -> Legs:
    return replace(legs, subject=replace(subject(legs), **changes))  # type: ignore[arg-type]


def next_up(x: torch.Tensor) -> torch.Tensor:
    """The next larger number of the same dtype."""
    return torch.nextafter(x, torch.full_like(x, float("inf")))


def test_one_ulp_of_an_output_is_rejected(clean: Legs) -> None:
    outputs = subject(clean).outputs.clone()
    outputs[5, 2, 3] = next_up(outputs[5, 2, 3])
    verdict = judge(with_subject(clean, outputs=outputs))
    assert (verdict.outcome, verdict.symptom) == (FAIL, "mismatch")
    assert verdict.first_bad is not None and (verdict.first_bad.step, verdict.first_bad.head) == (5, 2)
    assert verdict.distances["output_wrong_heads"] == 1 and verdict.limits["output_wrong_heads"] == 0


def test_one_ulp_of_a_prefill_output_is_rejected(clean: Legs) -> None:
    outputs = subject(clean).outputs.clone()
    outputs[0, 0, 0] = next_up(outputs[0, 0, 0])
    assert judge(with_subject(clean, outputs=outputs)).outcome == FAIL


def test_one_ulp_of_a_state_is_rejected(clean: Legs) -> None:
    states = subject(clean).states
    assert states is not None
    changed = states.clone()
    changed[1, 3, 0, 15] = next_up(changed[1, 3, 0, 15])
    verdict = judge(with_subject(clean, states=changed))
    assert verdict.outcome == FAIL and verdict.distances["state_wrong_heads"] == 1
    assert verdict.first_bad is not None and verdict.first_bad.head == 3


def test_an_output_that_was_not_rounded_is_rejected(clean: Legs) -> None:
    """Outputs of a wider dtype than the case asks for are wrong where rounding shows."""
    assert clean.truth is not None
    wide = clean.truth.outputs
    narrow = subject(clean).outputs.double()
    rounded = bool((wide != narrow).any())
    assert (judge(with_subject(clean, outputs=wide)).outcome == FAIL) == rounded
    assert rounded == (clean.case.replay.activation_dtype != "float32")


def test_negative_zero_is_zero(clean: Legs) -> None:
    outputs, states = subject(clean).outputs, subject(clean).states
    assert states is not None and bool((states == 0).any())
    signed = with_subject(
        clean, outputs=torch.where(outputs == 0, -0.0, outputs), states=torch.where(states == 0, -0.0, states)
    )
    assert judge(signed).outcome == PASS


def test_nan_is_poison(clean: Legs) -> None:
    outputs = subject(clean).outputs.clone()
    outputs[4, 1, 3] = float("nan")
    verdict = judge(with_subject(clean, outputs=outputs))
    assert (verdict.outcome, verdict.symptom) == (FAIL, "poison")
    assert verdict.first_bad is not None and (verdict.first_bad.step, verdict.first_bad.head) == (4, 1)


def test_a_wrong_baseline_is_found(clean: Legs) -> None:
    assert clean.baseline is not None
    outputs = clean.baseline.outputs.clone()
    outputs[3, 0, 0] = next_up(outputs[3, 0, 0])
    verdict = judge(replace(clean, baseline=replace(clean.baseline, outputs=outputs)))
    assert verdict.outcome == FAIL and verdict.reason is not None and "baseline" in verdict.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_misread_by_one_is_rejected_where_the_scale_rounds(dtype: str) -> None:
    """K = 128: outputs may differ from n / scale by rounding, but never so much that n could be its neighbour."""
    replay = Replay(4, dtype, dtype, dtype)
    legs = KernelPath().run(exact_case("two-flushes", geometry=Geometry(2, 4, 128, 8, 4), replay=replay))
    outputs = subject(legs).outputs.clone()
    asks_all = 2
    for step in (1, 3, 7):
        changed = outputs.clone()
        # the neighbour of an integer is 1 / K away; small sums only, that a 16-bit output can tell apart
        lane = int(changed[step, asks_all].argmin())
        changed[step, asks_all, lane] = (changed[step, asks_all, lane].double() + 1 / 128).to(changed.dtype)
        assert judge(with_subject(legs, outputs=changed)).outcome == FAIL


def test_rounding_within_the_slack_is_all_that_is_allowed() -> None:
    exact = torch.tensor([3.0, 100.0, 2000.0], dtype=torch.float64)
    near = torch.tensor(SCALED_SLACK, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        stored = exact.to(dtype)
        assert shows(stored, exact, 0.0).all() and shows(stored, exact, near).all()
        assert shows((exact + near / 2).to(dtype), exact, near).all()
        assert not shows((exact + 1).to(dtype), exact, near)[:2].any()
        assert not shows(next_up(stored), exact, 0.0).any()
        assert not shows(torch.full_like(stored, float("nan")), exact, near).any()
    # float32 resolves the slack itself around 3
    assert not shows((exact[:1] + 2 * near).float(), exact[:1], near).any()


def test_the_engine_has_no_exact_regime(clean: Legs) -> None:
    """A whole model's outputs are no dictionary: the engine level keeps its own rule."""
    from replay_parity.harness.exact import judged_exactly

    assert judged_exactly(clean) and not judged_exactly(replace(clean, level="engine"))
    assert not judged_exactly(replace(clean, case=replace(clean.case, inputs=Inputs("model_like"))))


def test_first_output_before_first_state(clean: Legs) -> None:
    outputs, states = subject(clean).outputs.clone(), subject(clean).states
    assert states is not None
    wrong = states.clone()
    wrong[0, 1] += 1
    outputs[8, 3, 1] += 1
    _, findings = exact_findings(with_subject(clean, outputs=outputs, states=wrong))
    assert len(findings) == 2 and findings[0].first_bad is not None and findings[1].first_bad is not None
    assert (findings[0].first_bad.step, findings[0].first_bad.head) == (8, 3)
    assert "left under key 0 of its state" in findings[1].message
