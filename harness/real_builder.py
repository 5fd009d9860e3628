"""The plugin's own metadata builder, fed single steps on a CPU: no engine, no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..cases.case import Case
from . import cpu_platform
from .engine_sync import allowed_regions, device_tensors, vllm_sentinel
from .sync import HostRead
from .trace import IntArray

MAX_ROWS = 64


@dataclass(frozen=True)
class Built:
    """What the builder made of a step, rows in the order given: [R] each, 0 on rows that run as prefill.

    ``reads``: where its own code read a device value on the host, each place once a builder.
    """

    runs_as_decode: IntArray
    write_pos: IntArray
    is_flush: IntArray
    reads: tuple[HostRead, ...] = ()


class RealBuilder:
    """ReplayMetadataBuilder of kernels/vllm_metadata.py for one Case's ring length and cache mode.

    Raises EngineUnavailable where vLLM is not installed.
    """

    def __init__(self, case: Case) -> None:
        cpu_platform.prepare()
        from vllm.v1.kv_cache_interface import MambaSpec

        from ..kernels.vllm_metadata import ReplayMetadataBuilder

        align = case.cache.mode == "align"
        spec = MambaSpec(
            block_size=case.cache.block_size if align else 512,
            shapes=((3, 8), (2, 4, 4)),
            dtypes=(torch.float32, torch.float32),
            mamba_cache_mode=case.cache.mode,
        )
        config = _config(case)
        self.builder: Any = ReplayMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
        self.sentinel = vllm_sentinel()
        self.sentinel.mark(*device_tensors(self.builder))

    def build(
        self, num_computed: IntArray, num_tokens: IntArray, prefill_len: IntArray, slots: IntArray, padded_to: int
    ) -> Built:
        """One step of [R] rows, padded to ``padded_to`` rows; the builder sees them in Model Runner V2's order."""
        # V2 sorts running one-token rows first, then by token count, stably
        has_one = (num_tokens == 1) & (num_computed > 0)
        order = np.lexsort((num_tokens, ~has_one))
        size = max(padded_to, len(order))
        computed, tokens, base, slot = (
            np.concatenate([values[order], np.zeros(size - len(order), np.int64)])
            for values in (num_computed, num_tokens, prefill_len, slots)
        )
        self.builder.replayssm_decode_base_cpu = torch.from_numpy(base)
        common = _common_metadata(computed, tokens, base, slot)
        self.sentinel.mark(common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping)
        with allowed_regions(), self.sentinel.watch():
            metadata = self.builder.build(0, common)
        reads = tuple(read for read in self.sentinel.take() if not read.stock)
        decodes = (np.arange(size) < metadata.num_decodes) & (tokens > 0)
        back = np.argsort(order)
        columns = (decodes, metadata.write_pos[:size].numpy(), metadata.is_flush[:size].numpy())
        runs_as_decode, write_pos, is_flush = (np.asarray(column[: len(order)][back], np.int64) for column in columns)
        return Built(runs_as_decode, write_pos, is_flush, reads)


def _config(case: Case) -> Any:
    ring = {"buffer_len": case.replay.buffer_len, "ring_dtype": "float32"}
    text = SimpleNamespace(model_type="qwen3_5_text", linear_key_head_dim=4, linear_value_head_dim=4)
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    return SimpleNamespace(
        additional_config={"gdn_replay": ring},
        speculative_config=None,
        use_v2_model_runner=True,
        model_config=SimpleNamespace(hf_text_config=text, architecture="Qwen3_5ForCausalLM"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(mamba_cache_mode=case.cache.mode),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_ROWS),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs, max_cudagraph_capture_size=None),
        num_speculative_tokens=0,
    )


def _common_metadata(computed: IntArray, tokens: IntArray, base: IntArray, slots: IntArray) -> Any:
    """CommonAttentionMetadata as V2 makes it: a one-token chunk over existing state is not prefilling any more."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lens = torch.from_numpy(tokens).int()
    start = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
    seq_lens = torch.from_numpy(computed + tokens).int()
    # a FULL graph pads tokens like rows, one each
    num_tokens = max(int(tokens.sum()), len(tokens)) if tokens.max() == 1 else int(tokens.sum())
    blocks = int((computed + tokens).max()) + 1
    prefilling = (computed < base) & ~((tokens == 1) & (computed > 0))
    return CommonAttentionMetadata(
        # as on a GPU, not the host's memory
        query_start_loc=start.clone(),
        query_start_loc_cpu=start,
        seq_lens=seq_lens.clone(),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(tokens),
        num_actual_tokens=num_tokens,
        max_query_len=int(tokens.max()),
        max_seq_len=int((computed + tokens).max()),
        block_table_tensor=torch.from_numpy(slots).int()[:, None].expand(-1, blocks),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        is_prefilling=torch.from_numpy(prefilling),
    )
