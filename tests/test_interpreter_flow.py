"""Control flow: programs of one launch that take different branches, loop different numbers of times, leave early.

Each kernel runs with all programs at once and, on copies, in Triton's own interpreter one program after another; the
bytes must agree. Where the flow can be said in a line of torch it is compared with that, too.
"""

# kernels are written as kernels are, not as Python is
# ruff: noqa: SIM108, SIM113

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from replay_parity.harness.interpreter import KernelError, Unsupported, interpreted, run_stock


def ours(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    with interpreted(unsupported="raise") as session:
        kernel[grid](*args, **constants)
    assert session.unchecked == {}


def as_stock(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    ours(kernel, grid, *args, **constants)
    run_stock(kernel, grid, tuple(copies), constants)
    for mine, theirs in zip(args, copies, strict=True):
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)


@triton.jit  # type: ignore[untyped-decorator]
def branches_kernel(p_which: Any, p_out: Any, BLOCK: tl.constexpr) -> None:
    pid = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    which = tl.load(p_which + pid)
    x = o.to(tl.float32)
    y = 1.0
    if which == 0:
        x = x + 100
    elif which == 1:
        if pid % 2 == 0:
            x = x * 2
            y = 5.0
        else:
            x = x * 3
    else:
        y = tl.sum(x) + pid
    x += y
    tl.store(p_out + pid * BLOCK + o, x)


def test_branches_of_disagreeing_programs() -> None:
    which = torch.tensor([0, 1, 2, 1, 0, 1, 2, 2], dtype=torch.int32)
    out = torch.zeros(8, 4)
    as_stock(branches_kernel, (8,), which, out, BLOCK=4)
    o = torch.arange(4.0)
    assert torch.equal(out[0], o + 101)
    assert torch.equal(out[1], o * 3 + 1)
    assert torch.equal(out[2], o + 6 + 2)


@triton.jit  # type: ignore[untyped-decorator]
def early_kernel(p_length: Any, p_out: Any, BLOCK: tl.constexpr) -> None:
    pid = tl.program_id(0)
    length = tl.load(p_length + pid)
    if length <= 0:
        tl.store(p_out + pid, -1)
        return
    if length > 8:
        if length > 16:
            return
        length = 8
    tl.store(p_out + pid, tl.sum(tl.where(tl.arange(0, BLOCK) < length, 1, 0)))


def test_early_return() -> None:
    length = torch.tensor([0, 3, 20, 9, -5, 16, 8], dtype=torch.int32)
    out = torch.full((7,), 99, dtype=torch.int32)
    as_stock(early_kernel, (7,), length, out, BLOCK=16)
    assert out.tolist() == [-1, 3, 99, 8, -1, 8, 8]


def test_all_programs_may_return_early() -> None:
    length, out = torch.zeros(3, dtype=torch.int32), torch.full((3,), 99, dtype=torch.int32)
    as_stock(early_kernel, (3,), length, out, BLOCK=16)
    assert out.tolist() == [-1, -1, -1]


@triton.jit  # type: ignore[untyped-decorator]
def ranges_kernel(p_start: Any, p_stop: Any, p_out: Any, BLOCK: tl.constexpr, STEP: tl.constexpr) -> None:
    pid = tl.program_id(0)
    start = tl.load(p_start + pid)
    stop = tl.load(p_stop + pid)
    total = tl.zeros((BLOCK,), tl.int32)
    last = -1
    for i in range(start, stop, STEP):
        total += i + tl.arange(0, BLOCK)
        if i % 3 == 0:
            last = i
    for i in tl.range(0, 3):
        total += i
    for i in tl.static_range(BLOCK):
        total += i
    tl.store(p_out + pid * (BLOCK + 1) + tl.arange(0, BLOCK), total)
    tl.store(p_out + pid * (BLOCK + 1) + BLOCK, last)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_loops_of_different_length(step: int) -> None:
    start = torch.tensor([0, 5, 3, 7, 0], dtype=torch.int32)
    stop = torch.tensor([4, 5, 30, 2, 1], dtype=torch.int32)
    out = torch.zeros(5, 5, dtype=torch.int32)
    as_stock(ranges_kernel, (5,), start, stop, out, BLOCK=4, STEP=step)
    for row, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        seen = list(range(a, b, step))
        assert out[row, 0] == sum(seen) + 3 + 6
        assert out[row, 4] == max((i for i in seen if i % 3 == 0), default=-1)


@triton.jit  # type: ignore[untyped-decorator]
def backwards_kernel(p_out: Any, n: Any) -> None:
    pid = tl.program_id(0)
    place = 0
    for i in range(n, pid, -2):
        tl.store(p_out + pid * 8 + place, i)
        place += 1


def test_loops_run_backwards() -> None:
    out = torch.zeros(3, 8, dtype=torch.int32)
    ours(backwards_kernel, (3,), out, 7)
    assert out.tolist() == [[7, 5, 3, 1, 0, 0, 0, 0], [7, 5, 3, 0, 0, 0, 0, 0], [7, 5, 3, 0, 0, 0, 0, 0]]


@triton.jit  # type: ignore[untyped-decorator]
def collatz_kernel(p_n: Any, p_out: Any, limit: Any) -> None:
    pid = tl.program_id(0)
    n = tl.load(p_n + pid)
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
        if steps >= limit:
            n = 1
    tl.store(p_out + pid, steps)


def test_while_loops_of_different_length() -> None:
    n = torch.tensor([1, 2, 27, 6, 7, 97], dtype=torch.int32)
    out = torch.zeros(6, dtype=torch.int32)
    as_stock(collatz_kernel, (6,), n, out, 100)
    assert out.tolist() == [0, 1, 100, 8, 16, 100]


@triton.jit  # type: ignore[untyped-decorator]
def leave_kernel(p_stop: Any, p_out: Any) -> None:
    pid = tl.program_id(0)
    stop = tl.load(p_stop + pid)
    total = 0
    for i in range(0, 10):
        if i == stop:
            total += 1000
            break
        if (i + pid) % 2 == 0:
            continue
        total += i
    tl.store(p_out + pid, total)


def test_break_and_continue() -> None:
    stop = torch.tensor([0, 4, 20, 9], dtype=torch.int32)
    out = torch.zeros(4, dtype=torch.int32)
    as_stock(leave_kernel, (4,), stop, out)
    expected = []
    for pid, limit in enumerate(stop.tolist()):
        seen = sum(i for i in range(min(limit, 10)) if (i + pid) % 2)
        expected.append(seen + (1000 if limit < 10 else 0))
    assert out.tolist() == expected


@triton.jit  # type: ignore[untyped-decorator]
def pick(x: Any, limit: Any, DOUBLE: tl.constexpr = False) -> Any:
    if x > limit:
        return x, 1
    y = x * 2 if DOUBLE else x
    if y < 0:
        return y - 100, 2
    return y, 3


@triton.jit  # type: ignore[untyped-decorator]
def nested_kernel(p_x: Any, p_out: Any, p_way: Any, DOUBLE: tl.constexpr) -> None:
    pid = tl.program_id(0)
    x = tl.load(p_x + pid)
    value, way = pick(x, 5.0, DOUBLE=DOUBLE)
    tl.store(p_out + pid, value)
    tl.store(p_way + pid, way)


def test_device_functions_return_from_several_places() -> None:
    x = torch.tensor([6.0, 1.0, -3.0, 5.0, 9.0])
    out, way = torch.zeros(5), torch.zeros(5, dtype=torch.int32)
    ours(nested_kernel, (5,), x, out, way, DOUBLE=True)
    assert out.tolist() == [6.0, 2.0, -106.0, 10.0, 9.0]
    assert way.tolist() == [1, 3, 2, 3, 1]


@triton.jit  # type: ignore[untyped-decorator]
def pointers_kernel(p_a: Any, p_b: Any, p_out: Any) -> None:
    pid = tl.program_id(0)
    if pid % 2 == 0:
        p = p_a
    else:
        p = p_b + 1
    tl.store(p_out + pid, tl.load(p + pid))


def test_pointers_come_together_behind_a_branch() -> None:
    a, b, out = torch.arange(6.0), torch.arange(10.0, 17.0), torch.zeros(6)
    as_stock(pointers_kernel, (6,), a, b, out)
    assert out.tolist() == [0.0, 12.0, 2.0, 14.0, 4.0, 16.0]


@triton.jit  # type: ignore[untyped-decorator]
def half_set_kernel(p_out: Any) -> None:
    pid = tl.program_id(0)
    if pid == 0:
        x = 1.0
    tl.store(p_out + pid, x)


def test_a_name_that_one_branch_did_not_set() -> None:
    with pytest.raises(KernelError, match=r"test_interpreter_flow.py:\d+: x is not set in every branch"):
        ours(half_set_kernel, (2,), torch.zeros(2))


@triton.jit  # type: ignore[untyped-decorator]
def mixed_types_kernel(p_out: Any) -> None:
    pid = tl.program_id(0)
    x = 1.0
    if pid == 0:
        x = 2
    tl.store(p_out + pid, x)


def test_types_that_differ_behind_a_branch() -> None:
    with pytest.raises(KernelError, match="x has types fp32 and int32"):
        ours(mixed_types_kernel, (2,), torch.zeros(2))


@triton.jit  # type: ignore[untyped-decorator]
def wide_condition_kernel(p_out: Any) -> None:
    if tl.arange(0, 4) > 1:
        tl.store(p_out, 1.0)


def test_a_block_is_no_condition() -> None:
    with pytest.raises(KernelError, match="a condition is a block"):
        ours(wide_condition_kernel, (2,), torch.zeros(2))


@triton.jit  # type: ignore[untyped-decorator]
def static_kernel(p_out: Any, N: tl.constexpr, dtype: tl.constexpr) -> None:
    tl.static_assert(N > 1, "N must be larger")
    size: tl.constexpr = N * 2 if N < 8 else N
    values = tl.full((size,), 3, dtype)
    shape: tl.constexpr = values.shape[0]
    if dtype == tl.int32:
        values += 1
    for i in tl.static_range(0, N, 2):
        values += i
    tl.store(p_out + tl.arange(0, shape), values)


def test_constants_are_known_while_it_runs() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    ours(static_kernel, (1,), out, N=4, dtype=tl.int32)
    assert out.tolist() == [6] * 8
    with pytest.raises(KernelError, match="N must be larger"):
        ours(static_kernel, (1,), out, N=1, dtype=tl.int32)


FACTOR = tl.constexpr(3)


def closing_over(factor: Any) -> Any:
    @triton.jit  # type: ignore[untyped-decorator]
    def closure_kernel(p_out: Any) -> None:
        tl.store(p_out, 2 * FACTOR + factor)

    return closure_kernel


def test_outer_names() -> None:
    out = torch.zeros(1)
    ours(closing_over(tl.constexpr(5)), (1,), out)
    assert out.item() == 11.0


@triton.jit  # type: ignore[untyped-decorator]
def spin_kernel(p_lock: Any, p_out: Any) -> None:
    while tl.atomic_cas(p_lock, 0, 1) == 1:
        pass
    tl.store(p_out, tl.load(p_out) + 1)
    tl.atomic_xchg(p_lock, 0)


def test_waiting_for_another_program_is_refused() -> None:
    lock, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    with pytest.raises(Unsupported, match="waits for another program"):
        ours(spin_kernel, (4,), lock, out)
    with pytest.warns(UserWarning, match="waits for another program"), interpreted():
        spin_kernel[(4,)](lock, out)
    assert (lock.item(), out.item()) == (0, 4.0)


@triton.jit  # type: ignore[untyped-decorator]
def chosen_kernel(p_out: Any, limit: Any) -> None:
    pid = tl.program_id(0)
    tl.store(p_out + pid, (-7 if pid < limit else 9) % 4)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_number_chosen_at_run_time_is_divided_as_on_a_device(limit: int) -> None:
    out = torch.zeros(3, dtype=torch.int32)
    ours(chosen_kernel, (3,), out, limit)
    assert out.tolist() == [-3] * limit + [1] * (3 - limit)


exponential = tl.exp


@triton.jit  # type: ignore[untyped-decorator]
def alias_kernel(p_out: Any) -> None:
    pid = tl.program_id(0)
    tl.store(p_out + pid, exponential(pid.to(tl.float32)))


def test_a_builtin_imported_by_name() -> None:
    out = torch.zeros(3)
    as_stock(alias_kernel, (3,), out)
    torch.testing.assert_close(out, torch.arange(3.0).exp())
    assert exponential is tl.exp


@triton.jit  # type: ignore[untyped-decorator]
def shape_arithmetic_kernel(p_out: Any, SIZE: tl.constexpr) -> None:
    o = tl.arange(0, 4)
    tl.store(p_out + o, o + SIZE % o.shape[0] + (SIZE | o.shape[0]))


def test_constants_beside_sizes_of_shapes() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    as_stock(shape_arithmetic_kernel, (1,), out, SIZE=9)
    assert out.tolist() == [14, 15, 16, 17]
