"""The faults that are planted, by name: where each changes which source, at each level that can show it.

Names and public reports: cursor.* and adapter.* are wrong ring positions, slot.* wrong state slots, batch.* wrong
classification, ring.* wrong ring writes, kernel.* wrong arithmetic or memory in the decode op, graph.* (in
graph_faults.py, as adapter.*) old values that a FULL CUDA graph reads.
"""

from __future__ import annotations

from dataclasses import replace

from .fault_form import Edit, Fault, made
from .graph_faults import ADAPTERS, GRAPHS
from .sync_faults import SYNCS
from .triton_faults import TRITON

__all__ = ["FAULTS", "Edit", "Fault"]


def _everywhere(name: str, what: str, *edits: Edit) -> Fault:
    """A fault of the decode op, which every level runs."""
    return made(name, what, kernel=edits, schedule=edits, engine=edits)


def _cursor(old: str, new: str, function: str = "decode_cursor") -> dict[str, Edit]:
    """A fault of kernels/cursor.py, which the schedule and the engine level run."""
    edit = Edit(f"kernels.cursor:{function}", old, new)
    return {"schedule": edit, "engine": edit}


def _op(function: str, old: str, new: str) -> Edit:
    return Edit(f"kernels.decode_torch:{function}", old, new)


def _own_flush(condition: str) -> Edit:
    """The op decides by itself when to flush."""
    return _op("replay_decode", "asked = is_flush.to(torch.bool)", f"asked = {condition}")


_CURSORS = (
    made(
        "cursor.prompt_base",
        "decode base = prompt length after a resume (vllm #46239, #48018, #62004)",
        schedule=Edit(
            "harness.schedule_path:_Runner._handed_to_prefill",
            "return row.prefill_len",
            "return self.case.requests[row.request].prompt_len",
        ),
        # what a request was first admitted with is its prompt
        engine=Edit(
            "kernels.vllm_model_state:decode_base_snapshot",
            "torch.from_numpy(input_batch.prefill_len_np[: input_batch.num_reqs])",
            "torch.tensor([decode_base_snapshot.__dict__.setdefault(name, int(length)) for name, length in"
            " zip(input_batch.req_ids, input_batch.prefill_len_np)])",
        ),
    ),
    made(
        "cursor.flush_early",
        "flush at w == L - 2",
        kernel=_own_flush("used == ring_d.shape[2] - 2"),
        **_cursor("is_flush = write_pos == buffer_len - 1", "is_flush = write_pos == buffer_len - 2"),
    ),
    made(
        "cursor.flush_late",
        "flush at w == L",
        kernel=_own_flush("used == ring_d.shape[2]"),
        schedule=(
            Edit(
                "kernels.cursor:decode_cursor", "write_pos = steps % buffer_len", "write_pos = steps % (buffer_len + 1)"
            ),
            Edit(
                "kernels.cursor:decode_cursor",
                "is_flush = write_pos == buffer_len - 1",
                "is_flush = write_pos == buffer_len",
            ),
        ),
        engine=(
            Edit(
                "kernels.cursor:decode_cursor", "write_pos = steps % buffer_len", "write_pos = steps % (buffer_len + 1)"
            ),
            Edit(
                "kernels.cursor:decode_cursor",
                "is_flush = write_pos == buffer_len - 1",
                "is_flush = write_pos == buffer_len",
            ),
        ),
    ),
    made(
        "cursor.modulo",
        "steps % (L + 1)",
        **_cursor("write_pos = steps % buffer_len", "write_pos = steps % (buffer_len + 1)"),
    ),
    made(
        "cursor.base_plus_one", "base off by one", **_cursor("steps = computed - base", "steps = computed - base - 1")
    ),
    made(
        "cursor.leftover_append",
        "one-token prompt tail appended to the ring, not flushed (vllm #49847)",
        **_cursor("is_flush = is_flush | is_leftover", "is_flush = is_flush & ~is_leftover"),
    ),
    made(
        "cursor.fake_write_pos",
        "a forced flush sets write_pos = L - 1 and folds garbage (sglang #28511)",
        schedule=Edit(
            "kernels.cursor:decode_cursor",
            "is_flush = is_flush | _ends_block(computed, align_block)",
            "is_flush = is_flush | _ends_block(computed, align_block); "
            "write_pos = np.where(_ends_block(computed, align_block), buffer_len - 1, write_pos)",
        ),
    ),
    made(
        "cursor.align_no_max",
        "align anchors at the block start only (vllm #62004, #50000)",
        **_cursor("return np.maximum(base, block_start)", "return block_start", "_align_base"),
    ),
    made(
        "cursor.align_no_flush",
        "no flush at the block boundary (vllm #62004)",
        **_cursor("is_flush = is_flush | _ends_block(computed, align_block)", "is_flush = is_flush | False"),
    ),
    made(
        "cursor.align_wrong_block",
        "another layer's block size in place of the mamba one (vllm #53142, #55601)",
        schedule=Edit(
            "harness.schedule_path:ReplayRunner._decode",
            "block = self.case.cache.block_size if",
            "block = 2 * self.case.cache.block_size if",
        ),
        engine=Edit(
            "kernels.vllm_metadata:ReplayMetadataBuilder.__init__",
            "self.align_block = kv_cache_spec.block_size if",
            "self.align_block = 2 * kv_cache_spec.block_size if",
        ),
    ),
    made(
        "cursor.leftover_by_flag",
        "a one-token prompt tail is known by is_prefilling, which V2 clears for it",
        engine=Edit(
            "kernels.vllm_metadata:ReplayMetadataBuilder.build",
            "cursor = self._cursor(stock.num_decodes, num_computed, base, query_len)",
            "cursor = self._cursor(stock.num_decodes, num_computed, base if m.is_prefilling is None else "
            "np.where(m.is_prefilling[: m.num_reqs].numpy(), base, np.minimum(base, num_computed)), query_len)",
        ),
    ),
    made(
        "cursor.per_layer",
        "cursor advanced once a layer, not once a step (sglang #28511)",
        engine=Edit(
            "kernels.vllm_metadata:ReplayMetadataBuilder._cursor",
            "decodes = decode_cursor(num_computed[rows],",
            'decodes = decode_cursor(num_computed[rows] + int(self.layer_names[0].split(".")[2]),',
        ),
    ),
)

_SLOTS = (
    made(
        "batch.first_token_decode",
        "a one-token first chunk run as decode on a recycled slot (vllm #51562, #51565)",
        schedule=Edit(
            "kernels.cursor:runs_as_decode",
            "may_decode: BoolRows = is_single & has_state",
            "may_decode: BoolRows = is_single | (is_single & has_state)",
        ),
        engine=Edit(
            "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
            "no_prior_state &= m.is_prefilling",
            "no_prior_state &= m.is_prefilling & (query_lens_cpu > 1)",
        ),
    ),
    made(
        "slot.no_zero",
        "recycled state not zeroed for a first chunk (vllm #56524)",
        schedule=Edit("harness.layer_leg:LayerLeg.prefill", "rows.num_computed > 0", "rows.num_computed >= 0"),
        engine=Edit("kernels.vllm_cpu:_read_slot", "if not has_context:", "if not has_context and row < 0:"),
    ),
    made(
        "slot.keep_cursor",
        "ring position kept per slot across tenants (sglang #37837)",
        schedule=Edit(
            "harness.schedule_path:ReplayRunner._decode",
            "base = self.prefill_len[rows.request]",
            'kept = self.__dict__.setdefault("kept", {}); base = np.array([kept.setdefault(int(slot), int(own)) '
            "for slot, own in zip(rows.slot, self.prefill_len[rows.request])])",
        ),
    ),
    made(
        "slot.row_for_slot",
        "row index used as slot index",
        kernel=Edit(
            "harness.layer_leg:LayerLeg.replay",
            "padded(rows.slot, size, self.padding_slot)",
            "padded(np.arange(1, len(rows.slot) + 1), size, self.padding_slot)",
        ),
        schedule=Edit(
            "harness.layer_leg:LayerLeg.replay",
            "padded(rows.slot, size, self.padding_slot)",
            "padded(np.arange(1, len(rows.slot) + 1), size, self.padding_slot)",
        ),
    ),
    made(
        "slot.stale_after_resume",
        "resume into a new slot, the old one read (vllm #35157, vllm-metal #488)",
        schedule=Edit(
            "harness.schedule_path:ReplayRunner._decode",
            "self.leg.replay(step, rows,",
            'first = self.__dict__.setdefault("first", {}); self.leg.replay(step, StepRows(rows.order, rows.request, '
            "rows.num_computed, rows.num_tokens, np.array([first.setdefault(int(request), int(slot)) for request, slot "
            "in zip(rows.request, rows.slot)])),",
        ),
        # the first block of each request stays in its row of the table
        engine=Edit(
            "kernels.vllm_model_state:ReplayModelState.prepare_attn",
            "builder.replayssm_decode_base_cpu = base",
            "builder.replayssm_decode_base_cpu = base; table = block_tables[attn_groups.index(groups)]; "
            'first = decode_base_snapshot.__dict__.setdefault("first", {}); '
            "[table[row, :1].copy_(first.setdefault((id(builder), name), table[row, :1].clone())) "
            "for row, name in enumerate(input_batch.req_ids)]",
        ),
    ),
    made(
        "slot.null_write",
        "a padded row writes the NULL slot (vllm #33937)",
        kernel=_op("locate_rows", "live = slots > 0", "live = slots >= 0"),
        schedule=_op("locate_rows", "live = slots > 0", "live = slots >= 0"),
    ),
    made(
        "slot.clamp_padding",
        "-1 clamped to a slot that is live (tokenspeed #700)",
        kernel=_op("locate_rows", "live = slots > 0", "slots = torch.where(slots < 0, 1, slots); live = slots > 0"),
    ),
)

_RINGS = (
    _everywhere(
        "ring.write_next",
        "ring entry written at w + 1",
        _op(
            "put_entry",
            "entries.index_put_((slot, position),",
            "entries.index_put_((slot, torch.where(write, position + 1, position)),",
        ),
    ),
    _everywhere(
        "ring.state_every_step",
        "checkpoint also written on steps that do not flush",
        _op(
            "replay_decode",
            "put_rows(state, rows.slot, folded, stored, flush)",
            "put_rows(state, rows.slot, folded, stored, rows.live)",
        ),
    ),
    made(
        "ring.flush_keeps_entry",
        "a flush also writes the ring row",
        kernel=_op("replay_decode", "append = rows.live & ~asked", "append = rows.live"),
    ),
)

_KERNELS = (
    made(
        "kernel.mask_le",
        "valid is j <= w: one dead entry read",
        kernel=_op("read_ring", "valid = index < used[:, None]", "valid = index <= used[:, None]"),
    ),
    _everywhere(
        "kernel.decay_prefix",
        "exp(G_j) for exp(G - G_j)",
        _op("read_ring", "weight = torch.exp(decay_since(g))", "weight = torch.exp(g.cumsum(-1))"),
    ),
    _everywhere(
        "kernel.no_alpha",
        "current alpha left out of S q",
        _op("attend", "return token.alpha * recalled + delta * overlap", "return recalled + delta * overlap"),
    ),
    _everywhere(
        "kernel.checkpoint_only",
        "d computed from the checkpoint, ring ignored",
        _op(
            "replay_decode",
            "delta = corrected_value(token, recall(checkpoint, pending, token.k))",
            "delta = corrected_value(token, pending.total * read_state(checkpoint, token.k))",
        ),
    ),
    _everywhere(
        "kernel.head_map",
        "h = hv % H for hv // (HV // H)",
        _op("key_head_of", "return value_head // (num_v_heads // num_k_heads)", "return value_head % num_k_heads"),
    ),
    made(
        "kernel.slot_stride",
        "contiguous slots assumed, pages are strided (research fork a60d5ebf1)",
        kernel=_op(
            "replay_decode",
            "stored = state.index_select(0, rows.slot)",
            'stored = state.as_strided(state.shape, torch.empty(state.shape, device="meta").stride(), '
            "state.storage_offset()).index_select(0, rows.slot)",
        ),
    ),
    made(
        "kernel.pad_output",
        "padded rows leave their output unwritten (sglang #30974)",
        kernel=_op(
            "write_output",
            "out.copy_(torch.where(live[:, None, None], value, 0.0))",
            "out.copy_(torch.where(live[:, None, None], value.to(out.dtype), out))",
        ),
    ),
    _everywhere(
        "kernel.scale_twice",
        "K**-0.5 applied to k as well",
        _op("prepare_token", "k=key.index_select(1, head),", "k=key.index_select(1, head) * scale,"),
    ),
    _everywhere(
        "kernel.cumulative_gate",
        "cumulative gate stored, replayed as per-step",
        _op(
            "replay_decode",
            "put_entry(ring_g, rows.slot, used, token.g, append)",
            "put_entry(ring_g, rows.slot, used, token.g + pending.total[..., 0].log(), append)",
        ),
    ),
    made(
        "kernel.rounded_current",
        "current d and k rounded to the ring dtype before use",
        kernel=_op(
            "replay_decode",
            "delta = corrected_value(token, recall(checkpoint, pending, token.k))",
            "delta = corrected_value(token, recall(checkpoint, pending, token.k)).to(ring_d.dtype).float()",
        ),
    ),
)

FAULTS: dict[str, Fault] = {
    entry.name: replace(entry, triton=TRITON.get(entry.name, ()))
    for entry in (*_CURSORS, *_SLOTS, *_RINGS, *_KERNELS, *ADAPTERS, *GRAPHS, *SYNCS)
}
