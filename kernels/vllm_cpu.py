"""Causal convolution and prefill of one GDN layer in torch, for a CPU; no vLLM in here.

Plain formulations in float32 whatever the activation dtype, because stock CPU kernels take bfloat16 only.
Decode functions take no host decision from a tensor, so a captured step can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

L2_NORM_EPS = 1e-6


def conv_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    """Causal conv1d and SiLU of one token per row; returns [R, D] in x's dtype, the state moves on by one token.

    x [R, D]; conv_state [N, D, W-1] of any strides, updated in place; weight [D, W]; bias [D] or None; slots [R].
    Rows with slots <= 0 are padding and leave every byte as it was.
    """
    live = slots > 0
    slot = torch.where(live, slots, 0).to(torch.int64)
    stored = conv_state.index_select(0, slot)
    window = torch.cat([stored.float(), x.float().unsqueeze(-1)], dim=-1)
    y = (window * weight.float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    moved = window[..., 1:].to(conv_state.dtype)
    conv_state.index_copy_(0, slot, torch.where(live[:, None, None], moved, stored))
    return F.silu(y).to(x.dtype)


def conv_prefill(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: torch.Tensor,
    query_lens: Sequence[int],
    has_context: Sequence[bool],
) -> torch.Tensor:
    """Causal conv1d and SiLU of whole chunks; returns [T, D] in x's dtype and leaves each chunk's end in the state.

    x [T, D]: the chunks one after another, ``query_lens`` tokens each; other shapes as in `conv_update`. A chunk
    without context starts from zeros: its slot still holds a former request.
    """
    kernel = weight.float()[:, None, :]
    offset = None if bias is None else bias.float()
    outputs = []
    start = 0
    for row, (length, context) in enumerate(zip(query_lens, has_context, strict=True)):
        tokens = x[start : start + length].float().transpose(0, 1)
        before = _read_slot(conv_state, slots, row, context)
        window = torch.cat([before, tokens], dim=-1)
        y = F.conv1d(window[None], kernel, offset, groups=len(window))
        outputs.append(F.silu(y[0]).transpose(0, 1))
        _write_slot(conv_state, slots, row, window[:, length:])
        start += length
    return torch.cat(outputs).to(x.dtype)


def delta_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    query_lens: Sequence[int],
    has_context: Sequence[bool],
) -> torch.Tensor:
    """Gated delta rule over whole chunks, token by token; returns [T, HV, V] float32, final states go to ``state``.

    q, k [T, H, K], v [T, HV, V], a, b [T, HV]; A_log, dt_bias [HV]; state [N, HV, V, K] of any strides.
    Formulas: Gated DeltaNet (arXiv 2412.06464); q and k are normalised here.
    """
    group = v.shape[1] // q.shape[1]
    query = _unit(q).repeat_interleave(group, dim=1) * q.shape[-1] ** -0.5
    key = _unit(k).repeat_interleave(group, dim=1)
    g = -torch.exp(A_log.float()) * F.softplus(a.float() + dt_bias.float())
    alpha, beta = torch.exp(g)[..., None], torch.sigmoid(b.float())[..., None]
    value = v.float()
    out = torch.empty(value.shape, dtype=torch.float32, device=v.device)
    start = 0
    for row, (length, context) in enumerate(zip(query_lens, has_context, strict=True)):
        S = _read_slot(state, slots, row, context)
        for t in range(start, start + length):
            S = S * alpha[t][..., None]
            kt = key[t][..., None]
            d = beta[t] * (value[t] - (S @ kt)[..., 0])
            S = S + d[..., None] * key[t][:, None, :]
            out[t] = (S @ query[t][..., None])[..., 0]
        _write_slot(state, slots, row, S)
        start += length
    return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_NORM_EPS)


def _read_slot(pages: torch.Tensor, slots: torch.Tensor, row: int, has_context: bool) -> torch.Tensor:
    if not has_context:
        return torch.zeros(pages.shape[1:], dtype=torch.float32, device=pages.device)
    return pages.index_select(0, slots[row : row + 1].clamp(min=0))[0].float()


def _write_slot(pages: torch.Tensor, slots: torch.Tensor, row: int, value: torch.Tensor) -> None:
    """Store into the row's page; a padding slot (0 or below) keeps its bytes."""
    live = slots[row : row + 1] > 0
    slot = slots[row : row + 1].clamp(min=0).to(torch.int64)
    stored = pages.index_select(0, slot)
    live = live.view(-1, *[1] * (stored.dim() - 1))
    pages.index_copy_(0, slot, torch.where(live, value.to(pages.dtype)[None], stored))
