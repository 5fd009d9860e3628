"""What a captured FULL graph reads, beside what its step's metadata says: by address and by value, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# made by the host for each step and read by a kernel for CPUs only; a replay makes it anew
_REMADE = frozenset(("scheduler_metadata",))
_SLOTS = "non_spec_state_indices_tensor"
# what the plugin's decode reads, named first
_READ_FIRST = (_SLOTS, "write_pos", "is_flush")
_SHOWN = 8


@dataclass(frozen=True)
class Field:
    """One tensor of the metadata of some layers. ``tensor`` is held: its memory is what the graph reads for ever."""

    layers: tuple[str, ...]
    name: str
    tensor: Tensor
    address: int

    @property
    def label(self) -> str:
        """Field and layer, for a person."""
        others = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        return f"{self.name} of {self.layers[0]}{others}"


class GraphAudit:
    """The metadata that was there as each graph was captured, and what later steps of that graph make of it.

    A graph reads the addresses it was captured with. So a field that stands elsewhere in a later step is not read, and
    a value that is not written to the captured address is an old one.
    """

    def __init__(self) -> None:
        self.captured: dict[int, dict[tuple[str, str], Field]] = {}

    def remember(self, rows: int, metadata: Mapping[str, Any]) -> None:
        """The graph of ``rows`` is about to be captured with this metadata, by layer name."""
        self.captured[rows] = fields(metadata)

    def moved(self, rows: int, metadata: Mapping[str, Any]) -> list[str]:
        """A line for each field that does not stand where the graph of ``rows`` reads it."""
        captured = self.captured[rows]
        found = []
        for key, now in sorted(fields(metadata).items(), key=lambda entry: entry[0][1] not in _READ_FIRST):
            was = captured.get(key)
            if was is None:
                found.append(f"{now.label}: the graph of {rows} rows was captured without it")
            elif was.address != now.address:
                found.append(
                    f"{now.label}: the graph of {rows} rows reads {_values(was.tensor)} where it was at capture, "
                    f"this step's {_values(now.tensor)} stand elsewhere"
                )
        return found

    def untold(self, rows: int, reported: Sequence[Any], slots: Mapping[str, Tensor]) -> list[str]:
        """A line for each field whose captured memory does not hold the step's values.

        reported: the plugin's ReplaySteps, one a GDN group; slots: the block of each row's state by the group's first
        layer, as the block tables have it.
        """
        found = []
        for told in reported:
            layer = told.layer_names[0]
            right = {"write_pos": told.write_pos, "is_flush": told.is_flush, _SLOTS: slots[layer]}
            for name, values in right.items():
                field = self.captured[rows][layer, name]
                wanted = torch.as_tensor(values).cpu()
                if not torch.equal(field.tensor[: len(wanted)].cpu(), wanted):
                    found.append(
                        f"{field.label}: the graph of {rows} rows reads {_values(field.tensor)}, "
                        f"the step's are {_values(wanted)}"
                    )
        return found


def fields(metadata: Mapping[str, Any]) -> dict[tuple[str, str], Field]:
    """The device tensors of a step's metadata by (first layer, field): layers that share an object count once."""
    layers: dict[int, list[str]] = {}
    for layer, entry in metadata.items():
        layers.setdefault(id(entry), []).append(layer)
    found = {}
    for names in layers.values():
        for name, value in vars(metadata[names[0]]).items():
            if isinstance(value, Tensor) and name not in _REMADE and not name.endswith("_cpu"):
                found[names[0], name] = Field(tuple(names), name, value, value.data_ptr())
    return found


def _values(tensor: Tensor) -> str:
    """The first entries, flags as 0 and 1."""
    flat = tensor.reshape(-1)[:_SHOWN].cpu()
    text = ", ".join(f"{int(value)}" if not tensor.is_floating_point() else f"{float(value):.4g}" for value in flat)
    return f"[{text}{', ...' if tensor.numel() > _SHOWN else ''}]"
