"""Many cases, many workers: results in the order of the plan, kept as they come, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch

from ..cases.refusal import Refusal
from .architectures import DEFAULT_ARCHITECTURE
from .compiled_plan import PlannedAs
from .contract import Path
from .explore import Chunk, explore
from .judge_case import Judged, judge_case
from .paths import EngineArgs, LevelUnavailable, close_path, open_path
from .plan import Planned
from .record import Record
from .run_dir import RunDir

Job = Planned | Chunk
# fault, target, more of vLLM's EngineArgs and the engine level's architecture
Subject = tuple[str | None, str | None, EngineArgs, str]

# below this many jobs a worker's start costs more than it saves
WORTH_WORKERS = 8


class CampaignError(Refusal):
    """Settings that a campaign cannot run with; the message names the option and the fix."""


def run_campaign(
    jobs: Sequence[Job],
    run_dir: RunDir,
    *,
    fault: str | None,
    target: str | None,
    workers: int,
    executor: str,
    progress: Callable[[Judged], None],
    engine_args: EngineArgs = (),
    architecture: str = DEFAULT_ARCHITECTURE,
) -> list[str]:
    """Run what ``run_dir`` does not hold yet; returns a line for each level that could not run at all."""
    records = run_dir.records()
    missing = []
    for (level, own), group in groupby(jobs, key=lambda job: (job.level, _own_target(job))):
        left = [job for job in group if not is_done(job, records)]
        subject = (fault, own or target, engine_args, architecture)
        try:
            for judged in _results(level, left, subject, workers, executor):
                run_dir.add(judged.record, judged.seconds, judged.case)
                progress(judged)
        except LevelUnavailable as error:
            missing.append(f"{level}: {error}")
    return missing


def is_done(job: Job, records: Sequence[Record]) -> bool:
    """Whether a job's records are there; of a chunk any will do, a resumed run drops the unfinished one."""
    own = _own_target(job)
    ids = [r["id"] for r in records if r["level"] == job.level and (own is None or r["target"] == own)]
    if isinstance(job, Chunk):
        return any(name.startswith(f"{job.prefix}-") for name in ids)
    return job.case.id in ids


def _own_target(job: Job) -> str | None:
    """The target that a job has whatever the run's is; None leaves it to the run."""
    return job.target if isinstance(job, PlannedAs) else None


def judge_job(path: Path, job: Job) -> list[Judged]:
    """One case, or a chunk of generated ones."""
    if isinstance(job, Chunk):
        return explore(job, lambda case: judge_case(path, case))
    return [judge_case(path, job.case)]


def judge_apart(level: str, job: Job, subject: Subject) -> list[Judged]:
    """One job in a worker process; one thread, so that numbers do not depend on the number of workers."""
    torch.set_num_threads(1)
    return judge_job(open_path(level, *subject), job)


def _results(level: str, jobs: list[Job], subject: Subject, workers: int, executor: str) -> Iterator[Judged]:
    if not jobs:
        return
    chunks = sum(isinstance(job, Chunk) for job in jobs)
    if level == "engine" or workers == 1 or chunks < WORTH_WORKERS:
        yield from _in_process(open_path(level, *subject), jobs)
        return
    from joblib import Parallel, delayed

    pool = Parallel(n_jobs=workers, backend=_backend(executor), return_as="generator")
    for results in pool(delayed(judge_apart)(level, job, subject) for job in jobs):
        yield from results


def _in_process(path: Path, jobs: list[Job]) -> Iterator[Judged]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in jobs:
            yield from judge_job(path, job)
    finally:
        torch.set_num_threads(threads)
        close_path(path)


def _backend(executor: str) -> str:
    if executor == "local":
        return "loky"
    try:
        from ray.util.joblib import register_ray
    except ImportError:
        raise CampaignError('--executor ray: ray is not installed; pip install "replay-parity[ray]"') from None
    register_ray()
    return "ray"
