"""The evidence for the limits of tolerance.py: clean runs of every class of dtypes, and how near they come.

One class is a regime and the dtypes of ring, state and activations. Its runs (one request, one value head, one
quantity) come from generated cases at both layer levels and from hand-made ones of 264 decode steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import torch

from ..cases.case import DTYPES, Cache, Case, Inputs, Replay, Request, Step
from ..cases.geometry import TINY
from .contract import Legs
from .explore import drawn_cases
from .figure import Figure
from .kernel_path import KernelPath
from .schedule_path import SchedulePath
from .three_leg import Run, judged_runs, quantities
from .tolerance import LAYER

REGIMES = ("model_like", "adversarial")
DECODES = 264
# by class: generated cases a level; hand-made long ones and the requests that run side by side in each
GENERATED, LONG, SIDE_BY_SIDE = 12, 1, 8
BUFFER_LENS = (16, 4, 3, 32)


@dataclass
class Worst:
    """The largest figures of one class and kind of run."""

    runs: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, **figures: float) -> None:
        """Count one run."""
        self.runs += 1
        for name, value in figures.items():
            self.figures[name] = max(self.figures.get(name, 0.0), value)


def bench_tolerance(seed: int) -> list[Figure]:
    """The largest ratios and baseline errors by class, each over the number of runs that its unit names."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = []
        for index, (regime, *dtypes) in enumerate(product(REGIMES, DTYPES, DTYPES, DTYPES)):
            # another seed in each class, or all would be tried on the same few families of inputs
            for kind, worst in measure(regime, (dtypes[0], dtypes[1], dtypes[2]), 1000 * seed + index).items():
                name = f"{regime} {'/'.join(dtypes)} {kind}"
                figures += [Figure(f"{name} {n}", v, f"most of {worst.runs} runs") for n, v in worst.figures.items()]
        return figures
    finally:
        torch.set_num_threads(threads)


def measure(
    regime: str,
    dtypes: tuple[str, str, str],
    seed: int,
    *,
    generated: int = GENERATED,
    long: int = LONG,
    side_by_side: int = SIDE_BY_SIDE,
) -> dict[str, Worst]:
    """Clean runs of a class (dtypes of ring, state, activations) by kind of run."""
    table: dict[str, Worst] = {}
    for path in (KernelPath(), SchedulePath()):
        for case in drawn_cases(path.level, (regime,), seed, generated):
            _observe(path.run(replace(case, replay=Replay(case.replay.buffer_len, *dtypes))), table)
    for number in range(long):
        buffer_len = BUFFER_LENS[(seed + number) % len(BUFFER_LENS)]
        case = long_case(regime, Replay(buffer_len, *dtypes), seed + number, side_by_side)
        _observe(SchedulePath().run(case), table)
    return table


def long_case(regime: str, replay: Replay, seed: int, side_by_side: int = 1) -> Case:
    """Requests that decode 264 tokens side by side after a short prefill."""
    requests = range(side_by_side)
    prefill = Step(tuple((request, 6) for request in requests))
    decode = Step(tuple((request, 1) for request in requests))
    return Case(
        id=f"long-{regime}-{seed}",
        geometry=TINY,
        replay=replay,
        cache=Cache(),
        graphs=None,
        inputs=Inputs(regime, seed),
        requests=tuple(Request(6, DECODES + 1) for _ in requests),
        steps=(prefill, *[decode] * DECODES),
    )


def _observe(legs: Legs, table: dict[str, Worst]) -> None:
    for quantity in quantities(legs):
        for run in judged_runs(legs, quantity):
            entries = int((quantity.rows.request == run.request).sum())
            most = next(most for most, _ in LAYER if entries <= most)
            for kind, figures in _figures(run, f"up to {most}" if most < sys.maxsize else "longer"):
                table.setdefault(kind, Worst()).add(**figures)


def _figures(run: Run, length: str) -> Iterator[tuple[str, dict[str, float]]]:
    """By head: whether storage or arithmetic makes the larger part of the expected error, and the ratios."""
    base = run.baseline.largest / run.sizes.largest.clamp_min(1e-300)
    for head in range(len(base)):
        stored = bool(run.rms.storage[head] > run.rms.arithmetic[head])
        yield (
            f"{length} {'storage' if stored else 'arithmetic'}",
            {
                "rms": float(run.rms.ratio[head]),
                "max": float(run.largest.ratio[head]),
                "share of the limit": float(run.strain[head]),
                "baseline error": float(base[head]),
            },
        )
