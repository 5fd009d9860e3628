"""vLLM's packed decode kernel, called as the decode benchmark calls it, against ours: both in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from replay_parity.cases.geometry import ENGINE

pytestmark = pytest.mark.engine

# float32 inputs, outputs and states relative to the largest. Observed at the seed below: 2.4e-7. Margin 8
LIMIT = 2e-6


def test_vllms_packed_kernel_agrees_with_ours() -> None:
    from replay_parity.harness import cpu_platform

    cpu_platform.prepare()
    import torch
    from replay_parity.harness.bench_decode import vllm_steps
    from replay_parity.harness.bench_step import StepDtypes, random_step
    from replay_parity.harness.interpreter import interpreted

    dtypes = StepDtypes(torch.float32, torch.float32, torch.float32)
    ours, theirs = (random_step(ENGINE, 4, [(0, False)] * 3, seed=0, dtypes=dtypes, spare_slots=2) for _ in range(2))
    (run,) = vllm_steps([theirs])
    with interpreted(unsupported="raise"):
        ours.packed("triton")
        run()
    assert gap(ours.out, theirs.out) <= LIMIT
    assert gap(ours.state, theirs.state) <= LIMIT
    # the comparison sees rows: one row's output is not another's
    assert gap(ours.out.roll(1, 0), theirs.out) > 1000 * LIMIT


def gap(mine: Any, right: Any) -> float:
    """Largest difference of two tensors over the largest value."""
    return float((mine - right).abs().max() / right.abs().max())
