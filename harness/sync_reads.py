"""Which torch calls make the host wait for a device: on CUDA each of them stops until the device has caught up.

Reads of device values, and uploads that are not said to be non-blocking: CUDA stages those through memory of its own
and waits, and vLLM's own check ends an engine for them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Marked = Callable[[Any], bool]
Reads = Callable[[Sequence[Any], dict[str, Any], Marked], bool]

_MASKS = (torch.bool, torch.uint8)
# the size of the result, or the result itself, depends on values
_BY_VALUE = (
    "nonzero", "nonzero_numpy", "argwhere", "masked_select", "equal", "allclose", "bincount", "combinations",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive",
)  # fmt: skip


def _any(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    return any(marked(value) for value in (*args, *kwargs.values()))


def _condition_alone(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """where(condition) is nonzero; with two more arguments it is elementwise."""
    return len(args) + len(kwargs) == 1 and _any(args, kwargs, marked)


def _by_index(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """x[mask] or an index on the host, which is uploaded first."""
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    return _by_mask(args, kwargs, marked) or (marked(args[0]) and any(_uploads(index, marked) for index in indices))


def _uploads(value: Any, marked: Marked) -> bool:
    """A tensor on the host that has to be copied; a single number travels with the launch."""
    return isinstance(value, Tensor) and value.dim() > 0 and not marked(value)


def _by_mask(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """x[mask]: the mask's nonzero comes first, wherever x lives."""
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    return any(isinstance(index, Tensor) and index.dtype in _MASKS and marked(index) for index in indices)


def _put_by_mask(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """x[mask] = values; one mask and one value make a masked fill, which reads nothing."""
    indices = args[1] if len(args) > 1 else kwargs["indices"]
    values = args[2] if len(args) > 2 else kwargs["values"]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    fills = len(given) == 1 and values.numel() == 1 and not accumulate
    uploads = marked(args[0]) and any(_uploads(value, marked) for value in (*given, values))
    return uploads or (not fills and _by_mask(args, kwargs, marked))


def _repeats(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """repeat_interleave by a tensor sums it for the size of its result, unless that is given."""
    return kwargs.get("output_size") is None and any(marked(value) for value in args[-2:])


def _across(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """host.copy_(device) or device.copy_(host); neither waits if it is said to be non-blocking."""
    target, source = args[0], args[1] if len(args) > 1 else kwargs["src"]
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return not non_blocking and (_uploads(source, marked) if marked(target) else marked(source))


def _overloads(names: Sequence[str], reads: Reads) -> dict[Any, Reads]:
    packets = [getattr(torch.ops.aten, name) for name in names]
    return {getattr(packet, overload): reads for packet in packets for overload in packet.overloads()}


# by operator overload, as a dispatch mode sees them. In inference mode composite operators come whole
OPERATORS: dict[Any, Reads] = {
    **_overloads(("_local_scalar_dense", "item", "is_nonzero", *_BY_VALUE), _any),
    torch.ops.aten.where.default: _condition_alone,
    **_overloads(("index", "_unsafe_index"), _by_index),
    **_overloads(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _put_by_mask),
    torch.ops.aten.repeat_interleave.Tensor: _repeats,
    torch.ops.aten.repeat_interleave.self_Tensor: _repeats,
    torch.ops.aten.copy_.default: _across,
}


def _inside(value: Any, marked: Marked) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_inside(entry, marked) for entry in value)
    return marked(value)


def _from_data(args: Sequence[Any], kwargs: dict[str, Any], marked: Marked) -> bool:
    """torch.tensor([t, ...]) reads each t; a single tensor stays where it is."""
    return any(isinstance(value, (list, tuple)) and _inside(value, marked) for value in (*args, *kwargs.values()))


# what a person wrote; scalars reach an operator under several names
_CALLED = {
    **dict.fromkeys(("_local_scalar_dense", "item", "is_nonzero"), "Tensor.item"),
    **dict.fromkeys(("index", "_unsafe_index"), "an index by a mask or the host"),
    **dict.fromkeys(
        ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), "a write by a mask or the host"
    ),
    **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_dim_consecutive"), "torch.unique"),
    "copy_": "Tensor.copy_",
    "where": "torch.where(condition)",
    "nonzero_numpy": "torch.nonzero",
}


def operator_name(overload: Any) -> str:
    """What a person calls the operator: Tensor.item, torch.nonzero."""
    name: str = overload.overloadpacket.__name__
    return _CALLED.get(name, f"torch.{name}")


# by function, as a function mode sees them: these reach no operator
FUNCTIONS: dict[Any, Reads] = {
    Tensor.tolist: _any,
    Tensor.numpy: _any,
    Tensor.__array__: _any,
    Tensor.__repr__: _any,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    Tensor.new_tensor: _from_data,
}
# these fill a tensor on the device from the host's memory
FROM_HOST = frozenset((torch.tensor, torch.as_tensor, torch.asarray))
