"""The spec: one Gated DeltaNet layer, token by token, float32 or float64.

Source of the formula: Gated Delta Networks (arXiv:2412.06464), with the gate, the inner L2 norm and the query scale
as Qwen3.5 uses them. Per value head hv with key head h = hv // (HV // H) and state S [V, K]:

    g = -exp(A_log) * softplus(a + dt_bias)     alpha = exp(g)     beta = sigmoid(b)
    S = alpha * S;   d = beta * (v - S k);   S = S + d k^T;   o = S (q * K**-0.5)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import softplus

L2_EPS = 1e-6


def gdn_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    initial_state: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (o [B, HV, V], S [B, HV, V, K]) after each token, in ``dtype``; S is the state that includes the token.

    q, k [B, T, H, K] after convolution and SiLU; v [B, T, HV, V]; a, b [B, T, HV]; A_log, dt_bias [HV];
    initial_state [B, HV, V, K] or None for zeros. The B sequences are independent of each other. Inputs may be of any
    float type: they are cast up once and never rounded again. A yielded tensor is never written afterwards.
    Raises ValueError, on the first step, for shapes that do not fit and for any other ``dtype``.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    _check_shapes(q, k, v, a, b, A_log, dt_bias, initial_state)
    B, T, H, K = k.shape
    HV, V = v.shape[2:]

    q, k = (_l2_normalised(x.to(dtype)).repeat_interleave(HV // H, dim=2) for x in (q, k))
    q = q * K**-0.5
    v, a, b, A, dt_bias = v.to(dtype), a.to(dtype), b.to(dtype), torch.exp(A_log.to(dtype)), dt_bias.to(dtype)

    S = v.new_zeros(B, HV, V, K) if initial_state is None else initial_state.to(dtype)
    for t in range(T):
        q_t, k_t = q[:, t, :, None, :], k[:, t, :, None, :]
        # gates token by token on a dense [B, HV]: over the whole sequence, the last bit of an exp would depend on where
        # the vectorised loop ends, that is, on how many tokens the caller passes at once
        alpha = torch.exp(-A * softplus((a[:, t] + dt_bias).contiguous(), threshold=20.0))
        beta = torch.sigmoid(b[:, t].contiguous())
        S = alpha[..., None, None] * S
        # product and sum, not matmul: no backend may lower the precision of it
        d = beta[..., None] * (v[:, t] - (S * k_t).sum(-1))
        S = S + d[..., None] * k_t
        yield (S * q_t).sum(-1), S


def gdn_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    initial_state: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Outputs of all tokens of ``gdn_recurrence``, [B, T, HV, V] in ``dtype``."""
    steps = gdn_recurrence(q, k, v, a, b, A_log, dt_bias, initial_state=initial_state, dtype=dtype)
    outputs = [o for o, _ in steps]
    return torch.stack(outputs, dim=1) if outputs else v.to(dtype)


def _l2_normalised(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor | None
) -> None:
    """Broadcasting would hide a wrong shape, so each one is compared in full."""
    if k.ndim != 4 or v.ndim != 4 or v.shape[2] % max(k.shape[2], 1):
        raise ValueError(f"k [B, T, H, K] and v [B, T, HV, V] with HV a multiple of H: got {[*k.shape]}, {[*v.shape]}")
    (B, T, _, K), (HV, V) = k.shape, v.shape[2:]
    expected = {"q": (q, [*k.shape]), "v": (v, [B, T, HV, V]), "a": (a, [B, T, HV]), "b": (b, [B, T, HV])}
    expected |= {"A_log": (A_log, [HV]), "dt_bias": (dt_bias, [HV])}
    if state is not None:
        expected["initial_state"] = (state, [B, HV, V, K])
    for name, (tensor, shape) in expected.items():
        if [*tensor.shape] != shape:
            raise ValueError(f"{name} must be {shape}, got {[*tensor.shape]}")
