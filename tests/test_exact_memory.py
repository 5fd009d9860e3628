"""The dictionaries against the recurrence, and against a short story told by hand.

The recurrence in float32 does linear algebra, the dictionaries do none: on inputs of the exact regime both must give
the same bits, in every output and every state. Inputs of another form must be refused with the name of the tensor.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replay_parity.cases.case import Cache, Case, Inputs, Replay, Request, Step
from replay_parity.cases.geometry import Geometry
from replay_parity.cases.inputs import LayerInputs, layer_inputs
from replay_parity.oracles.memory import MemoryTruth, OracleError, memory_truth
from replay_parity.oracles.recurrence import gdn_recurrence

SHAPES = [Geometry(2, 4, 16, 16, 4), Geometry(2, 8, 64, 4, 4), Geometry(1, 1, 1, 2, 1)]


def inputs_of(geometry: Geometry, seed: int, dtype: str = "float32") -> LayerInputs:
    requests = (Request(30, 11), Request(7, 2), Request(25, 1, shared_prefix_of=0, shared_prefix_len=10))
    steps = (Step(((0, 30), (1, 7), (2, 25))),)
    replay = Replay(4, activation_dtype=dtype)
    return layer_inputs(Case("m", geometry, replay, Cache(), None, Inputs("exact", seed), requests, steps))


def recurrence(inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, a, b = inputs.q, inputs.k, inputs.v, inputs.a, inputs.b
    steps = list(gdn_recurrence(q, k, v, a, b, inputs.A_log, inputs.dt_bias))
    return torch.stack([o for o, _ in steps], 1), torch.stack([s for _, s in steps], 1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("geometry", SHAPES, ids=str)
def test_bit_equal_to_the_recurrence(geometry: Geometry, seed: int, dtype: str) -> None:
    inputs = inputs_of(geometry, seed, dtype)
    truth = memory_truth(inputs)
    outputs, states = recurrence(inputs)
    lives = ~torch.isnan(truth.outputs)
    assert int(lives[:, :, 0, 0].sum()) == 40 + 8 + 25
    assert torch.equal(truth.outputs[lives], outputs.double()[lives])
    known = ~torch.isnan(truth.states)
    assert torch.equal(truth.states[known], states.double()[known])
    assert bool((outputs[lives] != 0).any())


@pytest.mark.parametrize("K", [8, 32, 128])
def test_rounded_scales_agree_in_integers(K: int) -> None:
    inputs = inputs_of(Geometry(2, 4, K, 8, 4), 1)
    truth = memory_truth(inputs)
    outputs, states = recurrence(inputs)
    numbers = outputs.double() * torch.from_numpy(truth.divisor)[..., None]
    lives = ~torch.isnan(truth.outputs)
    assert float((numbers - torch.from_numpy(truth.total))[lives].abs().max()) <= 1e-4
    known = ~torch.isnan(truth.states)
    assert torch.equal(truth.states[known], states.double()[known])


def story(**changes: torch.Tensor) -> LayerInputs:
    """One head, K = 4, two lanes: set key 0, set key 2, clear and skip on key 1, set key 3; the sum is asked thrice."""
    k = 64 * torch.eye(4)[torch.tensor([0, 2, 1, 3])][None, :, None]
    q = torch.full((1, 4, 1, 4), 64.0)
    q[0, 1, 0] = torch.tensor([64.0, 0, 0, 0])
    v = torch.tensor([[5.0, 1], [7, 2], [9, 3], [11, 4]])[None, :, None]
    a = torch.tensor([-200.0, -200, 1000, -200])[None, :, None]
    b = torch.tensor([200.0, 200, -200, 200])[None, :, None]
    parts = {"q": q, "k": k, "v": v, "a": a, "b": b, "A_log": torch.zeros(1), "dt_bias": torch.zeros(1)}
    return LayerInputs(**{**parts, **changes})


def told() -> MemoryTruth:
    return memory_truth(story())


def test_a_story_by_hand() -> None:
    truth = told()
    assert [truth.holders(0, t, 0) for t in range(4)] == [{0: 0}, {0: 0, 2: 1}, {}, {3: 3}]
    # sums over K = 4, the one-hot query over 2
    assert truth.outputs[0, :, 0].tolist() == [[1.25, 0.25], [2.5, 0.5], [0, 0], [2.75, 1.0]]
    assert truth.states[0, 1, 0].tolist() == [[5, 0, 7, 0], [1, 0, 2, 0]]
    assert truth.total[0, :, 0, 0].tolist() == [5, 5, 0, 11]


def test_inputs_are_read_not_changed() -> None:
    inputs = story()
    before = [getattr(inputs, name).clone() for name in ("q", "k", "v", "a", "b")]
    memory_truth(inputs)
    assert all(torch.equal(getattr(inputs, n), x) for n, x in zip(("q", "k", "v", "a", "b"), before, strict=True))


def changed(name: str, place: tuple[int, ...], value: float) -> LayerInputs:
    tensor = getattr(story(), name).clone()
    tensor[place] = value
    return story(**{name: tensor})


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("k", (0, 1, 0, 3), 64.0),
        ("k", (0, 1, 0, 2), -64.0),
        ("k", (0, 1, 0, 2), 63.0),
        ("q", (0, 0, 0, 2), 32.0),
        ("q", (0, 1, 0, 0), 16.0),
        ("v", (0, 2, 0, 1), 0.5),
        ("v", (0, 2, 0, 1), -1.0),
        ("v", (0, 2, 0, 1), float("nan")),
        ("a", (0, 3, 0), 0.0),
        ("a", (0, 3, 0), 80.0),
        ("b", (0, 3, 0), 20.0),
        ("b", (0, 3, 0), float("nan")),
    ],
)
def test_another_form_is_refused(name: str, place: tuple[int, ...], value: float) -> None:
    with pytest.raises(OracleError, match=rf"^{name}\[0, {place[1]}.*exact regime"):
        memory_truth(changed(name, place, value))


@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_other_gate_parameters_are_refused(name: str) -> None:
    with pytest.raises(OracleError, match="A_log, dt_bias"):
        memory_truth(story(**{name: torch.ones(1)}))


def test_model_like_inputs_are_refused() -> None:
    requests, steps = (Request(3, 1),), (Step(((0, 3),)),)
    case = Case("m", Geometry(1, 1, 4, 4, 4), Replay(2), Cache(), None, Inputs("model_like"), requests, steps)
    with pytest.raises(OracleError):
        memory_truth(replace(layer_inputs(case), A_log=torch.zeros(1), dt_bias=torch.zeros(1)))
