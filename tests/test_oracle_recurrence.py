"""How this tests, in plain words.

The token-by-token oracle is compared with a second formulation that shares no line with it: NumPy float64, one pair of
explicit K x K matrices per token, and the state written as one unrolled sum instead of a recursion,

    S_t = S_0 M_0 ... M_t + sum_j beta_j v_j k_j^T M_{j+1} ... M_t        M_j = alpha_j (I - beta_j k_j k_j^T).

The same comparison must reject each of a list of planted changes. The rest pins what callers rely on: resuming from a
yielded state gives the same bits, rows of a batch do not touch each other, yielded tensors stay as they were, and the
extreme gates (alpha exactly 0 and 1, beta exactly 0 and 1) give exact results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from replay_parity.oracles.recurrence import gdn_outputs, gdn_recurrence
from torch import Tensor

# largest |oracle - dense| over 128 draws (40 of each shape below, 8 of "long"): float32 1.1e-6,
# float64 4.5e-15; the limits are about 10 times that
LIMITS = {torch.float32: 1e-5, torch.float64: 5e-14}
# name: (B, T, H, HV, K, V)
SHAPES = {
    "one head": (1, 9, 1, 1, 8, 8),
    "grouped": (2, 12, 2, 4, 16, 8),
    "wide value": (1, 10, 1, 3, 4, 32),
    "long": (1, 70, 2, 2, 8, 8),
}


@dataclass(frozen=True)
class Inputs:
    """Arguments of the oracle, by its own names."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    initial_state: Tensor | None = None

    def run(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Outputs [B, T, HV, V] and states [B, T, HV, V, K] of all tokens."""
        rest = {"initial_state": self.initial_state, "dtype": dtype}
        steps = gdn_recurrence(self.q, self.k, self.v, self.a, self.b, self.A_log, self.dt_bias, **rest)  # type: ignore[arg-type]
        outputs, states = zip(*steps, strict=True)
        return torch.stack(outputs, 1), torch.stack(states, 1)

    def tokens(self, span: slice, initial_state: Tensor | None) -> Inputs:
        """The same sequences, tokens of ``span`` only."""
        cut = {name: getattr(self, name)[:, span] for name in ("q", "k", "v", "a", "b")}
        return replace(self, **cut, initial_state=initial_state)


def draw(seed: int, shape: str = "grouped") -> Inputs:
    """Gates of a trained model (A from 1 to 16, dt from 1e-3 to 1e-1), SiLU-like q and k, a random initial state."""
    B, T, H, HV, K, V = SHAPES[shape]
    rng = torch.Generator().manual_seed(seed)
    dt = torch.exp(torch.empty(HV).uniform_(np.log(1e-3), np.log(1e-1), generator=rng))
    q, k = (torch.nn.functional.silu(torch.randn(B, T, H, K, generator=rng)) for _ in range(2))
    return Inputs(
        q=q,
        k=k,
        v=torch.randn(B, T, HV, V, generator=rng),
        a=torch.randn(B, T, HV, generator=rng),
        b=torch.randn(B, T, HV, generator=rng),
        A_log=torch.log(torch.empty(HV).uniform_(1, 16, generator=rng)),
        dt_bias=torch.log(torch.expm1(dt)),
        initial_state=torch.randn(B, HV, V, K, generator=rng),
    )


def dense(x: Inputs) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outputs and states of all tokens by the unrolled sum of the file docstring, shaped as in ``Inputs.run``."""
    q, k, v, a, b, A_log, dt_bias = (t.double().numpy() for t in (x.q, x.k, x.v, x.a, x.b, x.A_log, x.dt_bias))
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    S0 = np.zeros((B, HV, V, K)) if x.initial_state is None else x.initial_state.double().numpy()
    outputs, states = np.zeros((B, T, HV, V)), np.zeros((B, T, HV, V, K))
    for row in range(B):
        for head in range(HV):
            group = head * H // HV
            keys = [u / np.hypot(np.linalg.norm(u), 1e-3) for u in k[row, :, group]]
            queries = [u / np.hypot(np.linalg.norm(u), 1e-3) for u in q[row, :, group]]
            beta = 1 / (1 + np.exp(-b[row, :, head]))
            alpha = np.exp(-np.exp(A_log[head]) * np.logaddexp(0, a[row, :, head] + dt_bias[head]))
            M = [alpha[j] * (np.eye(K) - beta[j] * np.outer(keys[j], keys[j])) for j in range(T)]
            for t in range(T):
                suffix = np.eye(K)
                S = np.zeros((V, K))
                for j in range(t, -1, -1):
                    S += beta[j] * np.outer(v[row, j, head], keys[j]) @ suffix
                    suffix = M[j] @ suffix
                S += S0[row, head] @ suffix
                states[row, t, head] = S
                outputs[row, t, head] = S @ queries[t] / np.sqrt(K)
    return outputs, states


def distance(got: tuple[Tensor, Tensor], expected: tuple[NDArray[np.float64], NDArray[np.float64]]) -> float:
    """Largest absolute difference over outputs and states; NaN counts as infinite."""
    worst = max(float((g.double() - torch.from_numpy(e)).abs().max()) for g, e in zip(got, expected, strict=True))
    return worst if worst == worst else float("inf")


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_unrolled_dense_matrices(shape: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        x = draw(seed, shape)
        assert distance(x.run(dtype), dense(x)) < LIMITS[dtype], f"seed {seed}"


def test_starts_from_zero_without_initial_state() -> None:
    x = replace(draw(0), initial_state=None)
    assert distance(x.run(), dense(x)) < LIMITS[torch.float64]


PLANTED = {
    "heads interleaved": lambda x: replace(x, q=x.q.flip(2), k=x.k.flip(2)),
    "keys and queries swapped": lambda x: replace(x, q=x.k, k=x.q),
    "gates swapped": lambda x: replace(x, a=x.b, b=x.a),
    "dt_bias left out": lambda x: replace(x, dt_bias=torch.zeros_like(x.dt_bias)),
    "beta rounded to bfloat16": lambda x: replace(x, b=torch.logit(torch.sigmoid(x.b).bfloat16().double())),
    "A for A_log": lambda x: replace(x, A_log=x.A_log.exp()),
    "one value of one token": lambda x: replace(x, v=x.v + 1e-3 * (torch.arange(x.v.shape[1]) == 5)[:, None, None]),
    "initial state dropped": lambda x: replace(x, initial_state=None),
    "one token skipped": lambda x: replace(x, b=x.b.index_fill(1, torch.tensor([4]), -200.0)),
}


@pytest.mark.parametrize("change", PLANTED)
def test_comparison_rejects_planted_change(change: str) -> None:
    x = draw(1)
    assert distance(PLANTED[change](x).run(torch.float32), dense(x)) > LIMITS[torch.float32]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_resume_from_any_yielded_state_gives_the_same_bits(dtype: torch.dtype) -> None:
    x = draw(2)
    outputs, states = x.run(dtype)
    for split in (1, 5, 11):
        tail = x.tokens(slice(split, None), initial_state=states[:, split - 1])
        tail_outputs, tail_states = tail.run(dtype)
        assert torch.equal(tail_outputs, outputs[:, split:])
        assert torch.equal(tail_states, states[:, split:])


def test_rows_of_a_batch_are_independent() -> None:
    x = draw(3)
    outputs, _ = x.run(torch.float32)
    assert x.initial_state is not None
    for row in range(2):
        cut = {name: getattr(x, name)[row : row + 1] for name in ("q", "k", "v", "a", "b", "initial_state")}
        alone, _ = replace(x, **cut).run(torch.float32)
        # not the same bits: a vectorised exp rounds the gates of one row and of two rows differently
        torch.testing.assert_close(alone, outputs[row : row + 1], rtol=1e-6, atol=1e-6)


def test_value_head_reads_key_head_of_its_group() -> None:
    x = draw(4)
    before, _ = x.run()
    k = x.k.clone()
    k[:, :, 1] = k[:, :, 1].roll(1, dims=-1)
    after, _ = replace(x, k=k).run()
    same = [torch.equal(before[:, :, head], after[:, :, head]) for head in range(4)]
    assert same == [True, True, False, False]


def test_yielded_tensors_and_inputs_are_never_written() -> None:
    x = draw(5)
    assert x.initial_state is not None
    given = x.initial_state.double()
    steps = gdn_recurrence(x.q, x.k, x.v, x.a, x.b, x.A_log, x.dt_bias, initial_state=given, dtype=torch.float64)
    pairs = [(o, o.clone(), S, S.clone()) for o, S in steps]
    assert all(torch.equal(o, o_then) and torch.equal(S, S_then) for o, o_then, S, S_then in pairs)
    assert torch.equal(given, x.initial_state.double())


def test_outputs_helper_collects_what_the_generator_yields() -> None:
    x = draw(6)
    collected = gdn_outputs(x.q, x.k, x.v, x.a, x.b, x.A_log, x.dt_bias, initial_state=x.initial_state)
    assert collected.dtype == torch.float32
    assert torch.equal(collected, x.run(torch.float32)[0])
    none = x.tokens(slice(0, 0), initial_state=None)
    empty = gdn_outputs(none.q, none.k, none.v, none.a, none.b, none.A_log, none.dt_bias)
    assert empty.shape == (2, 0, 4, 8)


def test_reads_inputs_as_already_rounded() -> None:
    x = draw(7)
    low = replace(x, **{name: getattr(x, name).bfloat16() for name in ("q", "k", "v", "a", "b")})
    up = replace(low, **{name: getattr(low, name).float() for name in ("q", "k", "v", "a", "b")})
    assert torch.equal(low.run(torch.float32)[0], up.run(torch.float32)[0])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_dictionary_of_one_hot_keys_is_exact(dtype: torch.dtype) -> None:
    """Set, set, keep, overwrite, clear: alpha and beta are exactly 0 or 1, so integers come out exactly."""
    K = V = 4
    slot = [0, 1, 1, 0, 2]
    # under float64 the 1e-6 inside the norm vanishes only beside a square of 2**40
    q = k = 2.0**20 * torch.eye(K)[slot][None, :, None]
    v = torch.tensor([3.0, 5.0, 999.0, 7.0, 11.0])[None, :, None, None].expand(1, 5, 1, V)
    # -1000 under float64 too: sigmoid(-200) is 1e-87 there, not 0
    b = torch.tensor([1000.0, 1000.0, -1000.0, 1000.0, 1000.0])[None, :, None]
    # softplus(1000) = 1000 and A = 1: g = -1000; softplus(-1000) = 0: g = 0
    a = torch.tensor([-1000.0, -1000.0, -1000.0, -1000.0, 1000.0])[None, :, None]
    steps = list(gdn_recurrence(q, k, v, a, b, torch.zeros(1), torch.zeros(1), dtype=dtype))
    table = [S[0, 0, 0].tolist() for _, S in steps]
    assert table == [[3, 0, 0, 0], [3, 5, 0, 0], [3, 5, 0, 0], [7, 5, 0, 0], [0, 0, 11, 0]]
    assert [float(o[0, 0, 0]) / K**-0.5 for o, _ in steps] == [3, 5, 5, 7, 11]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_norms_near_the_epsilon_and_hard_forgetting(dtype: torch.dtype) -> None:
    x = draw(8, "long")
    # norms near sqrt(1e-6), where the epsilon decides; every seventh token wipes the state (g below -1000)
    wipe = (torch.arange(x.a.shape[1]) % 7 == 6)[:, None]
    hard = replace(x, a=x.a + 1e4 * wipe, q=x.q * 3e-4, k=x.k * 3e-4)
    assert distance(hard.run(dtype), dense(hard)) < LIMITS[dtype]
    zero = replace(x, q=torch.zeros_like(x.q), k=torch.zeros_like(x.k))
    outputs, states = zero.run(dtype)
    assert not outputs.any() and torch.isfinite(states).all()


def test_collinear_keys_and_long_memory() -> None:
    x = draw(9, "long")
    near = replace(x, k=x.k[:, :1] + 1e-3 * x.k, a=torch.full_like(x.a, -30.0))
    assert distance(near.run(torch.float64), dense(near)) < LIMITS[torch.float64]


BAD = {
    "q must be": lambda x: replace(x, q=x.q[..., :-1]),
    "v must be": lambda x: replace(x, v=x.v[:, 1:]),
    "a must be": lambda x: replace(x, a=x.a[..., :1]),
    "A_log must be": lambda x: replace(x, A_log=x.A_log[:1]),
    "initial_state must be": lambda x: replace(x, initial_state=x.initial_state.transpose(2, 3)),
    "multiple of H": lambda x: replace(x, v=x.v[:, :, :3]),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_shape_is_refused_by_name(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BAD[message](draw(0)).run()


def test_lower_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 or torch\.float64"):
        draw(0).run(torch.bfloat16)
