"""vLLM's own packed decode kernel, called with the arguments of ours: what a benchmark holds ours against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode


def packed_step(
    token: tuple[torch.Tensor, ...],
    layer: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    slots: torch.Tensor,
    out: torch.Tensor,
) -> Callable[[], None]:
    """A decode step that can be run again: token (q, k, v, a, b), layer (A_log, dt_bias), out [R, HV, V]; CUDA only.

    q, k and v are laid side by side once, as vLLM's convolution leaves them.
    """
    q, k, v, a, b = token
    A_log, dt_bias = layer
    mixed_qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    gates = (a.contiguous(), b.contiguous())

    def run() -> None:
        fused_recurrent_gated_delta_rule_packed_decode(
            mixed_qkv=mixed_qkv,
            a=gates[0],
            b=gates[1],
            A_log=A_log,
            dt_bias=dt_bias,
            scale=q.shape[-1] ** -0.5,
            initial_state=state,
            out=out.unsqueeze(1),
            ssm_state_indices=slots,
            use_qk_l2norm_in_kernel=True,
        )

    return run
