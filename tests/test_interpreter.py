"""Values: one small kernel per kind of operation, run with all programs at once, against torch.

Each kernel also runs in Triton's own interpreter, one program after another, where that is right; results are then
compared bit by bit, which leaves no room for an order of summation or a rounding of ours. bfloat16, which Triton's
interpreter truncates and multiplies as integers, is compared with torch.
"""

# kernels are written as kernels are, not as Python is
# ruff: noqa: RUF059, SIM202

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from replay_parity.harness.interpreter import Unsupported, interpreted, run_stock


def ours(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    with interpreted(unsupported="raise") as session:
        kernel[grid](*args, **constants)
    assert session.unchecked == {}


def bitwise_as_stock(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run here and in Triton's interpreter on copies; every tensor must end with the same bytes."""
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    ours(kernel, grid, *args, **constants)
    run_stock(kernel, grid, tuple(copies), constants)
    for mine, theirs in zip(args, copies, strict=True):
        if isinstance(mine, torch.Tensor):
            same = torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
            assert same, (mine, theirs)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def sum_kernel(p_x: Any, p_y: Any, p_out: Any, n: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(p_out + o, tl.load(p_x + o, mask=m) + tl.load(p_y + o, mask=m, other=1.0), mask=m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("programs", [1, 5])
def test_masked_sum(dtype: torch.dtype, programs: int) -> None:
    n = programs * 32 - 5
    x, y = (draw(n, seed=s).mul(50).to(dtype) for s in (0, 1))
    out = torch.full((n + 8,), 7).to(dtype)
    bitwise_as_stock(sum_kernel, (programs,), x, y, out, n, BLOCK=32)
    assert torch.equal(out[:n], x + y)
    assert (out[n:] == 7).all()


@triton.jit  # type: ignore[untyped-decorator]
def arithmetic_kernel(p_x: Any, p_y: Any, p_out: Any, stride: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    y = tl.load(p_y + o)
    p = p_out + o
    tl.store(p, x * y - 2 * x)
    tl.store(p + stride, (x / y).to(x.dtype))
    tl.store(p + 2 * stride, -x + 0.5)
    tl.store(p + 3 * stride, tl.where(x > y, x, 3.0))
    tl.store(p + 4 * stride, tl.maximum(x, y))
    tl.store(p + 5 * stride, tl.minimum(x, 0.25))
    tl.store(p + 6 * stride, tl.abs(x))
    tl.store(p + 7 * stride, tl.clamp(x, -0.5, 0.5))
    tl.store(p + 8 * stride, 1.0 - x)
    tl.store(p + 9 * stride, ((x <= y) & (x != 0.0)).to(x.dtype))


def expected_arithmetic(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    quotient = (x.float() / y.float()).to(x.dtype)
    compared = ((x <= y) & (x != 0)).to(x.dtype)
    chosen = torch.where(x > y, x, torch.tensor(3.0, dtype=x.dtype))
    largest, least = torch.maximum(x, y), torch.minimum(x, torch.tensor(0.25, dtype=x.dtype))
    results = (
        x * y - 2 * x,
        quotient,
        -x + 0.5,
        chosen,
        largest,
        least,
        x.abs(),
        x.clamp(-0.5, 0.5),
        1.0 - x,
        compared,
    )
    return torch.stack(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_arithmetic(dtype: torch.dtype) -> None:
    x, y = draw(96, dtype=dtype), draw(96, dtype=dtype, seed=1)
    out = torch.zeros(10, 96, dtype=dtype)
    run = ours if dtype is torch.bfloat16 else bitwise_as_stock
    run(arithmetic_kernel, (3,), x, y, out, 96, BLOCK=32)
    assert torch.equal(out, expected_arithmetic(x, y))


@triton.jit  # type: ignore[untyped-decorator]
def functions_kernel(p_x: Any, p_out: Any, n: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    positive = tl.abs(x) + 0.1
    p = p_out + o
    tl.store(p, tl.exp(x))
    tl.store(p + n, tl.log(positive))
    tl.store(p + 2 * n, tl.sqrt(positive))
    tl.store(p + 3 * n, tl.rsqrt(positive))
    tl.store(p + 4 * n, tl.sigmoid(x))
    tl.store(p + 5 * n, x.exp2())
    tl.store(p + 6 * n, tl.sin(x) + tl.cos(x))
    tl.store(p + 7 * n, tl.floor(x) + tl.ceil(2 * x))
    tl.store(p + 8 * n, tl.erf(x))
    tl.store(p + 9 * n, tl.fma(x, positive, x))
    tl.store(p + 10 * n, tl.div_rn(x, positive) + tl.sqrt_rn(positive))
    tl.store(p + 11 * n, tl.math.log2(positive))


def test_functions() -> None:
    x = draw(64)
    out = torch.zeros(12, 64)
    bitwise_as_stock(functions_kernel, (4,), x, out, 64, BLOCK=16)
    y = x.abs() + 0.1
    expected = torch.stack(
        [
            x.exp(),
            y.log(),
            y.sqrt(),
            y.rsqrt(),
            x.sigmoid(),
            x.exp2(),
            x.sin() + x.cos(),
            x.floor() + (2 * x).ceil(),
            x.erf(),
            x * y + x,
            x / y + y.sqrt(),
            y.log2(),
        ]
    )
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def integers_kernel(p_x: Any, p_y: Any, p_out: Any, n: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    y = tl.load(p_y + o)
    p = p_out + o
    tl.store(p, x // y)
    tl.store(p + n, x % y)
    tl.store(p + 2 * n, tl.cdiv(x, y))
    tl.store(p + 3 * n, (x << 3) ^ (y >> 1))
    tl.store(p + 4 * n, (x & 12) | ~y)
    tl.store(p + 5 * n, -x * 1000003)
    tl.store(p + 6 * n, tl.abs(x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_divide_towards_zero(dtype: torch.dtype) -> None:
    x = torch.arange(-32, 32, dtype=dtype) * 7919
    y = (torch.arange(64, dtype=dtype) % 9) - 4
    y[y == 0] = 5
    out = torch.zeros(7, 64, dtype=dtype)
    bitwise_as_stock(integers_kernel, (2,), x, y, out, 64, BLOCK=32)
    assert torch.equal(out[0], torch.div(x, y, rounding_mode="trunc"))
    assert torch.equal(out[1], torch.fmod(x, y))
    assert torch.equal(out[3], (x << 3) ^ (y >> 1))
    assert torch.equal(out[5], -x * 1000003)


@triton.jit  # type: ignore[untyped-decorator]
def casts_kernel(p_x: Any, p_half: Any, p_brain: Any, p_int: Any, p_back: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    tl.store(p_half + o, x.to(tl.float16))
    tl.store(p_brain + o, x.to(tl.bfloat16))
    tl.store(p_int + o, (x * 100).to(tl.int32))
    tl.store(p_back + o, x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.bfloat16, bitcast=True).to(tl.float32))


def test_casts_round_to_nearest_even() -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, 65519.0, 65520.0])
    # half-way between two bfloat16 values, to both sides of an even and an odd one
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0x00008000], dtype=torch.int32)
    # a NaN whose payload is below the bits that stay
    quiet = torch.tensor([0x7F800001], dtype=torch.int32)
    x = torch.cat([special, ties.view(torch.float32), quiet.view(torch.float32), draw(1008)])
    x = torch.cat([x, torch.ones(1024 - len(x))]) if len(x) < 1024 else x[:1024]
    half, brain, whole = x.half(), x.bfloat16(), (x * 100).to(torch.int32)
    out = [torch.zeros_like(t) for t in (half, brain, whole, x)]
    ours(casts_kernel, (8,), x, *out, BLOCK=128)
    for mine, right in zip(out[:2], (half, brain), strict=True):
        number = ~torch.isnan(x)
        assert torch.equal(mine[number].view(torch.int16), right[number].view(torch.int16))
        assert torch.isnan(mine[~number]).all()
    inside = x.abs() < 1e7
    assert torch.equal(out[2][inside], whole[inside])
    assert torch.equal(out[3].nan_to_num(), brain.float().nan_to_num())


@triton.jit  # type: ignore[untyped-decorator]
def towards_zero_kernel(p_x: Any, p_half: Any, p_brain: Any, BLOCK: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    x = tl.load(p_x + o)
    tl.store(p_half + o, x.to(tl.float16, fp_downcast_rounding="rtz"))
    tl.store(p_brain + o, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_casts_round_towards_zero_on_request() -> None:
    x = draw(256)
    half, brain = torch.zeros(256, dtype=torch.float16), torch.zeros(256, dtype=torch.bfloat16)
    ours(towards_zero_kernel, (1,), x, half, brain, BLOCK=256)
    for rounded, nearest in ((half, x.half()), (brain, x.bfloat16())):
        assert (rounded.float().abs() <= x.abs()).all()
        exact = nearest.float().abs() <= x.abs()
        assert torch.equal(rounded[exact], nearest[exact])
        assert (rounded[~exact].view(torch.int16) + 1 == nearest[~exact].view(torch.int16)).all()


@triton.jit  # type: ignore[untyped-decorator]
def dot_kernel(p_a: Any, p_b: Any, p_out: Any, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr) -> None:
    pid = tl.program_id(0)
    o_m = tl.arange(0, M)
    o_n = tl.arange(0, N)
    o_k = tl.arange(0, K)
    a = tl.load(p_a + pid * M * K + o_m[:, None] * K + o_k[None, :])
    b = tl.load(p_b + o_k[:, None] * N + o_n[None, :])
    acc = tl.zeros((M, N), dtype=tl.float32)
    acc += tl.dot(a, b)
    acc = tl.dot(a, b, acc)
    tl.store(p_out + pid * M * N + o_m[:, None] * N + o_n[None, :], acc)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot(dtype: torch.dtype) -> None:
    a, b = draw(3, 16, 32, dtype=dtype), draw(32, 8, dtype=dtype, seed=1)
    out = torch.zeros(3, 16, 8)
    run = ours if dtype is torch.bfloat16 else bitwise_as_stock
    run(dot_kernel, (3,), a, b, out, M=16, N=8, K=32)
    # products are exact in float64; float32 sums of 64 terms of size about 1 are off by less than 64 * 2^-24 * 6
    expected = 2 * (a.double() @ b.double())
    assert (out - expected).abs().max() < 64 * 2**-24 * 6


def test_dot_of_bfloat16_is_what_the_stock_interpreter_gets_wrong() -> None:
    a, b = draw(1, 16, 16, dtype=torch.bfloat16), draw(16, 16, dtype=torch.bfloat16, seed=1)
    mine, stock = torch.zeros(1, 16, 16), torch.zeros(1, 16, 16)
    ours(dot_kernel, (1,), a, b, mine, M=16, N=16, K=16)
    run_stock(dot_kernel, (1,), (a, b, stock), {"M": 16, "N": 16, "K": 16})
    expected = 2 * (a.float() @ b.float())
    assert (mine - expected).abs().max() < 1e-4 < (stock - expected).abs().max()


@triton.jit  # type: ignore[untyped-decorator]
def reductions_kernel(p_x: Any, p_rows: Any, p_all: Any, p_index: Any, M: tl.constexpr, N: tl.constexpr) -> None:
    pid = tl.program_id(0)
    o_m = tl.arange(0, M)
    o_n = tl.arange(0, N)
    x = tl.load(p_x + pid * M * N + o_m[:, None] * N + o_n[None, :])
    p = p_rows + pid * 5 * M + o_m
    tl.store(p, tl.sum(x, axis=1))
    tl.store(p + M, tl.max(x, axis=1))
    tl.store(p + 2 * M, x.min(1))
    tl.store(p + 3 * M, tl.sum(tl.softmax(x, 1), 1))
    centred = x - tl.sum(x, axis=1, keep_dims=True) / N
    tl.store(p + 4 * M, tl.max(centred, 1))
    tl.store(p_all + pid * 2, tl.sum(x))
    tl.store(p_all + pid * 2 + 1, tl.max(tl.max(x, 0), 0))
    value, index = tl.max(x, 1, return_indices=True)
    tl.store(p_index + pid * 3 * M + o_m, index)
    tl.store(p_index + pid * 3 * M + M + o_m, tl.argmin(x, axis=1))
    tl.store(p_index + pid * 3 * M + 2 * M + o_m, tl.xor_sum(x.to(tl.int32), axis=1))


def test_reductions() -> None:
    x = draw(2, 8, 16).mul(8)
    rows, both, index = torch.zeros(2, 5, 8), torch.zeros(2, 2), torch.zeros(2, 3, 8, dtype=torch.int32)
    bitwise_as_stock(reductions_kernel, (2,), x, rows, both, index, M=8, N=16)
    assert torch.equal(rows[:, 1], x.amax(2))
    assert torch.equal(rows[:, 2], x.amin(2))
    torch.testing.assert_close(rows[:, 0], x.sum(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows[:, 3], torch.ones(2, 8))
    torch.testing.assert_close(both[:, 0], x.sum((1, 2)), rtol=1e-4, atol=1e-4)
    assert torch.equal(both[:, 1], x.amax((1, 2)))
    assert torch.equal(index[:, 0].long(), x.argmax(2))
    assert torch.equal(index[:, 1].long(), x.argmin(2))


@triton.jit  # type: ignore[untyped-decorator]
def compose(a1: Any, b1: Any, a2: Any, b2: Any) -> Any:
    return a1 * a2, b1 * a2 + b2


@triton.jit  # type: ignore[untyped-decorator]
def scans_kernel(p_a: Any, p_x: Any, p_out: Any, n: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(p_a + o)
    x = tl.load(p_x + o)
    tl.store(p_out + o, tl.cumsum(x, 0))
    tl.store(p_out + n + o, tl.cumprod(a, 0))
    tl.store(p_out + 2 * n + o, tl.cumsum(x, 0, reverse=True))
    product, state = tl.associative_scan((a, x), 0, compose)
    tl.store(p_out + 3 * n + o, state)


def test_scans() -> None:
    a, x = draw(4, 16).sigmoid(), draw(4, 16, seed=1)
    out = torch.zeros(4, 4, 16)
    bitwise_as_stock(scans_kernel, (4,), a, x, out, 64, BLOCK=16)
    torch.testing.assert_close(out[0], x.cumsum(1))
    torch.testing.assert_close(out[1], a.cumprod(1))
    torch.testing.assert_close(out[2], x.flip(1).cumsum(1).flip(1))
    state = torch.zeros(4)
    for t in range(16):
        state = state * a[:, t] + x[:, t]
        torch.testing.assert_close(out[3][:, t], state)


@triton.jit  # type: ignore[untyped-decorator]
def shapes_kernel(p_x: Any, p_out: Any, M: tl.constexpr, N: tl.constexpr) -> None:
    pid = tl.program_id(0)
    o_m = tl.arange(0, M)
    o_n = tl.arange(0, N)
    o = o_m[:, None] * N + o_n[None, :]
    x = tl.load(p_x + pid * M * N + o)
    flat = tl.arange(0, M * N)
    p = p_out + pid * 7 * M * N
    tl.store(p + o_n[:, None] * M + o_m[None, :], tl.trans(x))
    tl.store(p + M * N + flat, tl.reshape(x, (M * N,)))
    tl.store(p + 2 * M * N + o, tl.broadcast_to(tl.expand_dims(tl.sum(x, 1), 1), (M, N)))
    a, b = tl.split(tl.reshape(x, (M, N // 2, 2)))
    tl.store(p + 3 * M * N + flat, tl.ravel(tl.join(b, a)))
    tl.store(p + 4 * M * N + o_n[:, None] * M + o_m[None, :], x.T)
    tl.store(p + 5 * M * N + o, tl.flip(x, 1))
    index = tl.broadcast_to((o_n[None, :] + 1) % N, (M, N))
    tl.store(p + 6 * M * N + o, tl.gather(x, index, 1))


def test_shapes() -> None:
    x = draw(3, 4, 8)
    out = torch.zeros(3, 7, 32)
    bitwise_as_stock(shapes_kernel, (3,), x, out, M=4, N=8)
    assert torch.equal(out[:, 0].view(3, 8, 4), x.transpose(1, 2))
    assert torch.equal(out[:, 1].view(3, 4, 8), x)
    torch.testing.assert_close(out[:, 2].view(3, 4, 8), x.sum(2, keepdim=True).expand(3, 4, 8))
    assert torch.equal(out[:, 3].view(3, 4, 4, 2), x.view(3, 4, 4, 2).flip(3))
    assert torch.equal(out[:, 4].view(3, 8, 4), x.transpose(1, 2))
    assert torch.equal(out[:, 5].view(3, 4, 8), x.flip(2))
    assert torch.equal(out[:, 6].view(3, 4, 8), x.roll(-1, 2))


@triton.jit  # type: ignore[untyped-decorator]
def sort_kernel(p_x: Any, p_out: Any, p_bins: Any, N: tl.constexpr) -> None:
    pid = tl.program_id(0)
    x = tl.load(p_x + pid * N + tl.arange(0, N))
    tl.store(p_out + pid * N + tl.arange(0, N), tl.sort(x))
    tl.store(p_bins + pid * 8 + tl.arange(0, 8), tl.histogram(x, 8))


def test_sort_and_histogram() -> None:
    x = torch.randint(0, 8, (3, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    out, bins = torch.zeros_like(x), torch.zeros(3, 8, dtype=torch.int32)
    ours(sort_kernel, (3,), x, out, bins, N=32)
    assert torch.equal(out, x.sort(1).values)
    assert torch.equal(bins, torch.stack([row.bincount(minlength=8) for row in x]).int())


@triton.jit  # type: ignore[untyped-decorator]
def atomics_kernel(p_sum: Any, p_ints: Any, p_seen: Any, p_half: Any, BLOCK: tl.constexpr) -> None:
    pid = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    tl.atomic_add(p_sum, 1.0)
    tl.atomic_add(p_sum + 1 + o, pid.to(tl.float32), mask=o < 3)
    ticket = tl.atomic_add(p_ints, 1)
    tl.store(p_seen + pid, ticket)
    tl.atomic_max(p_ints + 1, pid)
    tl.atomic_min(p_ints + 2, -pid)
    tl.atomic_or(p_ints + 3, 1 << pid)
    tl.atomic_cas(p_ints + 4, pid, pid + 1)
    tl.atomic_xchg(p_ints + 5, pid)
    tl.atomic_add(p_half, 0.5)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_atomics_are_done_once_for_each_program(half: torch.dtype) -> None:
    total, ints = torch.zeros(5), torch.zeros(6, dtype=torch.int32)
    seen, halves = torch.zeros(6, dtype=torch.int32), torch.zeros(1, dtype=half)
    run = ours if half is torch.bfloat16 else bitwise_as_stock
    run(atomics_kernel, (6,), total, ints, seen, halves, BLOCK=4)
    assert total.tolist() == [6.0, 15.0, 15.0, 15.0, 0.0]
    assert ints.tolist() == [6, 5, -5, 63, 6, 5]
    assert seen.tolist() == [0, 1, 2, 3, 4, 5]
    assert halves.item() == 3.0


@triton.jit  # type: ignore[untyped-decorator]
def random_kernel(p_out: Any, seed: Any, BLOCK: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.rand(seed, o))


def test_random_numbers() -> None:
    out = torch.zeros(64)
    bitwise_as_stock(random_kernel, (2,), out, 12345, BLOCK=32)
    assert ((out >= 0) & (out < 1)).all()
    assert len(set(out.tolist())) == 64


@triton.jit  # type: ignore[untyped-decorator]
def mask_kernel(p_x: Any, p_out: Any, n: Any, BLOCK: tl.constexpr, ON: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = (o < n) & ON
    x = tl.load(p_x + o, mask=m, other=-1.0)
    tl.store(p_out + o, x, mask=(o < n) & True)


def test_mask_with_a_python_bool() -> None:
    x, out = draw(60), torch.zeros(60)
    ours(mask_kernel, (2,), x, out, 60, BLOCK=32, ON=True)
    assert torch.equal(out, x)
    ours(mask_kernel, (2,), x, out, 60, BLOCK=32, ON=False)
    assert (out == -1).all()


@triton.jit  # type: ignore[untyped-decorator]
def scalar_kernel(p_out: Any, whole: Any, real: Any, flag: Any, nothing: Any, big: Any) -> None:
    if nothing is None:
        tl.store(p_out, whole * 2)
    if flag:
        tl.store(p_out + 1, real + 0.5)
    tl.store(p_out + 2, (big >> 32).to(tl.float32))
    tl.store(p_out + 3, tl.num_programs(0) + 10 * tl.num_programs(1) + 100 * tl.num_programs(2))
    last = (tl.program_id(0) == 1) and (tl.program_id(1) == 2 and not (tl.program_id(2) != 3))
    if last or whole < 0:
        tl.store(p_out + 4, -1.0)


def test_scalars_and_grid() -> None:
    out = torch.zeros(5)
    bitwise_as_stock(scalar_kernel, (2, 3, 4), out, 21, 1.25, True, None, 5 << 32)
    assert out.tolist() == [42.0, 1.75, 5.0, 432.0, -1.0]


@triton.jit  # type: ignore[untyped-decorator]
def negate_kernel(p_x: Any, stride_m: Any, stride_n: Any, M: tl.constexpr, N: tl.constexpr) -> None:
    o_n = tl.arange(0, N)
    p = p_x + tl.program_id(0) * stride_m + o_n * stride_n
    tl.store(p, -tl.load(p))


def test_strided_views_are_written_in_place() -> None:
    whole = torch.arange(2 * 12 * 10, dtype=torch.float32).view(2, 12, 10)
    before = whole.clone()
    view = whole[1, 2::3, 1:9].transpose(0, 1)
    address = view.data_ptr()
    ours(negate_kernel, (8,), view, *view.stride(), M=8, N=4)
    assert view.data_ptr() == address
    expected = before.clone()
    expected[1, 2::3, 1:9] *= -1
    assert torch.equal(whole, expected)


def test_unaligned_views() -> None:
    raw = torch.zeros(4 * 9, dtype=torch.uint8)
    # one byte into the storage: not a multiple of four
    floats = torch.frombuffer(raw.numpy(), dtype=torch.float32, count=8, offset=1)
    floats.copy_(torch.arange(8.0))
    ours(negate_kernel, (1,), floats, 8, 1, M=1, N=8)
    assert torch.equal(floats, -torch.arange(8.0))


def test_many_programs_in_groups() -> None:
    n = 3000 * 4 - 1
    x, y = draw(n), draw(n, seed=1)
    results = []
    for most in (1 << 20, 7, 1):
        out = torch.zeros(n)
        with interpreted(max_programs=most) as session:
            sum_kernel[(3000 if most > 1 else 30,)](x, y, out, n, BLOCK=4)
        results.append(out)
        assert session.fallbacks == {}
    assert torch.equal(results[0], x + y)
    assert torch.equal(results[1], x + y)
    assert torch.equal(results[2][:120], (x + y)[:120])


def test_groups_shrink_when_blocks_are_large() -> None:
    from replay_parity.harness.interpreter import launch

    sizes = []
    builder = type("Seen", (), {"peak": 0})()
    for group in launch._groups((100, 10, 10), builder, 1 << 20):
        sizes.append(len(group))
        # a megabyte for each program
        builder.peak = len(group) * 2**20
    assert sizes[0] == 512
    assert set(sizes[1:-1]) == {256}
    assert sum(sizes) == 10_000


def test_an_empty_grid_does_nothing() -> None:
    out = torch.zeros(4)
    ours(sum_kernel, (0,), out, out, out, 4, BLOCK=4)
    assert (out == 0).all()


def test_every_run_gives_the_same_bytes() -> None:
    a, b = draw(3, 16, 32), draw(32, 8, seed=1)
    outs = [torch.zeros(3, 16, 8) for _ in range(3)]
    for out in outs:
        ours(dot_kernel, (3,), a, b, out, M=16, N=8, K=32)
    assert len({out.numpy().tobytes() for out in outs}) == 1


def test_float8_is_refused() -> None:
    x = torch.zeros(8).to(torch.float8_e5m2)
    with pytest.raises(Unsupported, match="fp8e5"):
        ours(negate_kernel, (1,), x, 8, 1, M=1, N=8)


def test_numpy_warnings_stay_inside() -> None:
    x = torch.tensor([0.0, float("inf"), float("nan"), 1.0])
    y = torch.zeros(4)
    out = torch.zeros(10, 4)
    with np.errstate(all="raise"):
        ours(arithmetic_kernel, (1,), x, y, out, 4, BLOCK=4)
    assert torch.isnan(out[1, 0])


@triton.jit  # type: ignore[untyped-decorator]
def odds_kernel(p_out: Any, p_bits: Any, pair: Any, small: Any, BLOCK: tl.constexpr) -> None:
    pid = tl.program_id(0)
    o = tl.max_contiguous(tl.multiple_of(pid * BLOCK, BLOCK) + tl.arange(0, BLOCK), BLOCK)
    tl.assume(BLOCK > 0)
    tl.assume(pid >= 0)
    tl.debug_barrier()
    tl.static_print("block", BLOCK)
    tl.device_print("program", pid)
    first, second = pair
    sizes = [BLOCK * i for i in range(2)]
    x = tl.full((BLOCK,), first, tl.float32) * second + len(sizes) + max(small, pid) + min(1, 2)
    (p_out + o).store(x, cache_modifier=".cs")
    bits = x.to(tl.int32, bitcast=True)
    tl.store(p_bits + o, tl.cat(bits, bits).sum().to(tl.int64) + tl.umulhi(bits, bits).to(tl.int64))


def test_odds_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    out, raw = torch.zeros(8), torch.zeros(8, dtype=torch.float64)
    ours(odds_kernel, (2,), out, triton.reinterpret(raw, tl.int64), (2.0, 3), np.int32(0), BLOCK=4)
    assert out.tolist() == [9.0] * 4 + [10.0] * 4
    bits = out.view(torch.int32).long()
    sums = (2 * bits.view(2, 4).sum(1, keepdim=True).expand(2, 4).reshape(8)).to(torch.int32).long()
    assert torch.equal(raw.view(torch.int64), sums + (bits * bits >> 32))
    printed = capsys.readouterr().out
    assert "block 4" in printed
    assert "(1, 0, 0) program: 1" in printed.replace("  ", " ")


def test_the_same_where_triton_was_imported_to_interpret() -> None:
    chosen = "reductions or scans or shapes or sort or random or masked_sum"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
