"""Which memory a kernel may touch: one region a storage, narrowed to views where the caller names some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .handle import ANYWHERE, Array, Origin

# no bounds are known for a pointer that was made from an integer outside every region
_LOWEST, _HIGHEST = 0, 2**63 - 1


@dataclass(frozen=True)
class Region:
    """A storage as one argument sees it: name, first byte and the byte after the last.

    allowed marks its bytes where only some may be used.
    """

    name: str
    start: int
    stop: int
    allowed: NDArray[np.bool_] | None = None


class Regions:
    """The regions of a session and of the launch that runs."""

    def __init__(self, views: Sequence[Tensor] = ()) -> None:
        self._known: list[Region] = []
        # kept ones by place alone, those of a launch by name too: arguments may be views of one storage
        self._by_place: dict[tuple[int, int, str], int] = {}
        storages: dict[tuple[int, int], list[Tensor]] = {}
        for view in views:
            storages.setdefault(_place(view), []).append(view)
        for same in storages.values():
            self._add(_narrowed(f"region {len(self._known)}", same))
        self._own = len(self._known)
        self._bounds: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def register(self, name: str, tensor: Tensor) -> int:
        """The number of the region of a tensor's storage."""
        place = _place(tensor)
        number = self._by_place.get((*place, ""), self._by_place.get((*place, name)))
        return self._add(Region(name, *place)) if number is None else number

    def keep(self) -> None:
        """Keep what is registered now for later launches."""
        self._own = len(self._known)
        self._by_place = {(region.start, region.stop, ""): number for number, region in enumerate(self._known)}

    def forget(self) -> None:
        """Forget the regions of a launch."""
        for region in self._known[self._own :]:
            del self._by_place[region.start, region.stop, region.name]
        del self._known[self._own :]
        self._bounds = None

    def __getitem__(self, number: int) -> Region | None:
        return self._known[number] if number >= 0 else None

    def of(self, addresses: Array) -> Origin:
        """The region of each address (P,) or of all lanes of a program (P, ...), ANYWHERE where it lies in none."""
        starts = np.array([region.start for region in self._known] or [0], np.uint64)
        order = np.argsort(starts, kind="stable")
        flat = addresses.reshape(len(addresses), -1)
        place = np.searchsorted(starts[order], flat, side="right") - 1
        numbers = order[np.maximum(place, 0)]
        stops = np.array([region.stop for region in self._known] or [0], np.uint64)
        numbers = np.where((place >= 0) & (flat < stops[numbers]), numbers, ANYWHERE)
        first = numbers[:, 0]
        if (numbers != first[:, None]).any():
            return ANYWHERE
        return int(first[0]) if (first == first[0]).all() else first.astype(np.int64)

    def bounds(self, origin: Origin, dimensions: int) -> tuple[Array, Array]:
        """First and last-plus-one byte for pointers of an origin, broadcastable to (P, *block_shape)."""
        if self._bounds is None:
            starts = [region.start for region in self._known] + [_LOWEST]
            stops = [region.stop for region in self._known] + [_HIGHEST]
            self._bounds = np.array(starts, np.int64), np.array(stops, np.int64)
        index = np.array([origin]) if isinstance(origin, int) else origin
        shape = (len(index),) + (1,) * (dimensions - 1)
        first, last = (bound[index].reshape(shape) for bound in self._bounds)
        return first, last

    def name(self, number: int) -> str:
        """The name of a region, for a message."""
        return self._known[number].name if number >= 0 else "unregistered memory"

    def _add(self, region: Region) -> int:
        self._known.append(region)
        self._by_place[region.start, region.stop, region.name] = len(self._known) - 1
        self._bounds = None
        return len(self._known) - 1


def _place(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor's storage and the byte after its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _narrowed(name: str, views: Sequence[Tensor]) -> Region:
    """The bytes of views of one storage."""
    start, stop = _place(views[0])
    allowed = np.zeros(stop - start, np.bool_)
    for view in views:
        size = view.element_size()
        first: NDArray[np.int64] = np.array([int(view.storage_offset()) * size], np.int64)
        for extent, stride in zip(view.shape, view.stride(), strict=True):
            first = (first[:, None] + np.arange(extent, dtype=np.int64) * (stride * size)).reshape(-1)
        for byte in range(size):
            allowed[first + byte] = True
    return Region(name, start, stop, allowed)
