"""Numbers only: how far values lie from the truth, by run and by entry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .trace import IntArray


@dataclass(frozen=True)
class RunErrors:
    """Error of one run (the rows of one request): RMS and maximum, and the same of the true values."""

    rms: float
    largest: float
    true_rms: float
    true_largest: float


def run_errors(values: Tensor, truth: Tensor, requests: IntArray) -> dict[int, RunErrors]:
    """Errors of each request's rows. values, truth [N, ...]; requests [N]. NaN counts as an infinite error."""
    error, size = _flat(values.double() - truth), _flat(truth)
    error = torch.where(torch.isnan(error), torch.inf, error)
    runs = {}
    for request in np.unique(requests).tolist():
        rows = torch.from_numpy(np.flatnonzero(requests == request))
        runs[request] = RunErrors(_rms(error[rows]), _largest(error[rows]), _rms(size[rows]), _largest(size[rows]))
    return runs


def entry_errors(values: Tensor, truth: Tensor) -> Tensor:
    """Largest absolute error by entry and head, [N, heads]; NaN is infinite. values, truth [N, heads, ...]."""
    error = (values.double() - truth).abs()
    error = torch.where(torch.isnan(error), torch.inf, error)
    return error.flatten(2).amax(-1) if error.dim() > 2 else error.amax(-1, keepdim=True)


def first_true(mask: Tensor) -> tuple[int, int] | None:
    """(entry, head) of the first True of mask [N, heads], entries first."""
    places = mask.flatten().nonzero()
    if not len(places):
        return None
    entry, head = divmod(int(places[0]), mask.shape[1])
    return entry, head


def ulp(values: Tensor, truth: Tensor) -> float:
    """Largest distance in units in the last place of ``values``' dtype at the size of the truth."""
    eps = torch.finfo(values.dtype).eps
    tiny = torch.finfo(values.dtype).tiny
    unit = torch.exp2(torch.floor(torch.log2(truth.abs().double().clamp_min(tiny)))) * eps
    return float(((values.double() - truth).abs() / unit).max())


def _flat(x: Tensor) -> Tensor:
    return x.double().reshape(len(x), -1)


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
