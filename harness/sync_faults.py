"""The faults sync.*: the plugin's metadata builder or layer reads on the host what lives on the device.

Every value stays right, so that on a CPU nothing else shows it. What is read is the builder's own copy of the flags for
the kernels, or the device's copy of what it has on the host.
"""

from __future__ import annotations

from dataclasses import replace

from .fault_form import Edit, Fault, made

_BUILDER = "kernels.vllm_metadata:ReplayMetadataBuilder"
_FLUSHES = "num_flush_rows=int(cursor.is_flush.sum()),"


def _sync(name: str, what: str, function: str, old: str, new: str) -> Fault:
    edit = Edit(f"{_BUILDER}.{function}", old, new)
    fault = made(f"sync.{name}", f"the builder {what}", schedule=edit, engine=edit)
    return replace(fault, targets={"schedule": "builder"})


SYNCS = (
    _sync(
        "item",
        "counts flushes with .item() on the device's flags",
        "_extend",
        _FLUSHES,
        "num_flush_rows=self.is_flush.sum().item(),",
    ),
    _sync(
        "cpu",
        "fetches query_start_loc with .cpu()",
        "build",
        "m.query_start_loc_cpu[: m.num_reqs + 1].numpy()",
        "m.query_start_loc[: m.num_reqs + 1].cpu().numpy()",
    ),
    _sync(
        "nonzero",
        "counts flushes with .nonzero() on the device's flags",
        "_extend",
        _FLUSHES,
        "num_flush_rows=len(self.is_flush.nonzero()),",
    ),
    _sync(
        "bool",
        "branches on whether the device's flags name a flush",
        "_extend",
        _FLUSHES,
        "num_flush_rows=int(cursor.is_flush.sum()) if self.is_flush.any() else 0,",
    ),
    made(
        "sync.tolist",
        "the layer lists write_pos on the host in each forward",
        engine=Edit(
            "kernels.vllm_layer:ReplayGatedDeltaNetAttention._decode",
            "num_rows = len(mixed_qkv)",
            "num_rows = len(mixed_qkv); metadata.write_pos.tolist()",
        ),
    ),
)
