"""Many cases, many workers: results in the order of the plan, kept as they come, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch

from .contract import Path
from .judge_case import Judged, judge_case
from .paths import LevelUnavailable, close_path, open_path
from .plan import Planned
from .run_dir import RunDir

# below this many cases a worker's start costs more than it saves
WORTH_WORKERS = 64


class CampaignError(ValueError):
    """Settings that a campaign cannot run with; the message names the option and the fix."""


def run_campaign(
    cases: Sequence[Planned],
    run_dir: RunDir,
    *,
    fault: str | None,
    workers: int,
    executor: str,
    progress: Callable[[Judged], None],
) -> list[str]:
    """Run what ``run_dir`` does not hold yet; returns a line for each level that could not run at all."""
    done = {(record["id"], record["level"]) for record in run_dir.records()}
    missing = []
    for level, group in groupby(cases, key=lambda planned: planned.level):
        left = [planned for planned in group if (planned.case.id, planned.level) not in done]
        try:
            for judged in _results(level, left, fault, workers, executor):
                run_dir.add(judged.record, judged.seconds, judged.case)
                progress(judged)
        except LevelUnavailable as error:
            missing.append(f"{level}: {error}")
    return missing


def _results(level: str, cases: list[Planned], fault: str | None, workers: int, executor: str) -> Iterator[Judged]:
    if not cases:
        return
    if level == "engine" or workers == 1 or len(cases) < WORTH_WORKERS:
        yield from _in_process(open_path(level, fault), cases)
        return
    from joblib import Parallel, delayed

    jobs = Parallel(n_jobs=workers, backend=_backend(executor), return_as="generator", batch_size=8)
    yield from jobs(delayed(judge_apart)(level, planned, fault) for planned in cases)


def _in_process(path: Path, cases: list[Planned]) -> Iterator[Judged]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for planned in cases:
            yield judge_case(path, planned.case)
    finally:
        torch.set_num_threads(threads)
        close_path(path)


def judge_apart(level: str, planned: Planned, fault: str | None) -> Judged:
    """One case in a worker process; one thread, so that numbers do not depend on the number of workers."""
    torch.set_num_threads(1)
    return judge_case(open_path(level, fault), planned.case)


def _backend(executor: str) -> str:
    if executor == "local":
        return "loky"
    try:
        from ray.util.joblib import register_ray
    except ImportError:
        raise CampaignError('--executor ray: ray is not installed; pip install "replay-parity[ray]"') from None
    register_ray()
    return "ray"
