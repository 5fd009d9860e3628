"""GDN decode in torch: every row of a step at once, float32 inside, no host read of a device value.

Two formulations of the same token (Gated DeltaNet: arXiv 2412.06464; ReplaySSM for GDN: vLLM #48792, #62004):

- `packed_decode` carries the state and writes it each step: the baseline.
- `replay_decode` reads a checkpoint state and a ring of pending tokens, and writes the state on a flush only.

Where a row must not write. Choosing rows by a mask on the host would be a host read, so every row goes through one
scatter, and a row that must not write puts back the very bytes it read, in the stored dtype (NaN payloads included).
Padding rows do so at slot 0, the NULL slot, which no live row may name: live slots are positive and distinct.

Bits of a row do not depend on its neighbours or on the number of rows. Dot products are an elementwise product and a
sum over the last axes; the rank-L update of a flush is a batched product whose matrices do not mix rows. The gates are
built from exp and log1p: on a CPU torch's own sigmoid and softplus round differently in the last, incomplete vector of
a tensor, so that a row's gate would depend on where in the batch the row stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

L2_NORM_EPS = 1e-6
SOFTPLUS_THRESHOLD = 20.0


@dataclass(frozen=True, eq=False)
class Token:
    """The current token of each row, float32.

    q [R, HV, K] scaled by K**-0.5, k [R, HV, K]: normalised, one copy per value head. key [R, H, K]: k as it is stored.
    v [R, HV, V]; g [R, HV] log decay, at most 0; alpha = exp(g) and beta [R, HV, 1].
    """

    q: torch.Tensor
    k: torch.Tensor
    key: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Where each row lives. slot [R] int64, 0 for padding; live [R] bool."""

    slot: torch.Tensor
    live: torch.Tensor


@dataclass(frozen=True, eq=False)
class Pending:
    """The ring as the current token sees it, float32, dead entries zero.

    d [R, HV, L, V]; k [R, HV, L, K]; weight [R, HV, L] = exp(G - G_j), the decay of entry j since it was written;
    total [R, HV, 1] = exp(G), the decay of the checkpoint since the last flush.
    """

    d: torch.Tensor
    k: torch.Tensor
    weight: torch.Tensor
    total: torch.Tensor


@torch.no_grad()
def replay_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    ring_d: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    slots: torch.Tensor,
    write_pos: torch.Tensor,
    is_flush: torch.Tensor,
    out: torch.Tensor,
    use_qk_l2norm: bool,
) -> None:
    """Decode one token per row from checkpoint and ring; shapes as in `decode.gdn_replay_decode`, unchecked here."""
    rows = locate_rows(slots)
    head = key_head_of(q.shape[1], v.shape[1], q.device)
    token = prepare_token(q, k, v, a, b, A_log, dt_bias, head, use_qk_l2norm)
    used = torch.where(rows.live, write_pos.to(torch.int64), 0)
    asked = is_flush.to(torch.bool)
    flush = rows.live & asked
    append = rows.live & ~asked

    stored = state.index_select(0, rows.slot)
    checkpoint = stored.float()
    pending = read_ring(ring_d, ring_k, ring_g, rows.slot, used, head)
    delta = corrected_value(token, recall(checkpoint, pending, token.k))
    write_output(out, attend(token, recall(checkpoint, pending, token.q), delta), rows.live)

    folded = fold(checkpoint, pending, token, delta)
    put_rows(state, rows.slot, folded, stored, flush)
    put_entry(ring_d, rows.slot, used, delta, append)
    put_entry(ring_k, rows.slot, used, token.key, append)
    put_entry(ring_g, rows.slot, used, token.g, append)


@torch.no_grad()
def packed_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
    use_qk_l2norm: bool,
) -> None:
    """Decode one token per row from a state written each step; shapes as in `decode.gdn_packed_decode`."""
    rows = locate_rows(slots)
    head = key_head_of(q.shape[1], v.shape[1], q.device)
    token = prepare_token(q, k, v, a, b, A_log, dt_bias, head, use_qk_l2norm)
    stored = state.index_select(0, rows.slot)
    decayed = stored.float() * token.alpha[..., None]
    delta = token.beta * (token.v - read_state(decayed, token.k))
    updated = decayed + outer(delta, token.k)
    write_output(out, read_state(updated, token.q), rows.live)
    put_rows(state, rows.slot, updated, stored, rows.live)


def locate_rows(slots: torch.Tensor) -> Rows:
    """Split slots into live ones and padding: 0 is the NULL block, -1 marks an unused row."""
    live = slots > 0
    slot = torch.where(live, slots.to(torch.int64), 0)
    return Rows(slot=slot, live=live)


def prepare_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    head: torch.Tensor,
    use_qk_l2norm: bool,
) -> Token:
    """Bring a token's inputs into float32: normalise, scale, spread key heads over value heads, form the gates."""
    query = l2_normalised(q.float()) if use_qk_l2norm else q.float()
    key = l2_normalised(k.float()) if use_qk_l2norm else k.float()
    scale = q.shape[-1] ** -0.5
    g = log_decay(a, A_log, dt_bias)
    return Token(
        q=query.index_select(1, head) * scale,
        k=key.index_select(1, head),
        key=key,
        v=v.float(),
        g=g,
        alpha=torch.exp(g)[..., None],
        beta=write_strength(b)[..., None],
    )


def key_head_of(num_k_heads: int, num_v_heads: int, device: torch.device) -> torch.Tensor:
    """Key head that each value head reads, [HV]."""
    value_head = torch.arange(num_v_heads, device=device)
    return value_head // (num_v_heads // num_k_heads)


def l2_normalised(x: torch.Tensor) -> torch.Tensor:
    """Divide by sqrt(sum of squares + 1e-6) over the last axis. A true division: 64 / 64 is exactly 1."""
    squares = (x * x).sum(-1, keepdim=True)
    return x / torch.sqrt(squares + L2_NORM_EPS)


def log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log decay of the token, g = -exp(A_log) * softplus(a + dt_bias), [R, HV], at most 0."""
    x = a.float() + dt_bias.float()
    step = torch.where(x > SOFTPLUS_THRESHOLD, x, torch.log1p(torch.exp(x)))
    return -torch.exp(A_log.float()) * step


def write_strength(b: torch.Tensor) -> torch.Tensor:
    """Write strength beta = sigmoid(b), [R, HV]; float32, since rounding it to bfloat16 was a bug (vLLM #53877)."""
    return 1.0 / (1.0 + torch.exp(-b.float()))


def read_ring(
    ring_d: torch.Tensor,
    ring_k: torch.Tensor,
    ring_g: torch.Tensor,
    slot: torch.Tensor,
    used: torch.Tensor,
    head: torch.Tensor,
) -> Pending:
    """Read the pending entries of each row and the decay each has seen since it was written."""
    index = torch.arange(ring_g.shape[-1], device=slot.device)
    valid = index < used[:, None]
    # dead entries are garbage, and 0 * NaN is NaN: replace before anything is multiplied
    d = torch.where(valid[:, None, :, None], ring_d.index_select(0, slot).float(), 0.0)
    key = torch.where(valid[:, None, :, None], ring_k.index_select(0, slot).float(), 0.0)
    g = torch.where(valid[:, None, :], ring_g.index_select(0, slot), 0.0)
    weight = torch.exp(decay_since(g))
    total = torch.exp(g.sum(-1, keepdim=True))
    return Pending(d=d, k=key.index_select(1, head), weight=weight, total=total)


def decay_since(g: torch.Tensor) -> torch.Tensor:
    """Log decay after each entry, G - G_j = g_{j+1} + ... + g_{w-1}, [R, HV, L]; dead entries of g are 0.

    Summed from the newest entry back rather than as a difference of prefix sums: after a forgetting token
    (g = -1000) the difference would keep only the fourth decimal of its younger entries' log decay.
    """
    later = F.pad(g[..., 1:], (0, 1))
    return later.flip(-1).cumsum(-1).flip(-1)


def recall(checkpoint: torch.Tensor, pending: Pending, x: torch.Tensor) -> torch.Tensor:
    """Read the state before this token, S_before x, [R, HV, V], without forming it. x [R, HV, K]."""
    from_checkpoint = pending.total * read_state(checkpoint, x)
    score = (pending.k * x[:, :, None, :]).sum(-1)
    from_ring = (pending.d * (pending.weight * score)[..., None]).sum(-2)
    return from_checkpoint + from_ring


def corrected_value(token: Token, recalled: torch.Tensor) -> torch.Tensor:
    """Delta rule, d = beta * (v - alpha * S_before k), [R, HV, V]; used unrounded for this step and its flush."""
    return token.beta * (token.v - token.alpha * recalled)


def attend(token: Token, recalled: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Output o = alpha * S_before q + d (k . q), [R, HV, V]; recalled is S_before q."""
    overlap = (token.k * token.q).sum(-1, keepdim=True)
    return token.alpha * recalled + delta * overlap


def fold(checkpoint: torch.Tensor, pending: Pending, token: Token, delta: torch.Tensor) -> torch.Tensor:
    """State after this token, alpha * S_before + d k^T, [R, HV, V, K]: what a flush stores."""
    weighted = pending.d * pending.weight[..., None]
    before = torch.matmul(weighted.transpose(-1, -2), pending.k)
    before.addcmul_(checkpoint, pending.total[..., None])
    after = before.mul_(token.alpha[..., None])
    return after.addcmul_(delta[..., None], token.k[:, :, None, :])


def read_state(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Product S x of state [R, HV, V, K] and x [R, HV, K], as [R, HV, V]."""
    return (state * x[:, :, None, :]).sum(-1)


def outer(d: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Outer product d k^T, [R, HV, V, K]."""
    return d[..., None] * k[:, :, None, :]


def write_output(out: torch.Tensor, value: torch.Tensor, live: torch.Tensor) -> None:
    """Round into out [R, HV, V]; padding rows become zero, whatever out and the NULL slot held."""
    out.copy_(torch.where(live[:, None, None], value, 0.0))


def put_rows(
    state: torch.Tensor, slot: torch.Tensor, value: torch.Tensor, stored: torch.Tensor, write: torch.Tensor
) -> None:
    """Store value at each row's slot where write is set, elsewhere the bytes that stood there."""
    rounded = value.to(state.dtype)
    state.index_put_((slot,), torch.where(write[:, None, None, None], rounded, stored))


def put_entry(
    ring: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, value: torch.Tensor, write: torch.Tensor
) -> None:
    """Store value as entry `position` of ring [N, heads, L, ...] where write is set, elsewhere what stood there."""
    # axis of entries beside the axis of slots: a view of the caller's storage
    entries = ring.transpose(1, 2)
    stored = entries[slot, position]
    rounded = value.to(ring.dtype)
    mask = write.view(-1, *[1] * (rounded.dim() - 1))
    entries.index_put_((slot, position), torch.where(mask, rounded, stored))
