"""What one GDN layer reads, whatever the regime: the tensors, their types, how requests are packed into them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .case import Case

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LayerInputs:
    """What one GDN layer reads, for R requests of at most T tokens; rows past a request's length are zero.

    ``q``, ``k`` [R, T, H, K] and ``v`` [R, T, HV, V]: after the convolution and SiLU, in the activation dtype;
    ``a``, ``b`` [R, T, HV]: gate inputs, in the activation dtype; ``A_log``, ``dt_bias`` [HV] float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


def sequence_lengths(case: Case) -> list[int]:
    """Tokens that each request has inputs for: the prompt and all outputs but the last, which is never computed."""
    return [request.prompt_len + request.output_len - 1 for request in case.requests]


def float32(x: np.ndarray) -> Tensor:
    """An array as a float32 tensor."""
    return torch.from_numpy(np.asarray(x, dtype=np.float32))


def pack(case: Case, parts: list[np.ndarray]) -> Tensor:
    """[R, T, ...] in the activation dtype, shared prefixes copied from the request they belong to."""
    longest = max(len(part) for part in parts)
    packed = torch.zeros((len(parts), longest, *parts[0].shape[1:]), dtype=TORCH_DTYPES[case.replay.activation_dtype])
    for index, part in enumerate(parts):
        packed[index, : len(part)] = float32(part).to(packed.dtype)
        request = case.requests[index]
        if request.shared_prefix_of is not None:
            packed[index, : request.shared_prefix_len] = packed[request.shared_prefix_of, : request.shared_prefix_len]
    return packed
