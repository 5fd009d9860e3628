"""Numbers only: how far values lie from the truth, by run and by entry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .trace import IntArray


@dataclass(frozen=True)
class RunErrors:
    """Error of one run (the rows of one request) by head, [heads] each: RMS and maximum."""

    rms: Tensor
    largest: Tensor


def run_errors(values: Tensor, truth: Tensor, requests: IntArray) -> dict[int, RunErrors]:
    """Errors of each request's rows. values, truth [N, heads, ...] ([N, size]: one head); requests [N].

    NaN counts as an infinite error.
    """
    error = values.double() - truth
    return run_sizes(torch.where(torch.isnan(error), torch.inf, error), requests)


def run_sizes(values: Tensor, requests: IntArray) -> dict[int, RunErrors]:
    """RMS and maximum of the values themselves, by request and head."""
    flat = (values.double() if values.dim() > 2 else values.double()[:, None]).flatten(2)
    runs = {}
    for request in np.unique(requests).tolist():
        mine = flat[torch.from_numpy(np.flatnonzero(requests == request))]
        runs[request] = RunErrors(mine.square().mean((0, 2)).sqrt(), mine.abs().amax((0, 2)))
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
