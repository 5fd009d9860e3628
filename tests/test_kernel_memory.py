"""How this tests which bytes the decode operators touch, in plain words.

State and ring of a slot lie in one page of raw bytes, as a paged cache lays them out: slots are strided, pages end in
padding, the inner state may be stored transposed. Every byte of every page is compared before and after a step: only
the state of a flushing row, or one ring entry of an appending row, may differ. The NULL slot, other slots, page
padding and dead ring entries hold NaN with payloads, and none may leak or change. Last, steps run on tensors without
values, where any read on the host raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from replay_parity.kernels import decode_torch
from replay_parity.kernels.decode import gdn_packed_decode, gdn_replay_decode
from replay_parity.kernels.ring import RingSpec
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

# NaN with a payload in every dtype: signalling as float32 and bfloat16
NAN_BYTES = (0xA0, 0x7F, 0xA0, 0x7F)
PAGE_PADDING = 64

# called with unpacked lists, whose lengths a type checker cannot see
replay: Callable[..., torch.Tensor] = gdn_replay_decode
packed_step: Callable[..., torch.Tensor] = gdn_packed_decode


def test_poison_is_nan_in_every_dtype() -> None:
    raw = torch.tensor(NAN_BYTES, dtype=torch.uint8)
    assert all(bool(raw.view(dtype).isnan().all()) for dtype in (torch.float32, torch.float16, torch.bfloat16))


@dataclass(frozen=True, eq=False)
class Pages:
    """Pages [N, bytes] uint8 and the views of state and ring on them."""

    spec: RingSpec
    raw: torch.Tensor
    state: torch.Tensor
    ring_d: torch.Tensor
    ring_k: torch.Tensor
    ring_g: torch.Tensor

    @property
    def views(self) -> list[torch.Tensor]:
        return [self.state, self.ring_d, self.ring_k, self.ring_g]


def make_pages(spec: RingSpec, num_slots: int, transposed_state: bool) -> Pages:
    """Lay state, d, k, g out in pages of NaN bytes."""
    page = -(-(spec.slot_bytes + PAGE_PADDING) // 4) * 4
    raw = torch.tensor(NAN_BYTES, dtype=torch.uint8).repeat(num_slots, page // 4)
    hv, vd, kd = spec.state_shape
    start = 0

    def view(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nonlocal start
        size = dtype.itemsize * torch.Size(shape).numel()
        part = raw[:, start : start + size].view(dtype).view(num_slots, *shape)
        start += size
        return part

    state = view((hv, kd, vd), spec.state_dtype).mT if transposed_state else view((hv, vd, kd), spec.state_dtype)
    ring_g = view(spec.g_shape, spec.g_dtype)
    return Pages(spec, raw, state, view(spec.d_shape, spec.ring_dtype), view(spec.k_shape, spec.ring_dtype), ring_g)


def may_change(spec: RingSpec, transposed: bool, slots: list[int], write_pos: list[int], flush: list[bool]) -> Pages:
    """Pages whose bytes are 255 where a step may write, and 0 elsewhere."""
    allowed = make_pages(spec, NUM_SLOTS, transposed)
    allowed.raw.zero_()
    for slot, position, is_flush in zip(slots, write_pos, flush, strict=True):
        if slot > 0 and is_flush:
            _set_all_bits(allowed.state[slot])
        elif slot > 0:
            for ring in (allowed.ring_d, allowed.ring_k, allowed.ring_g):
                _set_all_bits(ring[slot, :, position])
    return allowed


def _set_all_bits(view: torch.Tensor) -> None:
    """Make every byte of a view 255."""
    view.view(torch.int32 if view.dtype.itemsize == 4 else torch.int16).fill_(-1)


NUM_SLOTS = 8
SPECS = {
    "fp32": RingSpec(2, 4, 8, 6, 4, torch.float32, torch.float32),
    "fp16 ring": RingSpec(2, 4, 8, 6, 4, torch.float16, torch.float32),
    "bf16 ring and state": RingSpec(1, 3, 4, 2, 5, torch.bfloat16, torch.bfloat16),
    "L 1": RingSpec(1, 2, 4, 4, 1, torch.float16, torch.float32),
}
SLOTS = [3, 0, 5, -1, 1, 6, 0]


def random_token(spec: RingSpec, num_rows: int, seed: int) -> list[torch.Tensor]:
    """q, k, v, a, b, A_log, dt_bias."""
    rng = torch.Generator().manual_seed(seed)
    h, hv, kd, vd = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
    shapes = [(num_rows, h, kd), (num_rows, h, kd), (num_rows, hv, vd), (num_rows, hv), (num_rows, hv), (hv,), (hv,)]
    return [torch.randn(shape, generator=rng) for shape in shapes]


def fill_valid(pages: Pages, write_pos: list[int], seed: int) -> None:
    """Give live slots a state and as many ring entries as they have pending; all else stays NaN."""
    rng = torch.Generator().manual_seed(seed)
    for slot, position in zip(SLOTS, write_pos, strict=True):
        if slot > 0:
            pages.state[slot] = torch.randn(pages.spec.state_shape, generator=rng)
            for ring in (pages.ring_d, pages.ring_k, pages.ring_g):
                entry = ring[slot, :, :position]
                entry.copy_(-torch.rand(entry.shape, generator=rng))


@dataclass(frozen=True, eq=False)
class Step:
    """One replay step on pages: bytes before, pages after, output."""

    before: torch.Tensor
    pages: Pages
    out: torch.Tensor
    write_pos: list[int]
    is_flush: list[bool]


def replay_step(spec: RingSpec, transposed: bool, seed: int = 0, slots: list[int] | None = None) -> Step:
    """Step once, rows at ring positions 0, 1, 2, ..., every second live row flushing early."""
    length = spec.buffer_len
    write_pos = [row % length if slot > 0 else 0 for row, slot in enumerate(SLOTS)]
    is_flush = [position == length - 1 or row % 4 == 0 for row, position in enumerate(write_pos)]
    pages = make_pages(spec, NUM_SLOTS, transposed)
    fill_valid(pages, write_pos, seed)
    before = pages.raw.clone()
    out = torch.full((len(SLOTS), spec.num_v_heads, spec.head_v_dim), float("nan"))
    replay(
        *random_token(spec, len(SLOTS), seed), *pages.views, torch.tensor(slots or SLOTS, dtype=torch.int32),
        torch.tensor(write_pos, dtype=torch.int32), torch.tensor(is_flush), out=out,
    )  # fmt: skip
    return Step(before, pages, out, write_pos, is_flush)


def strayed(step: Step, transposed: bool) -> torch.Tensor:
    """Slots in which a byte changed that must not."""
    allowed = may_change(step.pages.spec, transposed, SLOTS, step.write_pos, step.is_flush)
    return ((step.before != step.pages.raw) & (allowed.raw == 0)).any(-1).nonzero().flatten()


@pytest.mark.parametrize("transposed", [False, True], ids=["[V, K]", "[K, V]"])
@pytest.mark.parametrize("name", SPECS)
def test_only_own_bytes_change(name: str, transposed: bool) -> None:
    step = replay_step(SPECS[name], transposed)
    assert strayed(step, transposed).tolist() == []
    for slot, position, is_flush, out in zip(SLOTS, step.write_pos, step.is_flush, step.out, strict=True):
        if slot <= 0:
            assert not out.any()
            continue
        assert out.isfinite().all()
        assert out.any()
        if is_flush:
            assert step.pages.state[slot].isfinite().all()
        else:
            entries = [ring[slot, :, position] for ring in step.pages.views[1:]]
            assert all(entry.isfinite().all() for entry in entries)
    changed = (step.before != step.pages.raw).any(-1).nonzero().flatten().tolist()
    assert changed == sorted(slot for slot in SLOTS if slot > 0)


PUT_ENTRY: Callable[..., None] = decode_torch.put_entry
PUT_ROWS: Callable[..., None] = decode_torch.put_rows
BROKEN: dict[str, tuple[str, Callable[..., object]]] = {
    "padding taken for slot 0": (
        "locate_rows",
        lambda slots: decode_torch.Rows(slot=slots.long().clamp(min=0), live=slots >= -1),
    ),
    "row for slot": (
        "locate_rows",
        lambda slots: decode_torch.Rows(slot=torch.arange(len(slots)), live=slots > 0),
    ),
    "next entry": (
        "put_entry",
        lambda ring, slot, position, value, write: PUT_ENTRY(ring, slot, (position + 1) % ring.shape[2], value, write),
    ),
    "entry also on a flush": (
        "put_entry",
        lambda ring, slot, position, value, write: PUT_ENTRY(ring, slot, position, value, slot > 0),
    ),
    "state every step": (
        "put_rows",
        lambda state, slot, value, stored, write: PUT_ROWS(state, slot, value, stored, slot > 0),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_stray_write_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, wrong = BROKEN[name]
    monkeypatch.setattr(decode_torch, rule, wrong)
    assert len(strayed(replay_step(SPECS["fp16 ring"], False), False))


def test_dead_entry_leaks_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry too many counted as valid is NaN in the output."""
    read: Callable[..., decode_torch.Pending] = decode_torch.read_ring
    monkeypatch.setattr(decode_torch, "read_ring", lambda *args: read(*args[:4], args[4] + 1, args[5]))
    out = replay_step(SPECS["fp32"], False).out
    assert not out[torch.tensor(SLOTS) > 0].isfinite().all()


@pytest.mark.parametrize("name", SPECS)
def test_layout_does_not_show(name: str) -> None:
    """Pages, transposed pages and plain contiguous tensors give the same bytes of output and contents."""
    spec = SPECS[name]
    paged, transposed = replay_step(spec, False), replay_step(spec, True)
    start = make_pages(spec, NUM_SLOTS, False)
    fill_valid(start, paged.write_pos, 0)
    plain = [view.clone(memory_format=torch.contiguous_format) for view in start.views]
    out = replay(
        *random_token(spec, len(SLOTS), 0), *plain, torch.tensor(SLOTS), torch.tensor(paged.write_pos),
        torch.tensor(paged.is_flush),
    )  # fmt: skip
    assert torch.equal(out, paged.out)
    assert torch.equal(out, transposed.out)
    for one, two, three in zip(plain, paged.pages.views, transposed.pages.views, strict=True):
        assert torch.equal(one.nan_to_num(77.0), two.nan_to_num(77.0))
        assert torch.equal(one.nan_to_num(77.0), three.nan_to_num(77.0))


@pytest.mark.parametrize("transposed", [False, True], ids=["[V, K]", "[K, V]"])
@pytest.mark.parametrize("name", SPECS)
def test_packed_changes_live_states_only(name: str, transposed: bool) -> None:
    spec = SPECS[name]
    pages = make_pages(spec, NUM_SLOTS, transposed)
    fill_valid(pages, [0] * len(SLOTS), 0)
    before = pages.raw.clone()
    out = torch.full((len(SLOTS), spec.num_v_heads, spec.head_v_dim), float("nan"))
    packed_step(*random_token(spec, len(SLOTS), 0), pages.state, torch.tensor(SLOTS), out=out)
    step = Step(before, pages, out, [0] * len(SLOTS), [True] * len(SLOTS))
    assert strayed(step, transposed).tolist() == []
    live = torch.tensor(SLOTS) > 0
    assert out[live].isfinite().all()
    assert not out[~live].any()
    assert pages.state[torch.tensor(SLOTS)[live]].isfinite().all()


def test_all_rows_padding() -> None:
    step = replay_step(SPECS["fp32"], False, slots=[0, -1, 0, -1, 0, 0, -7])
    assert torch.equal(step.before, step.pages.raw)
    assert not step.out.any()


def test_strided_inputs_and_output() -> None:
    """Token tensors and out may be slices of wider ones: same bytes, and nothing beside the slice is written."""
    spec = SPECS["fp32"]
    plain = replay_step(spec, False)
    pages = make_pages(spec, NUM_SLOTS, False)
    fill_valid(pages, plain.write_pos, 0)
    token = [torch.stack((tensor, torch.full_like(tensor, 9.0)), -1)[..., 0] for tensor in random_token(spec, 7, 0)]
    wide = torch.full((7, 2 * spec.num_v_heads, spec.head_v_dim), 5.0)
    out = wide[:, : spec.num_v_heads]
    result = replay(
        *token, *pages.views, torch.tensor(SLOTS), torch.tensor(plain.write_pos), torch.tensor(plain.is_flush), out=out
    )
    assert result is out
    assert torch.equal(out, plain.out)
    assert (wide[:, spec.num_v_heads :] == 5).all()
    assert torch.equal(pages.raw, plain.pages.raw)


def test_no_host_read() -> None:
    """Both operators run on tensors that have no values."""
    spec = SPECS["fp16 ring"]
    with FakeTensorMode() as mode:
        token = [mode.from_tensor(tensor) for tensor in random_token(spec, 7, 0)]
        pages = [mode.from_tensor(view.contiguous()) for view in make_pages(spec, NUM_SLOTS, False).views]
        index = torch.empty(7, dtype=torch.int32)
        out = replay(*token, *pages, index, index, torch.empty(7, dtype=torch.bool))
        assert out.shape == (7, 4, 6)
        assert packed_step(*token, pages[0], index).shape == (7, 4, 6)


@pytest.mark.parametrize(
    "read",
    [
        lambda slots: slots[0].item(),
        lambda slots: slots.tolist(),
        lambda slots: bool((slots > 0).any()),
        lambda slots: slots.nonzero(),
        lambda slots: slots[slots > 0],
    ],
    ids=["item", "tolist", "bool", "nonzero", "boolean index"],
)
def test_host_read_is_rejected(read: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    locate = decode_torch.locate_rows

    def reading(slots: torch.Tensor) -> decode_torch.Rows:
        read(slots)
        return locate(slots)

    monkeypatch.setattr(decode_torch, "locate_rows", reading)
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        test_no_host_read()
