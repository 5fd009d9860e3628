"""Tokens that hang on rounding: where a router hesitates two right answers exist, and no Case may be judged by them.

A router with two nearly equal rows shows that the danger is real: float32 evaluations of one model then differ by
tenths. The oracle must tell such tokens by their margin, and the engine level must draw others, the same each time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.geometry import ENGINE
from replay_parity.cases.inputs import token_ids
from replay_parity.harness import clear_tokens as module
from replay_parity.harness.checkpoint import VOCAB_SIZE, tiny_checkpoint
from replay_parity.harness.clear_tokens import UnclearTokens, clear_tokens, is_clear
from replay_parity.oracles.moe import MoeConfig, routing_margins
from replay_parity.oracles.qwen3_5 import Qwen3_5Oracle

TOKENS = list(range(100, 124))
# by the margins of all named cases: its first draw holds one of 1.2e-4
CASE = engine_scenarios()["padding-comes-and-goes"].case


@pytest.fixture(scope="module")
def oracle() -> Qwen3_5Oracle:
    """The MoE text model."""
    path = tiny_checkpoint(ENGINE, architecture="Qwen3_5MoeForCausalLM")
    return Qwen3_5Oracle.load(path, dtype=torch.float64)


def hesitant(oracle: Qwen3_5Oracle) -> Qwen3_5Oracle:
    """Every even expert's row in the first router is repeated, but for a billionth, as that of the next one."""
    name = "model.layers.0.mlp.gate.weight"
    rows = oracle.tensors[name].clone()
    rows[1::2] = rows[0::2] * (1 + 1e-9)
    # three of eight: the third is always one of a pair
    moe = replace(oracle.config.moe or pytest.fail("a dense model"), num_experts_per_tok=3)
    return Qwen3_5Oracle(replace(oracle.config, moe=moe), {**oracle.tensors, name: rows})


def test_margin_is_between_the_last_chosen_and_the_first_left_out() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.5], [1.0, 1.0, 5.0, 1.0]])
    assert routing_margins(logits, MoeConfig(4, 2, 1, 1)).tolist() == [1.5, 0.0]
    assert routing_margins(logits, MoeConfig(4, 4, 1, 1)).tolist() == [torch.inf] * 2


def test_a_router_that_hesitates_has_two_right_answers(oracle: Qwen3_5Oracle) -> None:
    """Observed: 4e-5 where it does not, up to nats where it does."""
    unsure = hesitant(oracle)
    assert is_clear(TOKENS, oracle) and not is_clear(TOKENS, unsure)
    for model, differs in ((oracle, False), (unsure, True)):
        truth = model.log_probs(TOKENS)
        worst = max(float((model.nudged(seed).log_probs(TOKENS) - truth).abs().max()) for seed in range(4))
        assert (worst > 1e-2) == differs and (worst < 1e-3) != differs


def test_unclear_tokens_are_drawn_anew_and_always_the_same(oracle: Qwen3_5Oracle) -> None:
    first, got = token_ids(CASE, VOCAB_SIZE), clear_tokens(CASE, oracle, VOCAB_SIZE)
    assert not all(is_clear(row[:-1], oracle) for row in first)
    assert all(is_clear(row[:-1], oracle) for row in got)
    assert [len(row) for row in got] == [len(row) for row in first]
    assert got == clear_tokens(CASE, oracle, VOCAB_SIZE)


def test_clear_tokens_and_dense_models_keep_the_first_draw(oracle: Qwen3_5Oracle) -> None:
    case = engine_scenarios()["resume-at-phase-2"].case
    assert clear_tokens(case, oracle, VOCAB_SIZE) == token_ids(case, VOCAB_SIZE)
    dense = Qwen3_5Oracle.load(tiny_checkpoint(ENGINE))
    assert clear_tokens(CASE, dense, VOCAB_SIZE) == token_ids(CASE, VOCAB_SIZE)
    assert dense.routing_margins(TOKENS).isinf().all()


def test_no_clear_draw_is_an_error(oracle: Qwen3_5Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAWS", 3)
    with pytest.raises(UnclearTokens, match="case padding-comes-and-goes: of 3 draws"):
        clear_tokens(CASE, hesitant(oracle), VOCAB_SIZE)
