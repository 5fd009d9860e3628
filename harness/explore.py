"""Generated cases: seeded chunks of a Hypothesis run, each ending at its first failure, shrunk.

A campaign is cut into chunks of fixed size; a chunk's cases depend on the seed and its number alone, so any worker may
run it. Beside cases/strategies.py the only file that imports hypothesis.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings, target
from hypothesis.database import DirectoryBasedExampleDatabase

from ..cases.case import Case
from ..cases.strategies import BACKEND, cases
from .judge_case import Judged
from .outcome import FAIL
from .run_dir import GENERATED

CHUNK_SIZE = 50
# seconds a case: what a chunk has found is kept when it ends
ENGINE_CHUNK_SIZE = 25
# environment variable: the directory of a Hypothesis database, private or shared
DATABASE = "REPLAY_PARITY_DATABASE"
REGIMES = {
    "kernel": ("exact", "model_like", "adversarial"),
    "schedule": ("exact", "model_like", "adversarial"),
    "engine": ("model_like",),
}
# smaller cases that are tried once one has failed: seconds each in the engine. Elsewhere Hypothesis stops by itself
ENGINE_SHRINKS = 30
# every so many chunks one is steered by hypothesis.target, which works on Hypothesis' own draws alone; the others draw
# each case anew: 300 cases of theirs were all distinct and showed 99 % of the pairs of situations, steered ones 94 %
STEERED = 4
# what a plain draw seldom shows
RARE = frozenset(
    (
        "forced_flush",
        "one_token_prompt_on_recycled_slot",
        "tail_beside_decode",
        "resume_other_slot",
        "abort_mid_ring",
        "prefix_hit",
        "block_crossing",
        "padded_step",
        "batch_order_flip",
    )
)


@dataclass(frozen=True)
class Chunk:
    """``size`` generated cases of one level: number ``index`` of the campaign with this seed."""

    level: str
    regimes: tuple[str, ...]
    seed: int
    index: int
    size: int

    @property
    def prefix(self) -> str:
        """What the ids of its cases begin with."""
        return f"{GENERATED}{self.seed}-{self.index:04d}"


class _Found(AssertionError):
    """A case failed: what Hypothesis shrinks."""


def chunks(level: str, seed: int, examples: int) -> list[Chunk]:
    """A campaign of ``examples`` cases."""
    most = ENGINE_CHUNK_SIZE if level == "engine" else CHUNK_SIZE
    sizes = [min(most, examples - start) for start in range(0, examples, most)]
    return [Chunk(level, REGIMES[level], seed, index, size) for index, size in enumerate(sizes)]


def explore(chunk: Chunk, judge: Callable[[Case], Judged]) -> list[Judged]:
    """Judge the chunk's cases in order; the last one is the minimised failure if there is one.

    It keeps the number of the case that failed first, which counts the examples until the fault was caught.
    """
    kept: list[Judged] = []
    smallest: list[Judged] = []
    known: dict[Case, Judged] = {}
    shrinks_left = ENGINE_SHRINKS if chunk.level == "engine" else math.inf

    # above the seed, which sets the database to None
    @settings(
        max_examples=chunk.size,
        database=_database(),
        deadline=None,
        phases=_phases(chunk),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        backend="hypothesis" if chunk.index % STEERED == STEERED - 1 else BACKEND,
    )
    @hypothesis.seed(chunk.seed * 1_000_003 + chunk.index)
    @given(cases(chunk.level, chunk.regimes))
    def property_holds(case: Case) -> None:
        nonlocal shrinks_left
        number = len(kept) - bool(smallest)
        named = replace(case, id=f"{chunk.prefix}-{number:03d}")
        # Hypothesis asks again for what it has found before
        judged = known.get(named)
        if judged is None:
            if smallest and shrinks_left == 0:
                return
            shrinks_left -= bool(smallest)
            known[named] = judged = judge(named)
        if judged.record["verdict"] == FAIL:
            smallest[:] = [judged]
            if len(kept) == number:
                kept.append(judged)
            raise _Found(judged.record["reason"])
        if not smallest:
            kept.append(judged)
            _steer(judged)

    try:
        property_holds()
    except _Found:
        kept[-1] = smallest[0]
    return kept


def _database() -> DirectoryBasedExampleDatabase | None:
    """The directory that the environment names; None keeps nothing, so that a seed alone decides what is run."""
    folder = os.environ.get(DATABASE)
    return DirectoryBasedExampleDatabase(folder) if folder else None


def _phases(chunk: Chunk) -> tuple[Phase, ...]:
    """What was found before comes first, in the first chunk."""
    phases = (Phase.generate, Phase.target, Phase.shrink)
    return (Phase.reuse, *phases) if os.environ.get(DATABASE) and chunk.index == 0 else phases


def drawn_cases(level: str, regimes: tuple[str, ...], seed: int, count: int) -> list[Case]:
    """``count`` generated cases, drawn one apart from the other."""
    drawn: list[Case] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        backend=BACKEND,
    )
    @given(cases(level, regimes))
    def keep(case: Case) -> None:
        drawn.append(replace(case, id=f"drawn-{level}-{seed}-{len(drawn):04d}"))

    keep()
    return drawn


def _steer(judged: Judged) -> None:
    """Lead the search towards large errors and situations that are rare."""
    ratios = [v for name, v in judged.record["distances"].items() if name.endswith("max_ratio") and v]
    if ratios:
        target(math.log10(max(ratios)), label="error over the baseline's")
    target(float(sum(name in RARE for name in judged.record["situations"])), label="rare situations")
