"""How this tests, in plain words: whole Cases at the engine level, from two real engines to the verdict.

Scenarios must pass, with log-probabilities near the float64 oracle's and proof that the replay op ran and flushed. Then
the judge is tested: each planted fault that has a form in the engine must fail a scenario that passes without it. What
was not played as written is never a pass: a subject that is killed, a timeline that vLLM refuses, a trace whose rows
are not the Case's. Faulty subjects play beside the clean path's baseline, which saves an engine each.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from replay_parity.cases.case import Cache, Case, Inputs, Replay, Request, Step
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.geometry import ENGINE
from replay_parity.cases.inputs import token_ids
from replay_parity.harness.checkpoint import VOCAB_SIZE
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.engine_trace import EngineConfig, EngineTrace
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.record import Record, make_record
from replay_parity.harness.verdict import judge

pytestmark = pytest.mark.engine

# float32 engine against float64 oracle; a lost state costs tenths at least
LOG_PROB_LIMIT = 1e-4


def _align() -> Case:
    """Blocks of 32: the prompt ends in mid-block, the second decode ends block 2, the third starts an empty ring."""
    steps = (Step(((0, 32),)), Step(((0, 30),)), *[Step(((0, 1),))] * 3)
    return Case("align", ENGINE, Replay(4), Cache("align", 32), None, Inputs(), (Request(62, 4),), steps)


CASES = {name: scenario.case for name, scenario in engine_scenarios().items()} | {"align": _align()}
CLEAN = (
    "one-token-tail",
    "resume-at-phase-1",
    "resume-at-phase-2",
    "slot-reuse-mid-ring",
    "first-chunk-on-recycled-slot",
    "mixed-prefill-and-decode",
    "align",
)
# the scenario that shows a fault; the arithmetic of the decode op shows in any
SHOWN_BY = {
    "cursor.prompt_base": "resume-at-phase-2",
    "cursor.leftover_append": "one-token-tail",
    "cursor.align_no_max": "align",
    "cursor.align_no_flush": "align",
    "cursor.align_wrong_block": "align-hit-on-decoded-block-of-32",
    "batch.first_token_decode": "first-chunk-on-recycled-slot",
    "slot.no_zero": "slot-reuse-mid-ring",
    "slot.stale_after_resume": "resume-into-another-slot",
}
# those of graphs and of the model runner's adapter are in tests/test_engine_graphs.py,
# host reads in tests/test_engine_sync.py
PLANTED = [
    (name, SHOWN_BY.get(name, "one-token-tail"))
    for name, fault in FAULTS.items()
    if "engine" in fault.levels and not name.startswith(("graph.", "adapter.", "sync."))
]
# an engine opens once for all of its cases
PLANTED.sort(key=lambda pair: pair[1].startswith("align"))


def _judged(path: EnginePath, case: Case) -> Record:
    """As judge_case, also for a Case that the plan leaves out: the engine plays "align" in blocks of its own size."""
    legs = path.run(case)
    return make_record(case, path, judge(legs), legs)


@pytest.fixture(scope="module")
def clean() -> Iterator[EnginePath]:
    """A path without a fault."""
    path = EnginePath()
    yield path
    path.close()


@pytest.fixture(scope="module")
def passes(clean: EnginePath) -> Iterator[dict[str, Record]]:
    """Records of clean cases, each judged once."""

    class Judged(dict[str, Record]):
        def __missing__(self, name: str) -> Record:
            self[name] = _judged(clean, CASES[name])
            return self[name]

    yield Judged()


@pytest.mark.parametrize("name", CLEAN)
def test_scenarios_pass(passes: dict[str, Record], name: str) -> None:
    record = passes[name]
    assert record["verdict"] == "pass", record["reason"]
    assert record["distances"]["output_max_abs"] < LOG_PROB_LIMIT
    assert record["counts"]["replay_steps"] > record["counts"]["flushes"] > 0
    assert record["counts"]["resumes"] == (1 if name.startswith("resume") else 0)


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_a_planted_fault_fails(clean: EnginePath, passes: dict[str, Record], fault: str, name: str) -> None:
    assert passes[name]["verdict"] == "pass", passes[name]["reason"]
    faulty = EnginePath(fault)
    faulty.baselines = clean.baselines
    try:
        record = _judged(faulty, CASES[name])
    finally:
        faulty.subjects.close()
    assert record["verdict"] == "fail", record["reason"]
    assert record["symptom"] in ("mismatch", "cursor", "poison", "out_of_bounds", "slot")
    # the block table itself is wrong: told before any number is
    assert (record["symptom"] == "slot") == (fault == "slot.stale_after_resume")
    assert record["reason"].startswith("step ")
    # where the engine broke off, it shows in what its last step was told
    assert record["stage"] in ("judge", "subject: play")
    assert record["fault"] == fault and record["timeline"] is not None


def test_a_killed_subject_is_unknown_and_the_next_case_works(clean: EnginePath) -> None:
    case = CASES["plain-flush"]
    assert judge_case(clean, case).record["verdict"] == "pass"
    subject = clean.subjects.latest
    assert subject.pid is not None
    # it stands still until the kill, so that the kill comes in mid-play
    os.kill(subject.pid, signal.SIGSTOP)
    killer = threading.Timer(0.3, os.kill, (subject.pid, signal.SIGKILL))
    killer.start()
    record = judge_case(clean, case).record
    killer.join()
    assert (record["verdict"], record["symptom"], record["stage"]) == ("unknown", "crash", "subject: play")
    assert record["reason"] == "the engine process was killed (SIGKILL: out of memory, or by hand)"
    assert judge_case(clean, case).record["verdict"] == "pass"


def test_a_timeline_that_vllm_does_not_play_is_unknown(clean: EnginePath) -> None:
    # legal for the Case, over the engine's tokens a step
    steps = (Step(((0, 600),)), *[Step(((0, 1),))] * 2)
    case = replace(CASES["one-token-tail"], id="too-many", requests=(Request(600, 3),), steps=steps)
    record = judge_case(clean, case).record
    assert (record["verdict"], record["symptom"], record["stage"]) == ("unknown", "exception", "subject: play")
    assert record["reason"].startswith("DirectionError: step 0, request 0: wanted 600 tokens, got 512")


class _Recorded:
    """An engine that hands over a trace played before."""

    execution = None

    def __init__(self, config: EngineConfig, trace: EngineTrace) -> None:
        self.config, self.trace = config, trace

    def play(self, *_: object) -> EngineTrace:
        return self.trace

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def recorded(clean: EnginePath) -> dict[str, tuple[EngineConfig, EngineTrace]]:
    """What both engines leave of the one-token tail."""
    case = CASES["one-token-tail"]
    assert judge_case(clean, case).record["verdict"] == "pass"
    tokens = token_ids(case, VOCAB_SIZE)
    length = case.requests[0].prompt_len
    traces = {}
    for name, engine in (("subject", clean.subjects.latest), ("baseline", clean.baselines.latest)):
        played = engine.play(case, [tokens[0][:length]], [tokens[0][length:]])
        assert isinstance(played, EngineTrace)
        traces[name] = engine.config, played
    return traces


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("num_computed", 1, "the engine ran (tokens, computed, prefill_len) (1, 14, 9), the Case has (1, 13, 9)"),
        ("num_tokens", 1, "the engine ran (tokens, computed, prefill_len) (2, 13, 9), the Case has (1, 13, 9)"),
        ("prefill_len", 1, "the engine ran (tokens, computed, prefill_len) (1, 13, 10), the Case has (1, 13, 9)"),
        ("step", 1, "the engine ran (tokens, computed, prefill_len) None, the Case has (1, 13, 9)"),
        ("step", 0, None),
    ],
)
def test_rows_that_are_not_the_cases_are_rejected(
    recorded: dict[str, tuple[EngineConfig, EngineTrace]], column: str, change: int, words: str | None
) -> None:
    path = EnginePath()
    config, trace = recorded["subject"]
    changed = getattr(trace.rows, column).copy()
    changed[-1] += change
    misread = replace(trace, rows=replace(trace.rows, **{column: changed}))
    path.subjects.engines = [_Recorded(config, misread)]  # type: ignore[list-item]
    path.baselines.engines = [_Recorded(*recorded["baseline"])]  # type: ignore[list-item]
    record = judge_case(path, CASES["one-token-tail"]).record
    if words is None:
        assert record["verdict"] == "pass"
        return
    assert (record["verdict"], record["symptom"], record["stage"]) == ("unknown", "not_played", "subject: play")
    assert record["reason"] == f"step 6: request 0: {words}"
