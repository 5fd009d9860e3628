"""How this tests, in plain words: vLLM's own preemption for want of blocks, and align mode, in the real engine.

A Case with few blocks names who has to give way; the directed scheduler forces nobody, and vLLM must come to the same
preemptions by itself. A Case that names another one, or none, is refused with the step and the request. Generated cases
of both kinds are judged like all others, and planted faults that need a resume or a block boundary fail in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from replay_parity.cases.case import Case, Step
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.inputs import token_ids
from replay_parity.cases.situations import situations
from replay_parity.cases.timeline import play
from replay_parity.harness.checkpoint import VOCAB_SIZE
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.engine_process import EngineFailure
from replay_parity.harness.engine_trace import EngineTrace
from replay_parity.harness.explore import drawn_cases
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.playable import cannot_play

pytestmark = pytest.mark.engine

CASES = {name: scenario.case for name, scenario in engine_scenarios().items()}
NATURAL = ("blocks-run-out", "blocks-run-out-for-another")
ALIGNED = ("align-prefix-hit-of-32", "align-hit-on-decoded-block-of-32")
# a fault and the case that shows it
PLANTED = [
    ("cursor.prompt_base", "blocks-run-out"),
    ("cursor.flush_late", "blocks-run-out-for-another"),
    ("cursor.align_no_flush", "align-hit-on-decoded-block-of-32"),
    ("cursor.align_no_max", "align-prefix-hit-of-32"),
]


@pytest.fixture(scope="module")
def clean() -> Iterator[EnginePath]:
    path = EnginePath()
    yield path
    path.close()


@pytest.mark.parametrize("name", [*NATURAL, *ALIGNED, "align-decode-ends-block-of-32", "four-ring-cycles"])
def test_scenarios_pass(clean: EnginePath, name: str) -> None:
    record = judge_case(clean, CASES[name]).record
    assert record["verdict"] == "pass", record["reason"]


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_a_planted_fault_fails(clean: EnginePath, fault: str, name: str) -> None:
    path = EnginePath(fault)
    path.baselines = clean.baselines
    try:
        record = judge_case(path, CASES[name]).record
    finally:
        path.subjects.close()
    assert record["verdict"] == "fail", record["reason"]


def _played(path: EnginePath, case: Case) -> EngineTrace | EngineFailure:
    """The Case in the subject's latest engine, whatever its timeline says."""
    tokens = token_ids(case, VOCAB_SIZE)
    lengths = [request.prompt_len for request in case.requests]
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    forced = [row[length:] for row, length in zip(tokens, lengths, strict=True)]
    return path.subjects.latest.play(case, prompts, forced)


@pytest.mark.parametrize(
    ("index", "step", "words"),
    [
        (2, Step(((0, 1),), (1,)), "step 2, request 1: wanted to be preempted, got it was not"),
        (3, Step(((0, 1), (1, 1))), "step 3, request 1: wanted 1 tokens, got 0 (PREEMPTED"),
        (3, Step(((0, 1),)), None),
    ],
)
def test_preemptions_that_vllm_does_not_come_to_are_refused(
    clean: EnginePath, index: int, step: Step, words: str | None
) -> None:
    case = CASES["blocks-run-out"]
    assert judge_case(clean, case).record["verdict"] == "pass"
    steps = (*case.steps[:index], step, *case.steps[index + 1 :])
    played = _played(clean, replace(case, steps=steps))
    assert isinstance(played, EngineFailure) and played.symptom == "exception" and played.stage == "play"
    if words is not None:
        assert words in played.message
    # it goes on with the next Case
    assert judge_case(clean, case).record["verdict"] == "pass"


def test_generated_cases_with_few_blocks_and_with_prefix_hits_pass(clean: EnginePath) -> None:
    """Two of each that preempt, or hit, most often; in settings that other tests of this file have opened too."""
    drawn = drawn_cases("engine", ("model_like",), 7, 300)
    assert all(cannot_play("engine", case) is None for case in drawn)
    counted = [
        (case, situations(case, play(case))) for case in drawn if case.replay.buffer_len == 4 and not case.graphs
    ]
    natural = sorted(counted, key=lambda each: -each[1]["natural_preempt"])[:2]
    hits = sorted(counted, key=lambda each: -each[1]["prefix_hit"] - each[1]["resume_hit"])[:2]
    assert all(shown["natural_preempt"] for _, shown in natural)
    assert all(shown["prefix_hit"] + shown["resume_hit"] > 1 for _, shown in hits)
    for case, _ in natural + hits:
        record = judge_case(clean, case).record
        assert record["verdict"] == "pass", f"{case.id}: {record['reason']}"
