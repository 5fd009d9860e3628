"""The faults of the decode op as edits of the Triton kernel, by name: the kernel's own source is interpreted."""

from __future__ import annotations

from .fault_form import Edit

_SLOT = "slot = tl.load(slots + i_r).to(tl.int64)"
_STORE_D = "tl.store(p_d + used * d_entry, b_delta.to(ring_d.dtype.element_ty), mask=m_v)"
_FOLDED = "(b_state * total * alpha + b_delta[:, None] * b_key[None, :]).to(state.dtype.element_ty)"
_FLUSH = "if tl.load(is_flush + i_r) != 0:"
_STORE_STATE = "tl.store(p_state, b_state.to(state.dtype.element_ty), mask=m_state)"


def _kernel(*changes: tuple[str, str]) -> tuple[Edit, ...]:
    return tuple(Edit("kernels.decode_triton:replay_decode_kernel", old, new) for old, new in changes)


# the ring's length is no argument of the kernel: it is the stride of a head of gates over that of an entry
TRITON: dict[str, tuple[Edit, ...]] = {
    "cursor.flush_early": _kernel((_FLUSH, "if used == g_head // g_entry - 2:")),
    "cursor.flush_late": _kernel((_FLUSH, "if used == g_head // g_entry:")),
    "slot.row_for_slot": _kernel((_SLOT, "slot = tl.where(tl.load(slots + i_r) > 0, i_r + 1, 0)")),
    "slot.null_write": _kernel(("if slot <= 0:", "if slot < 0:")),
    "slot.clamp_padding": _kernel((_SLOT, f"{_SLOT}; slot = tl.where(slot < 0, 1, slot)")),
    "ring.write_next": _kernel(
        ("tl.store(p_d + used * d_entry,", "tl.store(p_d + (used + 1) * d_entry,"),
        ("tl.store(p_g + used * g_entry,", "tl.store(p_g + (used + 1) * g_entry,"),
        ("tl.store(p_k + used * rk_entry,", "tl.store(p_k + (used + 1) * rk_entry,"),
    ),
    "ring.state_every_step": _kernel((_STORE_D, f"{_STORE_D}; tl.store(p_state, {_FOLDED}, mask=m_state)")),
    "ring.flush_keeps_entry": _kernel((_STORE_STATE, f"{_STORE_STATE}; {_STORE_D}")),
    "kernel.mask_le": _kernel(("m_l = o_l < used", "m_l = o_l <= used")),
    "kernel.decay_prefix": _kernel(("tl.where(o_l[None, :] > o_l[:, None],", "tl.where(o_l[None, :] <= o_l[:, None],")),
    "kernel.no_alpha": _kernel(("b_o = alpha * b_recalled_q +", "b_o = b_recalled_q +")),
    "kernel.checkpoint_only": _kernel(
        ("b_recalled_key += tl.sum(b_d * b_score_key[:, None], 0)", "b_recalled_key += 0.0")
    ),
    "kernel.head_map": _kernel(("(i_hv // GROUP).to(tl.int64)", "(i_hv % (tl.num_programs(1) // GROUP)).to(tl.int64)")),
    "kernel.slot_stride": _kernel(("state + slot * state_slot +", "state + slot * (tl.num_programs(1) * V * K) +")),
    "kernel.pad_output": _kernel(
        ("tl.store(p_out, tl.zeros([BLOCK_V], tl.float32).to(out.dtype.element_ty), mask=m_v)", "slot = slot")
    ),
    "kernel.scale_twice": _kernel(
        (
            "b_key = load_key_head(k + i_r * k_row + i_h * k_head, o_k, K, USE_QK_L2NORM)",
            "b_key = load_key_head(k + i_r * k_row + i_h * k_head, o_k, K, USE_QK_L2NORM) * scale",
        )
    ),
    "kernel.cumulative_gate": _kernel(
        ("tl.store(p_g + used * g_entry, g)", "tl.store(p_g + used * g_entry, g + tl.sum(b_g, 0))")
    ),
    "kernel.rounded_current": _kernel(
        (
            "b_delta = beta * (b_value - alpha * b_recalled_key)",
            "b_delta = (beta * (b_value - alpha * b_recalled_key)).to(ring_d.dtype.element_ty).to(tl.float32)",
        )
    ),
}
