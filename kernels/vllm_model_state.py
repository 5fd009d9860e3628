"""Model state of Model Runner V2 that hands each step's decode base to the replay builders."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from .vllm_metadata import ReplayMetadataBuilder


class ReplayModelState(MambaHybridModelState):  # type: ignore[misc]
    """vLLM's hybrid model state; before metadata is built it stages the decode base.

    V2 builds attention metadata from inside ``prepare_attn`` and passes no decode base on, so it is set on the
    builders, as vLLM itself does with the aligned state indices.
    """

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Set the decode base on each replay builder, then go on as stock does."""
        base = decode_base_snapshot(input_batch)
        for groups in attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                if isinstance(builder, ReplayMetadataBuilder):
                    builder.replayssm_decode_base_cpu = base
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, *args, **kwargs
        )
        return metadata


def decode_base_snapshot(input_batch: Any) -> torch.Tensor:
    """Decode base of each row in batch order, [num_reqs_after_padding] int64 on the CPU, 0 on padding rows.

    ``prefill_len_np`` counts the tokens handed to prefill at the latest (re)admission: after a preemption the prompt
    and what had been generated. A copy, because the runner may build the next batch before this one is done.
    """
    base = torch.zeros(input_batch.num_reqs_after_padding, dtype=torch.int64)
    base[: input_batch.num_reqs] = torch.from_numpy(input_batch.prefill_len_np[: input_batch.num_reqs])
    return base
