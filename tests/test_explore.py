"""Generated campaigns: the same seed gives the same cases and records, a failure comes out small and replays.

The planted faults of the schedule level are hunted with few examples; a fault that is not there must survive.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from replay_parity.cases.case import Case
from replay_parity.cases.corpus import corpus, for_engine
from replay_parity.cases.timeline import play
from replay_parity.harness.campaign import run_campaign
from replay_parity.harness.explore import DATABASE, ENGINE_SHRINKS, Chunk, chunks, explore
from replay_parity.harness.fault_catalogue import FAULTS, Edit, Fault
from replay_parity.harness.fault_run import CAUGHT, NOT_RUN, SURVIVED, hunt
from replay_parity.harness.judge_case import Judged, judge_case
from replay_parity.harness.outcome import FAIL, PASS
from replay_parity.harness.paths import open_path
from replay_parity.harness.progress import say_hunts
from replay_parity.harness.record import dumps
from replay_parity.harness.run_dir import RunDir
from replay_parity.harness.schedule_path import SchedulePath

SEED = 11


def explored(fault: str | None, chunk: Chunk) -> list[tuple[str, Case]]:
    path = SchedulePath(fault)
    return [(dumps(one.record), one.case) for one in explore(chunk, lambda case: judge_case(path, case))]


def test_chunks_cut_a_campaign_and_depend_on_nothing_else() -> None:
    cut = chunks("schedule", SEED, 120)
    assert [chunk.size for chunk in cut] == [50, 50, 20]
    assert len({chunk.prefix for chunk in cut}) == 3
    small = chunks("schedule", SEED, 12)[0]
    assert explored(None, small) == explored(None, small)
    assert explored(None, small) != explored(None, chunks("schedule", SEED + 1, 12)[0])


def test_a_clean_chunk_judges_what_was_asked_for() -> None:
    found = explored(None, chunks("schedule", SEED, 15)[0])
    assert len(found) == 15
    assert len({case.steps for _, case in found}) > 10


@pytest.mark.parametrize(
    "fault", ["cursor.prompt_base", "cursor.leftover_append", "ring.write_next", "slot.keep_cursor"]
)
def test_a_failure_comes_out_small_and_replays(fault: str) -> None:
    found = hunt(fault, "schedule", 100, SEED)
    assert found.outcome == CAUGHT and found.examples <= 100 and found.case is not None
    assert len(found.case.requests) <= 2 and len(found.case.steps) <= 8
    assert judge_case(SchedulePath(fault), found.case).record["verdict"] == FAIL
    assert judge_case(SchedulePath(), found.case).record["verdict"] == PASS


def test_an_engine_failure_is_shrunk_within_a_budget() -> None:
    """The schedule level stands in for the engine, which takes seconds a case: each is judged once, few are tried."""
    path = SchedulePath("cursor.prompt_base")
    tried: list[Case] = []

    def judge(case: Case) -> Judged:
        tried.append(case)
        return judge_case(path, case)

    found = explore(chunks("engine", SEED, 25)[0], judge)
    first = next(place for place, case in enumerate(tried) if judge_case(path, case).record["verdict"] == FAIL)
    assert len(found) == first + 1 <= 25 and found[-1].record["verdict"] == FAIL
    assert len(tried) - first - 1 == ENGINE_SHRINKS
    assert len(set(tried[first:])) == ENGINE_SHRINKS + 1
    smaller = found[-1].case
    assert sum(len(step.rows) for step in smaller.steps) < sum(len(step.rows) for step in tried[first].steps)


def test_a_database_brings_back_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found once with one seed, tried first with another: no example is spent on looking for it."""
    monkeypatch.setenv(DATABASE, str(tmp_path / "shared"))
    found = hunt("cursor.align_no_flush", "schedule", 100, SEED)
    again = hunt("cursor.align_no_flush", "schedule", 100, SEED + 1)
    assert found.outcome == again.outcome == CAUGHT
    assert again.examples == 1 < found.examples
    monkeypatch.delenv(DATABASE)
    alone = hunt("cursor.align_no_flush", "schedule", 100, SEED + 1)
    assert alone.examples > 1


def test_an_equivalent_mutant_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    same = Edit(
        "kernels.cursor:decode_cursor",
        "is_flush = write_pos == buffer_len - 1",
        "is_flush = buffer_len - 1 == write_pos",
    )
    monkeypatch.setitem(FAULTS, "nothing", Fault("nothing", "no fault at all", {"schedule": (same,)}))
    found = hunt("nothing", "schedule", 10, SEED)
    assert (found.outcome, found.examples, found.case) == (SURVIVED, 10, None)


def _breaks(monkeypatch: pytest.MonkeyPatch, condition: str) -> None:
    """A fault that makes the subject raise where ``condition`` holds."""
    edit = Edit("kernels.cursor:decode_cursor", "steps = computed - base", f"steps = computed - base; {condition} / 0")
    monkeypatch.setitem(FAULTS, "breaks", Fault("breaks", "raises", {"schedule": (edit,)}))


def test_a_fault_of_which_no_case_could_be_judged_has_not_survived(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _breaks(monkeypatch, "1")
    found = hunt("breaks", "schedule", 6, SEED)
    assert (found.outcome, found.symptom, found.case) == (NOT_RUN, "exception", None)
    assert found.reason is not None
    whole = rf"{found.examples} of {found.examples} cases could not be judged, the first: ZeroDivisionError: .+"
    assert re.fullmatch(whole, found.reason)
    assert found.to_json()["reason"] == found.reason
    say_hunts([found])
    told = " ".join(capsys.readouterr().out.split())
    assert "not_run" in told and "could not be judged" in told and "survived" not in told


def test_a_survivor_says_how_many_cases_were_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises in some cases and changes nothing in the others."""
    _breaks(monkeypatch, "len(steps) > 2 and 1")
    found = hunt("breaks", "schedule", 40, SEED)
    assert found.outcome == SURVIVED and found.reason is not None
    unknown, _, judged = found.reason.split(" cases")[0].split()
    assert 0 < int(unknown) < int(judged) == found.examples


def test_records_do_not_depend_on_workers(tmp_path: Path) -> None:
    written = []
    for workers in (1, 2):
        run_dir = RunDir(tmp_path / str(workers))
        jobs = [Chunk(c.level, c.regimes, c.seed, c.index, 3) for c in chunks("schedule", SEED, 450)]
        missing = run_campaign(
            jobs, run_dir, fault=None, target=None, workers=workers, executor="local", progress=lambda judged: None
        )
        assert missing == []
        written.append(run_dir.records_file.read_bytes())
    assert written[0] == written[1] and written[0].count(b"\n") == 27


def test_a_killed_campaign_goes_on_where_it_was(tmp_path: Path) -> None:
    jobs = [Chunk(c.level, c.regimes, c.seed, c.index, 3) for c in chunks("schedule", SEED, 150)]

    def run(run_dir: RunDir) -> None:
        run_campaign(jobs, run_dir, fault=None, target=None, workers=1, executor="local", progress=lambda judged: None)

    run_dir = RunDir(tmp_path)
    run(run_dir)
    whole = run_dir.records_file.read_text()
    lines = whole.splitlines(keepends=True)
    # the second chunk had written one of its three records and half of the next
    run_dir.records_file.write_text("".join(lines[:4]) + lines[4][:30])
    resumed = RunDir(tmp_path, resume=True)
    assert len(resumed.records()) == 3
    run(resumed)
    assert resumed.records_file.read_text() == whole


KEPT = {case.id: case for case in corpus()}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("level", ["kernel", "schedule"])
def test_kept_failures_pass_and_say_what_they_guard(level: str, name: str) -> None:
    case = KEPT[name]
    assert case.guards
    assert judge_case(open_path(level, None), case).record["verdict"] == PASS
    assert play(for_engine(case)).steps


@pytest.mark.parametrize("name", KEPT)
def test_kept_failures_still_catch_their_fault(name: str) -> None:
    level, _, fault = name.removeprefix("corpus-").partition("-")
    assert judge_case(open_path(level, fault), KEPT[name]).record["verdict"] == FAIL
