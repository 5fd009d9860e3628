"""What the interpreter watches: accesses outside a tensor, poison, bytes moved; and what it leaves behind.

Every check is shown a kernel that it must report, such as one with a mask that lets one lane too many through, and
one that it must not. Traffic is counted by hand. Fallback, failing kernels and patches are looked at afterwards.
"""

# kernels are written as kernels are, not as Python is
# ruff: noqa: B007, SIM108

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from replay_parity.harness.interpreter import (
    BadAccess,
    FallbackWarning,
    KernelError,
    Unsupported,
    interpreted,
    run_stock,
)
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(p_x: Any, p_out: Any, n: Any, BLOCK: tl.constexpr, LOAD_EXTRA: tl.constexpr, STORE_EXTRA: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + o, mask=o < n + LOAD_EXTRA, other=0.0)  # the load
    tl.store(p_out + o, x, mask=o < n + STORE_EXTRA)  # the store


def line_of(kernel: Any, comment: str) -> int:
    lines = kernel.fn.__code__.co_firstlineno
    source = Path(kernel.fn.__code__.co_filename).read_text(encoding="utf-8").splitlines()
    return next(i + 1 for i in range(lines, len(source)) if source[i].endswith(f"# {comment}"))


def guarded(n: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((n,), value)


def test_right_masks_are_not_reported() -> None:
    x, out = guarded(10, 1.0), guarded(10)
    with interpreted(bounds="collect", poison="collect") as session:
        copy_kernel[(3,)](x, out, 10, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0)
    assert session.findings == []
    assert (out == 1).all()


def test_a_wrong_mask_is_reported_with_line_program_and_lane() -> None:
    x, out = guarded(10, 1.0), guarded(10)
    with interpreted(bounds="collect") as session:
        copy_kernel[(3,)](x, out, 10, BLOCK=4, LOAD_EXTRA=1, STORE_EXTRA=2)
    load, store = session.findings
    assert (load.kind, load.line, load.program, load.lane) == (
        "out_of_bounds_load",
        line_of(copy_kernel, "the load"),
        (2, 0, 0),
        (2,),
    )
    assert (load.region, load.offset, load.count) == ("p_x", 40, 1)
    assert (store.kind, store.line, store.lane, store.region, store.count) == (
        "out_of_bounds_store",
        line_of(copy_kernel, "the store"),
        (2,),
        "p_out",
        2,
    )
    assert load.file == __file__
    assert str(store).startswith(f"{__file__}:{store.line} in copy_kernel, program (2, 0, 0), lane (2,): store outside")
    # what was inside was done
    assert (out == 1).all()


def test_a_wrong_mask_raises_before_anything_outside_is_touched() -> None:
    whole = guarded(12, 7.0)
    x, out = guarded(10, 1.0), whole[:10].clone()
    with pytest.raises(BadAccess, match="store outside p_out at byte 40") as caught, interpreted():
        copy_kernel[(3,)](x, out, 10, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=1)
    assert caught.value.access.program == (2, 0, 0)
    # stores of the launch before the bad one are taken back
    assert (out == 7).all()


@triton.jit  # type: ignore[untyped-decorator]
def before_kernel(p_x: Any, p_out: Any, slots: Any) -> None:
    pid = tl.program_id(0)
    slot = tl.load(slots + pid)
    tl.store(p_out + slot * 4 + tl.arange(0, 4), tl.load(p_x + slot * 4 + tl.arange(0, 4)))


def test_a_negative_slot_is_reported_and_the_process_lives() -> None:
    x, out = torch.ones(3, 4), torch.zeros(3, 4)
    slots = torch.tensor([1, -1, 2], dtype=torch.int32)
    with interpreted(bounds="collect") as session:
        before_kernel[(3,)](x, out, slots)
    assert [(f.kind, f.program, f.lane, f.offset) for f in session.findings] == [
        ("out_of_bounds_load", (1, 0, 0), (0,), -16),
        ("out_of_bounds_store", (1, 0, 0), (0,), -16),
    ]
    assert out.tolist() == [[0.0] * 4, [1.0] * 4, [1.0] * 4]


def test_memory_of_a_neighbour_is_outside() -> None:
    # two tensors, one after the other in one block of memory, each with a storage of its own
    raw = torch.zeros(32, dtype=torch.uint8).numpy()
    x = torch.frombuffer(raw, dtype=torch.float32, count=4)
    y = torch.frombuffer(raw, dtype=torch.float32, count=4, offset=16)
    assert y.data_ptr() == x.data_ptr() + 16
    with pytest.raises(BadAccess, match="load outside p_x at byte 16"), interpreted():
        copy_kernel[(1,)](x, y, 4, BLOCK=8, LOAD_EXTRA=1, STORE_EXTRA=0)


def test_a_storage_is_the_bound_unless_regions_narrow_it() -> None:
    pages = torch.zeros(4, 8)
    slot = pages[1:3, :4]
    x = torch.ones(2, 8)

    def run(**options: Any) -> Any:
        with interpreted(bounds="collect", **options) as session:
            copy_kernel[(4,)](x, slot, 16, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0)
        return session.findings

    assert run() == []
    narrowed = run(regions=[slot])
    # elements 4 to 7 of each row belong to nobody
    assert [(f.kind, f.program, f.count) for f in narrowed] == [("out_of_bounds_store", (1, 0, 0), 8)]
    assert run(regions=[slot, pages[1:3, 4:]]) == []


@triton.jit  # type: ignore[untyped-decorator]
def uses_kernel(p_x: Any, p_out: Any, used: Any, BLOCK: tl.constexpr, MASKED: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(p_x + o, mask=o < used, other=0.0)
    else:
        x = tl.load(p_x + o)
    tl.store(p_out, tl.sum(tl.where(o < used, x, 0.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_poison_is_reported_on_used_lanes_only(dtype: torch.dtype) -> None:
    x = torch.ones(8, dtype=dtype)
    x[5:] = float("nan")
    out = torch.zeros(1, dtype=dtype)
    with interpreted(poison="raise"):
        uses_kernel[(1,)](x, out, 5, BLOCK=8, MASKED=True)
    assert out.item() == 5
    with interpreted(poison="collect") as session:
        uses_kernel[(1,)](x, out, 5, BLOCK=8, MASKED=False)
    (finding,) = session.findings
    assert (finding.kind, finding.lane, finding.region, finding.count) == ("poison", (5,), "p_x", 3)
    assert finding.offset == 5 * x.element_size()
    with pytest.raises(BadAccess, match="NaN loaded from p_x"), interpreted(poison="raise"):
        uses_kernel[(1,)](x, out, 6, BLOCK=8, MASKED=True)


@triton.jit  # type: ignore[untyped-decorator]
def traffic_kernel(p_x: Any, p_scale: Any, p_out: Any, n: Any, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    head = tl.program_id(1)
    if row == 2:
        return
    scale = tl.load(p_scale)  # scale
    o = tl.arange(0, BLOCK)
    for i in range(row):
        x = tl.load(p_x + o, mask=o < n + head)  # x
        tl.store(p_out + (row * 2 + head) * BLOCK + o, x * scale)  # out


def test_traffic_is_counted_by_line_and_program() -> None:
    x, scale, out = torch.ones(8, dtype=torch.float16), torch.ones(1), torch.zeros(4, 2, 8)
    with interpreted() as session:
        traffic_kernel[(4, 2)](x, scale, out, 5, BLOCK=8)
        traffic_kernel[(1, 1)](x, scale, out, 5, BLOCK=8)
    first, second = session.traffic.of("traffic_kernel")
    by_line = {(line.line, line.direction): line.bytes[:, :, 0].tolist() for line in first.lines}
    assert by_line == {
        # four bytes each, though it is read once for all of them
        (line_of(traffic_kernel, "scale"), "load"): [[4, 4], [4, 4], [0, 0], [4, 4]],
        # five or six halves a round
        (line_of(traffic_kernel, "x"), "load"): [[0, 0], [10, 12], [0, 0], [30, 36]],
        (line_of(traffic_kernel, "out"), "store"): [[0, 0], [32, 32], [0, 0], [96, 96]],
    }
    rows = first.bytes("load").sum(axis=(1, 2))
    assert rows.tolist() == [8, 30, 0, 74]
    assert second.bytes("load").sum() == 4
    assert second.bytes("store").sum() == 0
    assert session.traffic.total("load") == 116
    assert session.traffic.total("store") == 256


def test_traffic_can_be_left_out() -> None:
    with interpreted(traffic="off") as session:
        copy_kernel[(1,)](guarded(4), guarded(4), 4, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0)
    assert session.traffic.launches == []


@triton.jit  # type: ignore[untyped-decorator]
def table_kernel(p_table: Any, p_out: Any, EXTRA: tl.constexpr) -> None:
    pid = tl.program_id(0)
    p = tl.load(p_table + pid).to(tl.pointer_type(tl.int32))
    o = tl.arange(0, 4)
    tl.store(p_out + pid * 4 + o, tl.load(p + o + EXTRA))


def test_tables_of_pointers() -> None:
    targets = [torch.arange(4, dtype=torch.int32) + 10 * i for i in range(3)]
    table = torch.tensor([t.data_ptr() for t in targets], dtype=torch.int64)
    out = torch.zeros(3, 4, dtype=torch.int32)
    with interpreted() as session:
        table_kernel[(3,)](table, out, EXTRA=0)
    assert torch.equal(out, torch.stack(targets))
    # nothing is known of where they lead, and that is said
    assert [line for _, line in session.unchecked] == [table_kernel.fn.__code__.co_firstlineno + 5]
    with interpreted(bounds="collect") as session:
        for i, target in enumerate(targets):
            session.register(f"table {i}", target)
        table_kernel[(3,)](table, out, EXTRA=0)
        assert (session.findings, session.unchecked) == ([], {})
        table_kernel[(3,)](table, out, EXTRA=1)
    (finding,) = session.findings
    assert (finding.region, finding.program, finding.lane, finding.offset, finding.count) == (
        "table 0",
        (0, 0, 0),
        (3,),
        16,
        3,
    )


@triton.jit  # type: ignore[untyped-decorator]
def assembly_kernel(p_x: Any, BLOCK: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    tl.store(p_x + o, tl.load(p_x + o) + 1)
    tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [o], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def descriptor_kernel(p_x: Any, BLOCK: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    tl.store(p_x + o, tl.load(p_x + o) + 1)
    descriptor = tl.make_tensor_descriptor(p_x, shape=[8, 8], strides=[8, 1], block_shape=[8, 8])
    descriptor.store([0, 0], descriptor.load([0, 0]) * 2)


def test_what_is_not_supported_runs_in_the_stock_interpreter_and_says_so_once() -> None:
    x = torch.zeros(64)
    with (
        pytest.warns(FallbackWarning, match="kernel runs in Triton's own interpreter") as said,
        interpreted() as session,
    ):
        for _ in range(3):
            descriptor_kernel[(1,)](x, BLOCK=64)
    assert len(said) == 1
    assert "make_tensor_descriptor" in str(said[0].message)
    assert said[0].filename == __file__
    assert list(session.fallbacks) == [f"{__name__}.descriptor_kernel"]
    # the store in front of it is done once, not twice: ((0 + 1) * 2 + 1) * 2 ...
    assert (x == 14).all()
    assert session.traffic.launches == []


def test_fallback_can_be_refused() -> None:
    x = torch.zeros(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Unsupported, match="make_tensor_descriptor"), interpreted(unsupported="raise"):
            descriptor_kernel[(1,)](x, BLOCK=64)
        with pytest.raises(Unsupported, match="inline_asm"), interpreted(unsupported="raise"):
            assembly_kernel[(1,)](x, BLOCK=64)
    assert (x == 0).all()


@triton.jit  # type: ignore[untyped-decorator]
def failing_kernel(p_x: Any, BLOCK: tl.constexpr) -> None:
    o = tl.arange(0, BLOCK)
    tl.store(p_x + o, 5.0)
    tl.atomic_add(p_x + o, 1.0)
    tl.store(p_x + o, tl.load(p_x + o) + tl.arange(0, 2))  # does not fit


def language() -> list[tuple[Any, ...]]:
    places = (tl, tl.core, tl.math, tl.tensor, tl.core.dtype, tl.core.block_type, tl.core.pointer_type)
    return [tuple(vars(place).items()) for place in (*places, JITFunction, InterpretedFunction)]


def test_everything_is_put_back_after_a_failure() -> None:
    before = language()
    x = torch.arange(8.0)
    with pytest.raises(KernelError) as caught, interpreted():
        failing_kernel[(2,)](x, BLOCK=8)
    line = line_of(failing_kernel, "does not fit")
    assert str(caught.value).startswith(f"{__file__}:{line}: ")
    # memory, too
    assert torch.equal(x, torch.arange(8.0))
    after = language()
    assert all(
        a is b
        for one, two in zip(before, after, strict=True)
        for p, q in zip(one, two, strict=True)
        for a, b in zip(p, q, strict=True)
    )


def test_everything_is_put_back_behind_the_stock_interpreter() -> None:
    before = language()
    run_stock(copy_kernel, (1,), (guarded(4), guarded(4), 4), {"BLOCK": 4, "LOAD_EXTRA": 0, "STORE_EXTRA": 0})
    assert [dict(one) for one in language()] == [dict(one) for one in before]


def test_it_works_where_the_stock_interpreter_left_its_functions() -> None:
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(copy_kernel.fn)
    try:
        x, out = guarded(10, 1.0), guarded(10)
        with interpreted(unsupported="raise") as session:
            copy_kernel[(3,)](x, out, 10, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0)
            uses_kernel[(1,)](x, out, 5, BLOCK=8, MASKED=True)
        assert out.tolist() == [5.0] + [1.0] * 9
        assert len(session.traffic.launches) == 2
    finally:
        scope.restore()


def test_functions_made_for_the_stock_interpreter_run_here() -> None:
    x, out = guarded(10, 1.0), guarded(10)
    with interpreted(unsupported="raise") as session:
        InterpretedFunction(copy_kernel.fn)[(3,)](x, out, 10, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0)
    assert (out == 1).all()
    assert len(session.traffic.launches) == 1


@triton.autotune(configs=[triton.Config({"BLOCK": 4}), triton.Config({"BLOCK": 8})], key=["n"])  # type: ignore[untyped-decorator]
@triton.heuristics({"EXTRA": lambda args: args["BLOCK"] - 4})  # type: ignore[untyped-decorator]
@triton.jit  # type: ignore[untyped-decorator]
def tuned_kernel(p_x: Any, n: Any, BLOCK: tl.constexpr, EXTRA: tl.constexpr) -> None:
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_x + o, BLOCK + EXTRA, mask=o < n)


def test_autotuned_kernels_take_their_first_configuration() -> None:
    x = torch.zeros(10)
    with interpreted(unsupported="raise"):
        tuned_kernel[lambda args: (triton.cdiv(10, args["BLOCK"]),)](x, 10)
    assert (x == 4).all()


def test_launch_options_and_hooks() -> None:
    calls: list[int] = []
    x, out = guarded(10, 1.0), guarded(10)
    copy_kernel.add_pre_run_hook(lambda *args, **kwargs: calls.append(len(args)))
    try:
        with interpreted():
            copy_kernel[(3,)](x, out, 10, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0, num_warps=4, num_stages=2)
            copy_kernel.warmup(x, out, 10, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0, grid=(3,))
    finally:
        copy_kernel.pre_run_hooks.clear()
    assert calls == [3]
    assert (out == 1).all()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="bounds is 'maybe': one of off, collect, raise"), interpreted(bounds="maybe"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="max_programs is 0"), interpreted(max_programs=0):
        pass
    with interpreted(), pytest.raises(RuntimeError, match="open already"), interpreted():
        pass
    with interpreted(), pytest.raises(KernelError, match="one to three sizes"):
        copy_kernel[(1, 1, 1, 1)](guarded(4), guarded(4), 4, BLOCK=4, LOAD_EXTRA=0, STORE_EXTRA=0)


def test_outside_the_block_triton_is_itself() -> None:
    run = JITFunction.run
    with interpreted():
        assert JITFunction.run is not run
    assert JITFunction.run is run
