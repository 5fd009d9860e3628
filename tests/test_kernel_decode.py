"""How this tests the decode operators' arithmetic, in plain words.

Each row is a request with a ring of its own. The same random tokens go through the replay operator (checkpoint, ring,
flush) and through the packed operator (state written each step), which does not know of rings; outputs are compared at
every step and states at every flush. Rows stand at unlike ring positions, flush at unlike steps (some early, as
prefix caching asks), and some are padding. What must not be read holds NaN, so a leak shows as NaN in an output.
Wrong cursors are planted to show that the comparison rejects. Further tests pin single rules of the recurrence by
hand-made tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_parity.kernels import decode_torch
from replay_parity.kernels.cursor import decode_cursor
from replay_parity.kernels.decode import gdn_packed_decode, gdn_replay_decode

# float32 replay against float32 packed, v ~ N(0, 1). Observed on 1,000 random plans of the kinds below (seeds 0 to
# 999, up to 40 steps and 5 rows): output 7.5e-7, state 7.2e-7. Margin 8; planted cursors miss by 0.08 to 1.5.
OUTPUT_LIMIT = 6e-6
STATE_LIMIT = 6e-6

# called with unpacked lists, whose lengths a type checker cannot see
replay: Callable[..., torch.Tensor] = gdn_replay_decode
packed_step: Callable[..., torch.Tensor] = gdn_packed_decode


@dataclass(frozen=True)
class Plan:
    """One random comparison: shapes, ring length, steps, and the seed of everything else."""

    num_k_heads: int = 2
    group: int = 2
    head_k_dim: int = 16
    head_v_dim: int = 8
    num_rows: int = 4
    buffer_len: int = 4
    num_steps: int = 14
    seed: int = 0
    # added to write_pos of every step but the flushes: a planted fault where not 0
    write_pos_shift: int = 0
    # what ring entries hold before their first write
    garbage: float = float("nan")


@dataclass(frozen=True)
class Gap:
    """Largest differences between the two operators, and how often what was compared."""

    output: float
    state: float
    flushes: int
    padded: int

    def is_clean(self) -> bool:
        # NaN compares false, so a leak is never clean
        return self.output <= OUTPUT_LIMIT and self.state <= STATE_LIMIT


def gap(plan: Plan) -> Gap:
    """Run a plan through both operators."""
    rng = torch.Generator().manual_seed(plan.seed)
    draw = np.random.default_rng(plan.seed)
    rows, h, hv = plan.num_rows, plan.num_k_heads, plan.num_k_heads * plan.group
    kd, vd, length = plan.head_k_dim, plan.head_v_dim, plan.buffer_len
    A_log = torch.log(1 + 15 * torch.rand(hv, generator=rng))
    dt_bias = torch.log(torch.expm1(10 ** (-3 + 2 * torch.rand(hv, generator=rng))))

    slots = 1 + torch.randperm(rows + 2, generator=rng)[:rows]
    state = torch.full((rows + 3, hv, vd, kd), float("nan"))
    state[slots] = 0.1 * torch.randn(rows, hv, vd, kd, generator=rng)
    packed_state = state.clone()
    ring_d = torch.full((rows + 3, hv, length, vd), plan.garbage)
    ring_k = torch.full((rows + 3, h, length, kd), plan.garbage)
    ring_g = torch.full((rows + 3, hv, length), plan.garbage)

    pending = np.zeros(rows, dtype=np.int64)
    worst_output, worst_state, flushes, padded = [0.0], [0.0], 0, 0
    for _ in range(plan.num_steps):
        live = torch.from_numpy(draw.random(rows) < 0.8)
        is_flush = (pending == length - 1) | (draw.random(rows) < 0.1)
        token = random_token(rows, h, hv, kd, vd, rng)
        row_slots = torch.where(live, slots, torch.from_numpy(-draw.integers(0, 2, rows)))
        shift = np.where(is_flush, 0, plan.write_pos_shift)
        write_pos = torch.from_numpy(np.clip(pending + shift, 0, length - 1))
        flags = torch.from_numpy(is_flush)
        out = torch.full((rows, hv, vd), float("nan"))
        replay(
            *token, A_log, dt_bias, state, ring_d, ring_k, ring_g, row_slots, write_pos, flags, out=out
        )  # fmt: skip
        expected = packed_step(*token, A_log, dt_bias, packed_state, row_slots)
        worst_output.append((out - expected).abs().max().item())
        assert not out[~live].any()
        flushed = slots[live & flags]
        if len(flushed):
            worst_state.append((state[flushed] - packed_state[flushed]).abs().max().item())
        flushes += len(flushed)
        padded += int((~live).sum())
        pending = np.where(live.numpy(), np.where(is_flush, 0, pending + 1), pending)
    # np.max keeps a NaN, python's max may drop it
    return Gap(float(np.max(worst_output)), float(np.max(worst_state)), flushes, padded)


def random_token(
    rows: int, h: int, hv: int, kd: int, vd: int, rng: torch.Generator, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """q, k, v, a, b of one step."""
    shapes = [(rows, h, kd), (rows, h, kd), (rows, hv, vd), (rows, hv), (rows, hv)]
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


PLANS = st.builds(
    Plan,
    num_k_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_k_dim=st.sampled_from([1, 4, 16, 20]),
    head_v_dim=st.sampled_from([1, 8, 16]),
    num_rows=st.integers(1, 5),
    buffer_len=st.integers(1, 6),
    num_steps=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)


@settings(deadline=None, max_examples=60)
@given(PLANS)
def test_replay_equals_packed(plan: Plan) -> None:
    result = gap(plan)
    assert result.is_clean(), result


def test_plan_meets_what_it_claims() -> None:
    result = gap(Plan(num_steps=30))
    assert result.flushes >= 5
    assert result.padded >= 5
    assert result.output > 0


@pytest.mark.parametrize("garbage", [float("nan"), 0.0])
@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("seed", range(5))
def test_wrong_cursor_is_rejected(shift: int, seed: int, garbage: float) -> None:
    """By NaN where dead entries hold NaN, by the limits alone where they hold zeros."""
    assert not gap(Plan(seed=seed, write_pos_shift=shift, garbage=garbage)).is_clean()


@pytest.mark.parametrize(
    ("name", "head"),
    [("interleaved heads", lambda h, hv, device: torch.arange(hv, device=device) % h)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_head_map(name: str, head: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value head hv reads key head hv // (HV // H): with every other key head's q zero, only its own heads speak."""
    rng = torch.Generator().manual_seed(0)

    def silent() -> list[bool]:
        q, k, v, a, b = random_token(1, 2, 6, 4, 3, rng)
        q[:, 1] = 0
        state = torch.randn(2, 6, 3, 4, generator=rng)
        out = packed_step(q, k, v, a, b, torch.zeros(6), torch.zeros(6), state, torch.tensor([1]))
        return [not out[0, head].any() for head in range(6)]

    assert silent() == [False, False, False, True, True, True]
    monkeypatch.setattr(decode_torch, "key_head_of", head)
    assert silent() != [False, False, False, True, True, True]


@pytest.mark.parametrize("seed", range(3))
def test_buffer_of_one_equals_packed(seed: int) -> None:
    """L = 1 flushes each step: the state after each step is the packed operator's to rounding."""
    result = gap(Plan(buffer_len=1, num_steps=40, seed=seed))
    assert result.is_clean(), result
    assert result.flushes > 100


def worked_example(resume_base: int) -> tuple[float, list[int]]:
    """Prompt 6, L 3, decode 4, preempt, resume into a new slot with 10 tokens prefilled, decode 2; slot keeps its ring.

    Returns the largest output difference to one packed run over the same tokens, and the write positions after the
    resume, with the decode base of the resumed request as given.
    """
    rng = torch.Generator().manual_seed(3)
    A_log, dt_bias = torch.zeros(2), torch.full((2,), -3.0)
    tokens = [random_token(1, 1, 2, 8, 4, rng) for _ in range(12)]
    packed = torch.zeros(3, 2, 4, 8)
    first = torch.tensor([1])
    expected = [packed_step(*token, A_log, dt_bias, packed, first) for token in tokens]

    def prefilled(count: int) -> torch.Tensor:
        state = torch.zeros(3, 2, 4, 8)
        for token in tokens[:count]:
            packed_step(*token, A_log, dt_bias, state, first)
        return state[1]

    state = torch.zeros(3, 2, 4, 8)
    ring_d, ring_k, ring_g = torch.zeros(3, 2, 3, 4), torch.zeros(3, 1, 3, 8), torch.zeros(3, 2, 3)
    worst, positions = 0.0, []
    for computed in range(6, 12):
        base = 6 if computed < 10 else resume_base
        # resumed into a slot whose ring holds what the first tenant left: here, its own copy
        if computed in (6, 10):
            state[1] = prefilled(computed)
        cursor = decode_cursor([computed], [base], [1], 3)
        out = replay(
            *tokens[computed], A_log, dt_bias, state, ring_d, ring_k, ring_g, first,
            torch.from_numpy(cursor.write_pos), torch.from_numpy(cursor.is_flush),
        )  # fmt: skip
        worst = max(worst, (out - expected[computed]).abs().max().item())
        positions += cursor.write_pos.tolist()
    return worst, positions


def test_worked_example_of_a_resume() -> None:
    worst, positions = worked_example(resume_base=10)
    assert positions == [0, 1, 2, 0, 0, 1]
    assert worst <= OUTPUT_LIMIT


def test_prompt_based_count_after_a_resume_is_rejected() -> None:
    worst, positions = worked_example(resume_base=6)
    assert positions == [0, 1, 2, 0, 1, 2]
    assert worst > 1000 * OUTPUT_LIMIT


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize(("h", "hv", "kd", "vd", "length"), [(2, 4, 16, 16, 16), (1, 1, 4, 4, 1), (1, 2, 128, 128, 5)])
def test_bits_of_a_row_do_not_depend_on_the_batch(
    num_rows: int, h: int, hv: int, kd: int, vd: int, length: int
) -> None:
    """Every row alone, in reversed order, and in the full batch: same bytes of output, state and ring."""
    rng = torch.Generator().manual_seed(num_rows)
    token = random_token(num_rows, h, hv, kd, vd, rng)
    A_log, dt_bias = torch.randn(hv, generator=rng), torch.randn(hv, generator=rng)
    start = [
        torch.randn(num_rows + 1, *shape, generator=rng) for shape in ((hv, vd, kd), (hv, length, vd), (h, length, kd))
    ]
    start.append(-torch.rand(num_rows + 1, hv, length, generator=rng))
    slots = 1 + torch.randperm(num_rows, generator=rng)
    write_pos = torch.randint(0, length, (num_rows,), generator=rng)
    is_flush = torch.arange(num_rows) % 2 == 0

    def run(rows: list[int]) -> list[torch.Tensor]:
        paged = [tensor.clone() for tensor in start]
        some = [tensor[rows] for tensor in token]
        out = replay(*some, A_log, dt_bias, *paged, slots[rows], write_pos[rows], is_flush[rows])
        return [out, *(tensor[slots[rows]] for tensor in paged)]

    together = run(list(range(num_rows)))
    backwards = run(list(range(num_rows))[::-1])
    for row in range(num_rows):
        alone = run([row])
        for one, many, reverse in zip(alone, together, backwards, strict=True):
            assert torch.equal(one[0], many[row])
            assert torch.equal(one[0], reverse[num_rows - 1 - row])


@pytest.mark.parametrize("ring_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_only_the_stored_entry_is_rounded(ring_dtype: torch.dtype) -> None:
    """With an empty ring its dtype shows in neither output nor flush; the stored entry is the float32 one, rounded."""
    rng = torch.Generator().manual_seed(1)
    token = random_token(2, 1, 2, 16, 8, rng)
    state = torch.randn(3, 2, 8, 16, generator=rng)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        paged = [state.clone(), torch.zeros(3, 2, 4, 8, dtype=dtype), torch.zeros(3, 1, 4, 16, dtype=dtype)]
        paged.append(torch.zeros(3, 2, 4))
        cursor = torch.zeros(2, dtype=torch.int32)
        flags = torch.tensor([0, 1], dtype=torch.int8)
        out = replay(
            *token, torch.zeros(2), torch.zeros(2), *paged, torch.tensor([1, 2]), cursor, flags
        )  # fmt: skip
        return [out, *paged]

    exact, rounded = run(torch.float32), run(ring_dtype)
    assert torch.equal(exact[0], rounded[0])
    assert torch.equal(exact[1], rounded[1])
    assert torch.equal(exact[2].to(ring_dtype), rounded[2])
    assert torch.equal(exact[3].to(ring_dtype), rounded[3])
    assert torch.equal(exact[4], rounded[4])
    assert not torch.equal(exact[2], rounded[2].float())


def test_decay_since_keeps_its_digits_after_a_forgetting_token() -> None:
    """Relative error to float64 within 2e-7 where a difference of prefix sums loses all but four digits."""
    g = torch.tensor([[[-0.5, -1000.0, -0.0013, -0.00071, -0.0042, 0.0]]])
    expected = torch.tensor([-1000.00621, -0.00621, -0.00491, -0.0042, 0.0, 0.0], dtype=torch.float64)
    ours = decode_torch.decay_since(g)[0, 0].double()
    prefix = g.cumsum(-1)
    difference = (prefix[..., -1:] - prefix)[0, 0].double()

    def error(value: torch.Tensor) -> float:
        return float(((value - expected).abs() / expected.abs().clamp(min=1e-3)).max())

    assert error(ours) < 2e-7
    assert error(difference) > 1e-3


def test_gates() -> None:
    """softplus is linear above 20, beta is not rounded to the activation dtype, the exact regime's gates are exact."""
    A_log, dt_bias = torch.zeros(1), torch.zeros(1)
    a = torch.tensor([[-200.0], [20.5], [1000.0], [0.0]])
    g = decode_torch.log_decay(a, A_log, dt_bias)
    assert g[:3, 0].tolist() == [0.0, -20.5, -1000.0]
    assert g[3, 0].item() == pytest.approx(-np.log(2), rel=1e-7)
    b = torch.tensor([[-200.0, 200.0, 0.3]])
    beta = decode_torch.write_strength(b.bfloat16())[0]
    assert beta[:2].tolist() == [0.0, 1.0]
    assert beta[2].item() == pytest.approx(1 / (1 + np.exp(-0.30078125)), rel=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_hot_of_64_normalises_to_one(dtype: torch.dtype) -> None:
    one_hot = (64 * torch.eye(16)).to(dtype)
    assert torch.equal(decode_torch.l2_normalised(one_hot.float()), torch.eye(16))


def test_no_rows() -> None:
    token = random_token(0, 1, 2, 4, 4, torch.Generator())
    none = torch.zeros(0, dtype=torch.int64)
    paged = [torch.ones(2, 2, 4, 4), torch.ones(2, 2, 3, 4), torch.ones(2, 1, 3, 4), torch.ones(2, 2, 3)]
    out = replay(*token, torch.zeros(2), torch.zeros(2), *paged, none, none, none.bool())
    assert out.shape == (0, 2, 4)
    assert all(bool((tensor == 1).all()) for tensor in paged)


def test_plan_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().seed = 1  # type: ignore[misc]
