"""Paged memory of one GDN layer: state and ring of each slot in one page, guarded, poisoned, audited byte by byte."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.inputs import TORCH_DTYPES, poisons
from .trace import Event, IntArray

# bytes between the pages' contents, so that a slot stride is never the contiguous one
GUARD_BYTES = 256
GUARD_BYTE = 0xA5


@dataclass(frozen=True)
class _Region:
    """One tensor inside each page: byte range, element type, shape of one slot."""

    name: str
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class LayerMemory:
    """``num_slots`` pages, slot 0 being the NULL slot; tensors are strided views as a paged cache gives them.

    ``state`` [N, HV, V, K]; ``ring_d`` [N, HV, L, V]; ``ring_k`` [N, H, L, K]; ``ring_g`` [N, HV, L] float32.
    A fresh page, the NULL slot and the guards hold poison: NaN ("nan") or plausible numbers ("stale").
    """

    def __init__(self, case: Case, num_slots: int) -> None:
        self.poison = poisons(case)
        self.regions = _regions(case)
        page = -(-self.regions[-1].stop // 16) * 16 + GUARD_BYTES
        self.pages = torch.full((num_slots, page), GUARD_BYTE, dtype=torch.uint8)
        self._fill(self.pages, np.random.default_rng([case.inputs.seed, 11]))
        self.state, self.ring_d, self.ring_k, self.ring_g = (self._view(region) for region in self.regions)

    def to(self, device: str) -> LayerMemory:
        """A copy of all bytes on another device."""
        other = copy(self)
        other.pages = self.pages.to(device, copy=True)
        other.state, other.ring_d, other.ring_k, other.ring_g = (other._view(region) for region in self.regions)
        return other

    def copy_state(self, sources: Tensor, targets: Tensor) -> None:
        """Checkpoints from slot to slot; rings stay, they are logically empty at a block boundary."""
        self.state[targets] = self.state[sources]

    def retire(self, slots: list[int]) -> None:
        """A tenant left: poison the page, or let its data lie for the next tenant to stumble over."""
        if self.poison == "nan" and slots:
            for region in self.regions:
                self._view(region)[slots] = float("nan")

    def kill_ring(self, slots: Tensor) -> None:
        """Entries of a flushed ring are dead: poison them."""
        if self.poison == "nan":
            for ring in (self.ring_d, self.ring_k, self.ring_g):
                ring[slots] = float("nan")

    def snapshot(self) -> Tensor:
        """All bytes, for ``audit``."""
        return self.pages.clone()

    def audit(self, before: Tensor, step: int, slots: IntArray, write_pos: IntArray, is_flush: IntArray) -> list[Event]:
        """Bytes that a decode op changed although it must not: [R] rows say what each of them may write."""
        changed = self.pages != before
        flushed = torch.from_numpy(slots[is_flush.astype(bool)])
        appended = torch.from_numpy(slots[~is_flush.astype(bool)])
        entries = torch.from_numpy(write_pos[~is_flush.astype(bool)])
        state, ring_d, ring_k, ring_g = self.regions
        changed[flushed, state.start : state.stop] = False
        for region in (ring_d, ring_k, ring_g):
            rows = changed[:, region.start : region.stop].view(len(changed), *region.shape[:2], -1)
            rows[appended, :, entries] = False
        if not bool(changed.any()):
            return []
        slot, byte = (int(place) for place in changed.nonzero()[0])
        return [Event("out_of_bounds", step, _row_of(slots, slot), self._describe(slot, byte, write_pos, slots))]

    def _describe(self, slot: int, byte: int, write_pos: IntArray, slots: IntArray) -> str:
        owner = "the NULL slot" if slot == 0 else f"slot {slot}"
        for region in self.regions:
            if region.start <= byte < region.stop:
                inner = (
                    (byte - region.start)
                    * region.shape[0]
                    * int(np.prod(region.shape[1:]))
                    // (region.stop - region.start)
                )
                where = np.unravel_index(inner, region.shape)
                return f"{owner}: {region.name}{[int(i) for i in where]} was written"
        return f"{owner}: the guard after its page was written at byte {byte - self.regions[-1].stop}"

    def _view(self, region: _Region) -> Tensor:
        numbers = self.pages[:, region.start : region.stop].view(region.dtype)
        return numbers.view(len(self.pages), *region.shape)

    def _fill(self, pages: Tensor, rng: np.random.Generator) -> None:
        for region in self.regions:
            view = self._view(region)
            if self.poison == "nan":
                view.fill_(float("nan"))
            else:
                # gates are never positive: a stale one is plausible too
                numbers = rng.standard_normal(tuple(view.shape)).astype(np.float32)
                view.copy_(torch.from_numpy(-np.abs(numbers) if region.name == "ring_g" else numbers))


def _regions(case: Case) -> tuple[_Region, _Region, _Region, _Region]:
    geometry, length = case.geometry, case.replay.buffer_len
    value_heads, key_heads = geometry.num_v_heads, geometry.num_k_heads
    state, ring = TORCH_DTYPES[case.replay.state_dtype], TORCH_DTYPES[case.replay.ring_dtype]
    shapes = (
        ("state", state, (value_heads, geometry.head_v_dim, geometry.head_k_dim)),
        ("ring_d", ring, (value_heads, length, geometry.head_v_dim)),
        ("ring_k", ring, (key_heads, length, geometry.head_k_dim)),
        ("ring_g", torch.float32, (value_heads, length)),
    )
    regions, start = [], 0
    for name, dtype, shape in shapes:
        stop = start + int(np.prod(shape)) * dtype.itemsize
        regions.append(_Region(name, start, stop, dtype, shape))
        # each tensor begins on a 16-byte boundary
        start = -(-stop // 16) * 16
    return regions[0], regions[1], regions[2], regions[3]


def _row_of(slots: IntArray, slot: int) -> int | None:
    rows = np.flatnonzero(slots == slot)
    return int(rows[0]) if len(rows) else None
