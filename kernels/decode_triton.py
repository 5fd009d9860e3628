"""GDN decode in Triton: one program per (tile of the value axis, value head, row), float32 inside.

The same token as `decode_torch` (Gated DeltaNet: arXiv 2412.06464; ReplaySSM for GDN: vLLM #48792, #62004).
Pointers p_, blocks b_, offsets o_, masks m_, program indices i_. Tiles cover axes that are no power of two by masks.
Launching, with the choice of tile sizes, is `decode_launch`.

What a program moves. The state tile once; of the ring its own tile of d, and the keys and gates of its head. So each
key entry is read once per value head and tile, which is why a tile should span much of the value axis. Where an entry
is appended, every program writes its tile of d; gates are written by tile 0 of each value head, keys by tile 0 of the
first value head of each key head. No program reads the entry that a step writes: the current token is in registers.

No tensor cores: products are elementwise with a sum, in float32, so that no setting can lower their precision and a
ring of any length will do.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_NORM_EPS: tl.constexpr = tl.constexpr(1e-6)
SOFTPLUS_THRESHOLD: tl.constexpr = tl.constexpr(20.0)


@triton.jit  # type: ignore[untyped-decorator]
def inside(o_x: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Mask of an axis; a constant where tiles cover the axis exactly, so that no access carries a predicate."""
    if SIZE % o_x.shape[0] == 0:
        return tl.full(o_x.shape, True, tl.int1)
    else:
        return o_x < SIZE


@triton.jit  # type: ignore[untyped-decorator]
def load_key_head(p_x: tl.tensor, o_k: tl.tensor, K: tl.constexpr, USE_QK_L2NORM: tl.constexpr) -> tl.tensor:
    """One head of q or k [BLOCK_K], normalised where asked. IEEE division and root: 64 / 64 is exactly 1."""
    b_x = tl.load(p_x + o_k, mask=inside(o_k, K), other=0.0).to(tl.float32)
    if USE_QK_L2NORM:
        b_x = tl.div_rn(b_x, tl.sqrt_rn(tl.sum(b_x * b_x, 0) + L2_NORM_EPS))
    return b_x


@triton.jit  # type: ignore[untyped-decorator]
def softplus(x: tl.tensor) -> tl.tensor:
    """max(x, 0) + log1p(exp(-|x|)), linear above 20; log1p(e) = 2 artanh(e / (2 + e)) by its series.

    The argument of artanh is at most 1/3, where eight terms leave 2e-9 of the sum. A device's fast logarithm has an
    absolute error of 2e-7 near 1: with the small time steps of trained gates (3e-3) that is the fourth digit of a
    token's decay.
    """
    e = tl.exp(-tl.abs(x))
    z = tl.div_rn(e, 2.0 + e)
    y = z * z
    series = 1.0 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13 + y * (1 / 15)))))))
    return tl.where(x > SOFTPLUS_THRESHOLD, x, tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit  # type: ignore[untyped-decorator]
def log_decay(p_a: tl.tensor, p_A_log: tl.tensor, p_dt_bias: tl.tensor) -> tl.tensor:
    """Log decay of the token, g = -exp(A_log) * softplus(a + dt_bias), at most 0."""
    x = tl.load(p_a).to(tl.float32) + tl.load(p_dt_bias).to(tl.float32)
    return -tl.exp(tl.load(p_A_log).to(tl.float32)) * softplus(x)


@triton.jit  # type: ignore[untyped-decorator]
def write_strength(p_b: tl.tensor) -> tl.tensor:
    """Write strength, sigmoid(b); float32, since rounding it to bfloat16 was a bug (vLLM #53877)."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(p_b).to(tl.float32)))


@triton.jit  # type: ignore[untyped-decorator]
def matvec(b_s: tl.tensor, b_x: tl.tensor) -> tl.tensor:
    """Product of b_s [M, N] and b_x [N], as [M]."""
    return tl.sum(b_s * b_x[None, :], 1)


@triton.jit  # type: ignore[untyped-decorator]
def replay_decode_kernel(  # type: ignore[no-untyped-def]
    q, k, v, a, b, A_log, dt_bias, state, ring_d, ring_k, ring_g, slots, write_pos, is_flush, out,
    q_row, q_head, k_row, k_head, v_row, v_head, a_row, b_row, out_row, out_head,
    state_slot, state_head, state_v, state_k, d_slot, d_head, d_entry, d_v,
    rk_slot, rk_head, rk_entry, rk_k, g_slot, g_head, g_entry,
    scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_L: tl.constexpr, USE_QK_L2NORM: tl.constexpr,
):  # fmt: skip
    """Decode one token per row from checkpoint and ring; grid (tiles of V, HV, R).

    Tensors as in `decode.gdn_replay_decode`; a name with an axis is the stride of that axis in elements, and axes that
    have none (the last of q, k, v, a, b and out) are contiguous. GROUP = HV // H. scale = K**-0.5.
    """
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    # rows, heads and slots are multiplied by strides of any size
    i_r = tl.program_id(2).to(tl.int64)
    i_h = (i_hv // GROUP).to(tl.int64)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    o_l = tl.arange(0, BLOCK_L)
    m_v = inside(o_v, V)
    m_k = inside(o_k, K)
    p_out = out + i_r * out_row + i_hv * out_head + o_v
    slot = tl.load(slots + i_r).to(tl.int64)
    if slot <= 0:
        tl.store(p_out, tl.zeros([BLOCK_V], tl.float32).to(out.dtype.element_ty), mask=m_v)
        return

    # asked for first: by far the most bytes
    m_state = m_v[:, None] & m_k[None, :]
    p_state = state + slot * state_slot + i_hv.to(tl.int64) * state_head
    p_state += o_v[:, None] * state_v + o_k[None, :] * state_k
    b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)

    used = tl.load(write_pos + i_r).to(tl.int32)
    p_d = ring_d + slot * d_slot + i_hv.to(tl.int64) * d_head + o_v * d_v
    p_k = ring_k + slot * rk_slot + i_h * rk_head + o_k * rk_k
    p_g = ring_g + slot * g_slot + i_hv.to(tl.int64) * g_head
    m_l = o_l < used
    b_g = tl.load(p_g + o_l * g_entry, mask=m_l, other=0.0)
    total = tl.exp(tl.sum(b_g, 0))

    b_q = load_key_head(q + i_r * q_row + i_h * q_head, o_k, K, USE_QK_L2NORM) * scale
    b_key = load_key_head(k + i_r * k_row + i_h * k_head, o_k, K, USE_QK_L2NORM)
    b_value = tl.load(v + i_r * v_row + i_hv * v_head + o_v, mask=m_v, other=0.0).to(tl.float32)
    g = log_decay(a + i_r * a_row + i_hv, A_log + i_hv, dt_bias + i_hv)
    alpha = tl.exp(g)
    beta = write_strength(b + i_r * b_row + i_hv)

    if tl.load(is_flush + i_r) != 0:
        # the state before this token, formed from the newest entry back: each entry's decay is the sum of later gates
        b_state *= total
        since = 0.0
        for back in tl.range(used, loop_unroll_factor=2):
            entry = used - 1 - back
            b_entry = tl.load(p_d + entry * d_entry, mask=m_v, other=0.0).to(tl.float32) * tl.exp(since)
            b_state += b_entry[:, None] * tl.load(p_k + entry * rk_entry, mask=m_k, other=0.0).to(tl.float32)[None, :]
            since += tl.load(p_g + entry * g_entry)
        b_state *= alpha
        b_delta = beta * (b_value - matvec(b_state, b_key))
        b_state += b_delta[:, None] * b_key[None, :]
        tl.store(p_out, matvec(b_state, b_q).to(out.dtype.element_ty), mask=m_v)
        tl.store(p_state, b_state.to(state.dtype.element_ty), mask=m_state)
    else:
        # asked for while the state is on its way. dead entries are zero
        b_keys = tl.load(p_k[None, :] + o_l[:, None] * rk_entry, mask=m_l[:, None] & m_k[None, :], other=0.0)
        b_d = tl.load(p_d[None, :] + o_l[:, None] * d_entry, mask=m_l[:, None] & m_v[None, :], other=0.0)
        b_recalled_key = total * matvec(b_state, b_key)
        b_recalled_q = total * matvec(b_state, b_q)
        # decay since each entry, summed over the later gates: a difference of prefix sums would lose its digits
        # behind a forgetting token
        b_weight = tl.exp(tl.sum(tl.where(o_l[None, :] > o_l[:, None], b_g[None, :], 0.0), 1))
        b_keys = b_keys.to(tl.float32)
        b_d = b_d.to(tl.float32)
        b_score_key = b_weight * matvec(b_keys, b_key)
        b_score_q = b_weight * matvec(b_keys, b_q)
        b_recalled_key += tl.sum(b_d * b_score_key[:, None], 0)
        b_recalled_q += tl.sum(b_d * b_score_q[:, None], 0)
        b_delta = beta * (b_value - alpha * b_recalled_key)
        b_o = alpha * b_recalled_q + b_delta * tl.sum(b_key * b_q, 0)
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=m_v)
        tl.store(p_d + used * d_entry, b_delta.to(ring_d.dtype.element_ty), mask=m_v)
        if i_v == 0:
            tl.store(p_g + used * g_entry, g)
            if i_hv % GROUP == 0:
                tl.store(p_k + used * rk_entry, b_key.to(ring_k.dtype.element_ty), mask=m_k)


@triton.jit  # type: ignore[untyped-decorator]
def packed_decode_kernel(  # type: ignore[no-untyped-def]
    q, k, v, a, b, A_log, dt_bias, state, slots, out,
    q_row, q_head, k_row, k_head, v_row, v_head, a_row, b_row, out_row, out_head,
    state_slot, state_head, state_v, state_k,
    scale,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, USE_QK_L2NORM: tl.constexpr,
):  # fmt: skip
    """Decode one token per row from a state written each step; grid and arguments as in `replay_decode_kernel`."""
    i_v = tl.program_id(0)
    i_hv = tl.program_id(1)
    i_r = tl.program_id(2).to(tl.int64)
    i_h = (i_hv // GROUP).to(tl.int64)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    m_v = inside(o_v, V)
    m_k = inside(o_k, K)
    p_out = out + i_r * out_row + i_hv * out_head + o_v
    slot = tl.load(slots + i_r).to(tl.int64)
    if slot <= 0:
        tl.store(p_out, tl.zeros([BLOCK_V], tl.float32).to(out.dtype.element_ty), mask=m_v)
        return

    m_state = m_v[:, None] & m_k[None, :]
    p_state = state + slot * state_slot + i_hv.to(tl.int64) * state_head
    p_state += o_v[:, None] * state_v + o_k[None, :] * state_k
    b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)

    b_q = load_key_head(q + i_r * q_row + i_h * q_head, o_k, K, USE_QK_L2NORM) * scale
    b_key = load_key_head(k + i_r * k_row + i_h * k_head, o_k, K, USE_QK_L2NORM)
    b_value = tl.load(v + i_r * v_row + i_hv * v_head + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_state *= tl.exp(log_decay(a + i_r * a_row + i_hv, A_log + i_hv, dt_bias + i_hv))
    b_delta = write_strength(b + i_r * b_row + i_hv) * (b_value - matvec(b_state, b_key))
    b_state += b_delta[:, None] * b_key[None, :]
    tl.store(p_out, matvec(b_state, b_q).to(out.dtype.element_ty), mask=m_v)
    tl.store(p_state, b_state.to(state.dtype.element_ty), mask=m_state)
