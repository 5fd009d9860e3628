"""The adversarial regime: every family comes up, keeps the ranges that its docstring names, and stays finite in every
dtype; the same Case gives the same numbers; a long run passes at the schedule level.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from replay_parity.cases.adversarial_inputs import FAMILIES, GATES, KEYS, families
from replay_parity.cases.case import DTYPES, Case, Inputs, Replay, Request
from replay_parity.cases.inputs import LayerInputs, layer_inputs
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.timeline import play
from replay_parity.harness.evidence import long_case
from replay_parity.harness.oracle_path import layer_truth, ledger_cursors
from replay_parity.harness.outcome import PASS
from replay_parity.harness.rounding_leg import rounding_trace
from replay_parity.harness.schedule_path import SchedulePath
from replay_parity.harness.verdict import judge

BASE = scenarios()["two-flushes"].case
SEEDS = range(200)


def case_of(family: str, *dtypes: str) -> Case:
    """A Case of a family, decoding 10 tokens."""
    seed = next(seed for seed in SEEDS if families(adversarial(seed)).name == family)
    return replace(adversarial(seed), replay=Replay(4, *dtypes))


def adversarial(seed: int) -> Case:
    return replace(BASE, inputs=Inputs("adversarial", seed))


def norms(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum(-1).sqrt()


def log_decay(inputs: LayerInputs) -> torch.Tensor:
    steps = torch.nn.functional.softplus(inputs.a.double() + inputs.dt_bias)
    return -inputs.A_log.double().exp() * steps


def test_every_family_comes_up() -> None:
    drawn = [families(adversarial(seed)) for seed in SEEDS]
    assert {one.name for one in drawn} == set(FAMILIES)
    mixed = [one for one in drawn if one.name == "mixture"]
    assert {name for one in mixed for name in one.keys} == {"plain", *KEYS}
    assert {name for one in mixed for name in one.gates} == {"plain", *GATES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_case_gives_the_same_numbers(family: str) -> None:
    case = case_of(family)
    first, second = layer_inputs(case), layer_inputs(case)
    assert all(torch.equal(getattr(first, name), getattr(second, name)) for name in vars(first))
    other = layer_inputs(replace(case, inputs=Inputs("adversarial", case.inputs.seed + 1)))
    assert not torch.equal(first.v, other.v)


def test_a_shared_prefix_repeats_its_tokens() -> None:
    requests = (Request(6, 4), Request(8, 4, shared_prefix_of=0, shared_prefix_len=5))
    inputs = layer_inputs(replace(BASE, inputs=Inputs("adversarial", 3), requests=requests))
    for part in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b):
        assert torch.equal(part[0, :5], part[1, :5]) and not torch.equal(part[0, 5], part[1, 5])


def test_repeated_keys_are_two() -> None:
    inputs = layer_inputs(case_of("repeated_keys"))
    for head in range(inputs.k.shape[2]):
        rows = torch.cat([inputs.k[0, :, head], inputs.q[0, :, head]])
        assert len({tuple(row) for row in rows.tolist()}) == 2


def test_collinear_keys_point_one_way() -> None:
    keys = layer_inputs(case_of("collinear_keys")).k[0].double().transpose(0, 1)
    cosines = torch.nn.functional.cosine_similarity(keys[:, :, None], keys[:, None], dim=-1)
    assert cosines.min() > 0.97 and cosines.triu(1).max() < 1.0


def test_tiny_norms_straddle_the_epsilon() -> None:
    inputs = layer_inputs(case_of("tiny_norm"))
    both = torch.cat([norms(inputs.q).flatten(), norms(inputs.k).flatten()])
    assert 0.99e-5 <= both.min() < 1e-3 < both.max() <= 1.01e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_keep_their_bounds(dtype: str) -> None:
    case = case_of("large_values", "float32", "float32", dtype)
    inputs = layer_inputs(case)
    assert inputs.v.abs().min() >= 8192 and inputs.v.abs().max() <= 30080
    assert ((inputs.k != 0).sum(-1) == 1).all() and norms(inputs.k).min() >= 990 and norms(inputs.k).max() <= 30080
    assert inputs.q.abs().max() <= 30080
    assert (inputs.q.half().square() == torch.inf).any()


def test_gates_keep_their_ranges() -> None:
    kept = log_decay(layer_inputs(case_of("long_memory")))
    assert (kept < 0).all() and (kept > -5.4e-3).all()
    forgotten = log_decay(layer_inputs(case_of("hard_forgetting")))
    assert forgotten.min() < -50 and 0.2 < (forgotten < -3).double().mean() < 0.8
    strengths = torch.sigmoid(layer_inputs(case_of("write_extremes")).b.double())
    assert (strengths.minimum(1 - strengths) < 2.6e-3).all() and 0.2 < strengths.mean() < 0.8


@pytest.mark.parametrize(("family", "kind"), list(product(FAMILIES, ("bfloat16", "float16"))))
def test_a_right_run_in_16_bits_is_finite(family: str, kind: str) -> None:
    """Ring, state and activations all in 16 bits, and long: the oracle with storage's roundings raises on overflow."""
    seed = case_of(family).inputs.seed
    case = long_case("adversarial", Replay(16, kind, kind, kind), seed)
    timeline, inputs = play(case), layer_inputs(case)
    assert all(bool(torch.isfinite(getattr(inputs, name)).all()) for name in vars(inputs))
    truth = layer_truth(case, inputs, torch.float64)
    assert bool(torch.isfinite(truth.outputs).all()) and bool(torch.isfinite(truth.states).all())
    rounded, _ = rounding_trace(case, timeline, inputs, ledger_cursors(case, timeline))
    assert bool(torch.isfinite(rounded.outputs.to(inputs.v.dtype)).all())


@pytest.mark.parametrize("regime", ["exact", "model_like", "adversarial"])
def test_264_decodes_pass(regime: str) -> None:
    verdict = judge(SchedulePath().run(long_case(regime, Replay(16, "float16", "float32", "bfloat16"), 3)))
    assert verdict.outcome == PASS, verdict.reason
