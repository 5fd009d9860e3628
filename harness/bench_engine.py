"""What a decode step of the real engine costs on a CPU, with Triton's own interpreter and with ours, in one engine.

Host reads are not watched meanwhile, but in a figure of its own: what the sentinel adds to a step.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..cases.case import Cache, Case, Inputs, Replay, Request, Step
from ..cases.geometry import ENGINE
from ..cases.inputs import token_ids
from .checkpoint import VOCAB_SIZE, tiny_checkpoint
from .cpu_platform import has_cuda, why_no_engine
from .engine_trace import EngineConfig
from .figure import Figure, NothingToMeasure

BATCHES = (1, 4)
PROMPT, DECODES, ROUNDS = 6, 12, 2
# the target: ours takes at most this share of Triton's
MOST = 0.2


def bench_engine(seed: int) -> list[Figure]:
    """Milliseconds of a decode step, median, and the ratio; log-probabilities must be the same bits."""
    why = why_no_engine()
    if why is not None:
        raise NothingToMeasure(why)
    if has_cuda():
        raise NothingToMeasure("bench engine compares interpreters, which a machine with a GPU does not use")
    from .engine_worker import Engine

    engine = Engine(EngineConfig(tiny_checkpoint(ENGINE), buffer_len=4))
    figures = []
    for batch in BATCHES:
        stock, ours, watched = _measure(engine, _case(batch, seed))
        figures += [
            Figure(f"batch {batch}, decode step, Triton's interpreter", 1e3 * stock, "ms"),
            Figure(f"batch {batch}, decode step, ours", 1e3 * ours, "ms"),
            Figure(
                f"batch {batch}, ours over Triton's",
                ours / stock,
                "times",
                f"more than {MOST}" if batch == max(BATCHES) and ours > MOST * stock else "",
            ),
            Figure(f"batch {batch}, ours with host reads watched", 1e3 * watched, "ms"),
        ]
    return figures


def _measure(engine: Any, case: Case) -> tuple[float, float, float]:
    """Seconds of a decode step: Triton's, ours, ours watched, in turn. Raises RuntimeError if their bits differ."""
    seconds: dict[str, list[float]] = {"stock": [], "ours": [], "watched": []}
    outputs: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for name in seconds:
            engine.sync.watching = name == "watched"
            with engine.helper_kernels.stock() if name == "stock" else nullcontext():
                seconds[name] += _decode_steps(engine, case, outputs, name)
    if not np.array_equal(outputs["stock"], outputs["ours"]):
        raise RuntimeError("the two interpreters gave different log-probabilities")
    # a share of the steps is watched
    return float(np.median(seconds["stock"])), float(np.median(seconds["ours"])), float(np.mean(seconds["watched"]))


def _decode_steps(engine: Any, case: Case, outputs: dict[str, Any], name: str) -> list[float]:
    tokens = token_ids(case, VOCAB_SIZE)
    step, taken = engine.llm.step, []

    def timed() -> Any:
        started = time.perf_counter()
        result = step()
        taken.append(time.perf_counter() - started)
        return result

    engine.llm.step = timed
    try:
        trace = engine.play(case, [row[:PROMPT] for row in tokens], [row[PROMPT:] for row in tokens])
    finally:
        engine.llm.step = step
    outputs[name] = trace.log_probs
    # the first steps prefill and begin the decode
    return taken[2 : len(case.steps)]


def _case(batch: int, seed: int) -> Case:
    """All requests decode side by side; a seed whose cases are not played in Triton's interpreter anyway."""
    prefill, decode = (Step(tuple((request, count) for request in range(batch))) for count in (PROMPT, 1))
    return Case(
        id=f"bench-{batch}",
        geometry=ENGINE,
        replay=Replay(4),
        cache=Cache(),
        graphs=None,
        inputs=Inputs("model_like", 16 * seed),
        requests=tuple(Request(PROMPT, DECODES + 1) for _ in range(batch)),
        steps=(prefill, *[decode] * DECODES),
    )
