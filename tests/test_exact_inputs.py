"""Inputs of the exact regime: what they promise is checked on the tensors themselves.

Gates and norms must come out as exactly 0 and 1 after a cast to float32, values must be integers within what every
dtype of the case holds, and a value vector must belong to one token only. Small shapes must not break any of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replay_parity.cases.case import DTYPES, Cache, Case, Inputs, Replay, Request, Step
from replay_parity.cases.exact_inputs import LARGEST_EXACT, largest_value, scales_exactly
from replay_parity.cases.geometry import Geometry
from replay_parity.cases.inputs import TORCH_DTYPES, LayerInputs, layer_inputs

SHAPES = [Geometry(2, 4, 16, 16, 4), Geometry(1, 2, 4, 4, 4), Geometry(3, 6, 128, 5, 4), Geometry(1, 1, 1, 1, 1)]


def case_of(
    geometry: Geometry = SHAPES[0], *, dtype: str = "float32", buffer_len: int = 4, seed: int = 0, tokens: int = 40
) -> Case:
    """Two requests, the second with the first one's beginning."""
    requests = (Request(tokens - 1, 2), Request(tokens - 2, 2, shared_prefix_of=0, shared_prefix_len=5))
    steps = (Step(((0, tokens - 1), (1, tokens - 2))),)
    replay = Replay(buffer_len, dtype, dtype, dtype)
    return Case("exact", geometry, replay, Cache(), None, Inputs("exact", seed), requests, steps)


def distinct(x: torch.Tensor) -> set[float]:
    """The numbers in a tensor."""
    return set(x.flatten().tolist())


def count_rows(x: torch.Tensor) -> int:
    """How many different rows [N, V] there are."""
    return len({tuple(row) for row in x.tolist()})


def parts(inputs: LayerInputs) -> list[torch.Tensor]:
    return [inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias]


@pytest.mark.parametrize("geometry", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_is_exact(geometry: Geometry, dtype: str) -> None:
    case = case_of(geometry, dtype=dtype)
    inputs = layer_inputs(case)
    assert {x.dtype for x in parts(inputs)[:5]} == {TORCH_DTYPES[dtype]}
    tokens = [(0, t) for t in range(40)] + [(1, t) for t in range(39)]
    rows = torch.tensor(tokens).T
    q, k, v, a, b = (x[rows[0], rows[1]].float() for x in parts(inputs)[:5])
    key = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    assert distinct(key) <= {0.0, 1.0} and bool((key.sum(-1) == 1).all())
    assert distinct((q != 0).sum(-1)) <= {1, geometry.head_k_dim}
    assert distinct(torch.sigmoid(b)) <= {0.0, 1.0}
    decay = torch.exp(-torch.exp(inputs.A_log) * torch.nn.functional.softplus(a + inputs.dt_bias))
    assert distinct(decay) <= {0.0, 1.0}
    assert torch.equal(v, v.round()) and float(v.min()) >= 0 and float(v.max()) <= largest_value(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["activation_dtype", "state_dtype", "ring_dtype"])
def test_the_smallest_dtype_bounds_the_values(name: str, dtype: str) -> None:
    case = case_of()
    case = replace(case, replay=replace(case.replay, **{name: dtype}))  # type: ignore[arg-type]
    assert largest_value(case) == LARGEST_EXACT[dtype]
    number = torch.tensor(float(LARGEST_EXACT[dtype]), dtype=TORCH_DTYPES[dtype])
    if dtype != "float32":
        # the next one is the first that the dtype cannot hold
        assert float(number) == LARGEST_EXACT[dtype] and float((number.float() + 1).to(number.dtype)) == float(number)


def test_long_rings_and_rounded_scales_keep_sums_exact() -> None:
    assert largest_value(case_of(buffer_len=20)) == 2**20
    assert largest_value(case_of(buffer_len=1024)) * (1024 + 12) / 2 <= 2**24
    assert [K for K in range(1, 300) if scales_exactly(K)] == [1, 4, 16, 64, 256]
    assert largest_value(case_of(Geometry(1, 1, 128, 4, 4))) < 2**8


@pytest.mark.parametrize(("dtype", "lanes"), [("float32", 3), ("bfloat16", 3), ("bfloat16", 16), ("float32", 1)])
def test_a_value_names_its_token(dtype: str, lanes: int) -> None:
    inputs = layer_inputs(replace(case_of(Geometry(2, 4, 16, lanes, 4), dtype=dtype)))
    # the second request's first five tokens are the first one's
    own = torch.cat([inputs.v[0, :40], inputs.v[1, 5:39]]).reshape(-1, lanes)
    assert count_rows(own) == len(own)


def test_long_sequences_stay_unique_in_bfloat16() -> None:
    """Positions beyond 256 do not fit a lane: the high part has one of its own."""
    inputs = layer_inputs(case_of(Geometry(1, 2, 16, 5, 4), dtype="bfloat16", tokens=600))
    values = torch.cat([inputs.v[0], inputs.v[1, 5:599]]).reshape(-1, 5)
    assert count_rows(values) == len(values)


def test_heads_differ_in_what_they_ask_and_do() -> None:
    inputs = layer_inputs(case_of(tokens=400))
    one_hot = ((inputs.q[0] != 0).sum(-1) == 1).float().mean(0)
    assert 0.6 < float(one_hot[0]) < 0.8 and float(one_hot[1]) == 0
    cleared, skipped = (inputs.a[0] > 0).float().mean(0), (inputs.b[0] < 0).float().mean(0)
    assert float(cleared[0]) == 0 and 0.2 < float(cleared[1]) < 0.4 and 0.4 < float(cleared[3]) < 0.6
    assert float(skipped[0]) == 0 and 0.1 < float(skipped[1]) < 0.3 and float(skipped[2]) == 0
    keys = inputs.k[0].argmax(-1)
    assert keys.max() == 5 and 0.1 < float((keys[1:] == keys[:-1]).float().mean()) < 0.3


def test_a_single_head_does_everything() -> None:
    inputs = layer_inputs(case_of(Geometry(1, 1, 16, 4, 4), tokens=200))
    one_hot = ((inputs.q[0] != 0).sum(-1) == 1).float().mean()
    assert 0.4 < float(one_hot) < 0.6
    assert 0.2 < float((inputs.a[0] > 0).float().mean()) < 0.4 and float((inputs.b[0] < 0).float().mean()) > 0.1


def test_seeded_and_shared() -> None:
    again, other = (layer_inputs(case_of(seed=seed)) for seed in (0, 1))
    first = layer_inputs(case_of())
    assert all(torch.equal(x, y) for x, y in zip(parts(first), parts(again), strict=True))
    assert not torch.equal(first.v, other.v)
    for x in parts(first)[:5]:
        assert torch.equal(x[0, :5], x[1, :5])
    assert not torch.equal(first.v[0, 5], first.v[1, 5])
