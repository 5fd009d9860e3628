"""Faults that only a whole engine can have: in what Model Runner V2 is told, and in what a FULL CUDA graph reads.

Three of the public list are equivalent mutants here and left out:

- adapter.live_view (a view of the live array of prefill lengths in place of a copy): the builder turns the base into
  cursors inside the very call that sets it, so nothing can change the array between.
- adapter.no_zero_fill (the base's padded tail keeps old values): a padded row has query_len 0, and such a row gets
  write_pos 0 and no flush whatever its base is.
- kernel.pad_output (padded rows leave their output unwritten), which the kernel level catches: vLLM's forward hands the
  op a tensor that it fills with zeros in the same step, inside a graph too, so an unwritten row is zero all the same.
"""

from __future__ import annotations

from .fault_form import Edit, Fault, made

_BUILDER = "kernels.vllm_metadata:ReplayMetadataBuilder"
_STOCK_BUILDER = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder"
_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"


def _after_capture(name: str, what: str, edit: Edit) -> Fault:
    """A fault that is one only where the graphs were captured without it."""
    return Fault(name, what, {"engine": ()}, after_capture=(edit,))


ADAPTERS = (
    made(
        "adapter.request_order",
        "decode base in the order of requests, not of the batch",
        engine=Edit(
            "kernels.vllm_model_state:decode_base_snapshot",
            "input_batch.prefill_len_np[: input_batch.num_reqs]",
            "input_batch.prefill_len_np[input_batch.idx_mapping_np.argsort()]",
        ),
    ),
    Fault(
        "adapter.none",
        "only the guard relaxed: no decode base reaches the builder",
        {
            "engine": (
                Edit(
                    "kernels.vllm_model:ReplayDecode.get_model_state_cls",
                    "MambaHybridModelState if self.replay is None else ReplayModelState",
                    "MambaHybridModelState",
                ),
            )
        },
        refusal="no decode base reached the GDN replay builder for this step",
    ),
)

GRAPHS = (
    # with it from the start the graphs read the block table itself, which is right
    _after_capture(
        "graph.no_stage",
        "state indices not copied into the buffer that was captured",
        Edit(f"{_STOCK_BUILDER}._stage_decode", "and num_prefills == 0", "and num_prefills < 0"),
    ),
    _after_capture(
        "graph.stage_on_count",
        "state indices copied only when the number of decode rows changes",
        Edit(
            f"{_STOCK_BUILDER}.build",
            "self.non_spec_state_indices_tensor[:num_decodes].copy_(",
            "(torch.empty_like(non_spec_state_indices_tensor) if self.__dict__.get('staged') == num_decodes else "
            "self.__dict__.update(staged=num_decodes) or self.non_spec_state_indices_tensor[:num_decodes]).copy_(",
        ),
    ),
    # planted later the graphs would read the buffer, which is still written
    made(
        "graph.new_cursor_tensor",
        "write_pos a fresh tensor each step: the graph keeps the first",
        engine=Edit(
            f"{_BUILDER}._extend",
            "write_pos=self.write_pos[: m.num_reqs],",
            "write_pos=self.write_pos[: m.num_reqs].clone(),",
        ),
    ),
    made(
        "graph.stale_flag",
        "is_flush not refreshed",
        engine=Edit(f"{_BUILDER}._stage", "async_tensor_h2d(is_flush, out=self.is_flush)", "is_flush.any()"),
    ),
    made(
        "graph.padded_table",
        "padded rows of the block table keep old blocks",
        engine=Edit(
            f"{_TABLES}.gather_block_tables",
            "_gather_block_tables_kernel[(self.num_kv_cache_groups, num_reqs_padded)]",
            "_gather_block_tables_kernel[(self.num_kv_cache_groups, num_reqs)]",
        ),
    ),
    made(
        "graph.capture_advances",
        "capture runs on real blocks and writes their state",
        engine=Edit(
            f"{_TABLES}.get_dummy_block_tables", "block_table[:num_reqs].zero_()", "block_table[:num_reqs].fill_(1)"
        ),
    ),
)
