"""GDN state and ring of every block of an engine: poisoned before a Case, audited after each of its steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.inputs import poisons
from .trace import Event

# element types whose equality is that of their bytes
_BITS = {2: torch.int16, 4: torch.int32}
NAMES = ("conv", "state", "ring_d", "ring_k", "ring_g")


@dataclass(frozen=True)
class EngineLayer:
    """Cache tensors of one GDN layer, each [num_blocks, ...]: conv, state, with the plugin the ring's d, k and g."""

    name: str
    tensors: tuple[Tensor, ...]


@dataclass
class _Pages:
    """Memory that one layer or several share, and its bytes after the last step."""

    layers: list[str]
    tensors: tuple[Tensor, ...]
    before: tuple[Tensor, ...] = ()


class EngineMemory:
    """What the steps of a Case may write of it: rows told to append one ring entry, all other rows their state.

    Layers of different KV cache groups may be views of the same pages, each with blocks of its own, and so may
    attention layers.
    """

    def __init__(self, layers: Sequence[EngineLayer], aligned: bool) -> None:
        # under "align" vLLM copies a state into the block that a request enters
        self.aligned = aligned
        self.pages: list[_Pages] = []
        for layer in layers:
            same = [pages for pages in self.pages if pages.tensors[0].data_ptr() == layer.tensors[0].data_ptr()]
            if same:
                same[0].layers.append(layer.name)
            else:
                self.pages.append(_Pages([layer.name], layer.tensors))
        # slot of each request of each layer in its latest step
        self.slots: dict[tuple[str, int], int] = {}

    def spread_poison(self, case: Case) -> None:
        """Fill every block, the NULL block too, with what nothing may read."""
        nan = poisons(case) == "nan"
        random = torch.Generator().manual_seed(case.inputs.seed)
        for tensor in (tensor for pages in self.pages for tensor in pages.tensors):
            # one block's numbers for all of them; negative, as stored gates are
            numbers = -torch.randn(tensor.shape[1:], generator=random).abs()
            tensor[:] = float("nan") if nan else numbers.to(tensor)
        self.slots.clear()
        self.snapshot()

    def bury(self, blocks: Sequence[int]) -> None:
        """Fill freed blocks with NaN, in every layer."""
        for pages in self.pages:
            for tensor in (*pages.tensors, *pages.before):
                tensor[list(blocks)] = float("nan")

    def snapshot(self) -> None:
        """Remember all bytes, for ``audit``."""
        for pages in self.pages:
            pages.before = tuple(tensor.clone() for tensor in pages.tensors)

    def audit(
        self, step: int, reported: Sequence[Any], requests: Sequence[int], attention_blocks: Collection[int]
    ) -> list[Event]:
        """Bytes that the step changed although it must not, an event for each layer at most; then remembers all anew.

        reported: the plugin's ReplaySteps, one a GDN group; requests: the Case's, in batch order; attention_blocks:
        those that attention layers may write.
        """
        told = {name: entry for entry in reported for name in entry.layer_names}
        events = []
        for pages in self.pages:
            changed = [_changed(was, now) for was, now in zip(pages.before, pages.tensors, strict=True)]
            for wrong in changed:
                wrong[list(attention_blocks)] = False
            for layer in pages.layers:
                if layer in told:
                    self._allow(changed, layer, told[layer], requests)
            events += _events(step, " and ".join(pages.layers), changed)
        self.snapshot()
        return events

    def _allow(self, changed: list[Tensor], layer: str, told: Any, requests: Sequence[int]) -> None:
        conv, state, *ring = changed
        for row, request in enumerate(requests):
            slot, append = int(told.state_indices[row]), bool(told.runs_as_decode[row] and not told.is_flush[row])
            entered = self.aligned and self.slots.get((layer, request)) != slot
            self.slots[layer, request] = slot
            conv[slot] = False
            if not append or entered:
                state[slot] = False
            if append:
                for part in ring:
                    part[slot, :, int(told.write_pos[row])] = False


def _changed(before: Tensor, now: Tensor) -> Tensor:
    bits = _BITS[now.element_size()]
    return before.view(bits) != now.view(bits)


def _events(step: int, layer: str, changed: list[Tensor]) -> list[Event]:
    for name, wrong in zip(NAMES, changed, strict=True):
        if not bool(wrong.any()):
            continue
        slot, *where = (int(place) for place in wrong.nonzero()[0])
        owner = "the NULL block" if slot == 0 else f"block {slot}"
        return [Event("out_of_bounds", step, None, f"{layer}: {owner}: {name}{where} was written")]
    return []
