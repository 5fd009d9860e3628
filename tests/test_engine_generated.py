"""Generated cases in the real engine: the verdict there is the schedule level's, clean and with shared faults planted.

The same Case is judged at both levels by paths that share the plugin's kernels and nothing of the harness around them.
Verdicts must agree, with FULL graphs and their padded rows too: also for a fault that only writes where nothing ever
looks, which both levels find by reading the memory after each step, and for one that the Case cannot show, where both
must pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from replay_parity.cases.case import Case
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.explore import drawn_cases
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.paths import open_path

pytestmark = pytest.mark.engine

# the first has one request, runs eagerly and ends before a ring entry is read again; the second has six, preempts six
# times and runs in FULL graphs
PICKED = (0, 24)
SHARED = ("cursor.prompt_base", "cursor.flush_late", "ring.write_next", "ring.state_every_step", "kernel.decay_prefix")


@pytest.fixture(scope="module")
def generated() -> list[Case]:
    cases = list(drawn_cases("engine", ("model_like",), 5, max(PICKED) + 1))
    return [cases[number] for number in PICKED]


@pytest.fixture(scope="module")
def clean() -> Iterator[EnginePath]:
    path = EnginePath()
    yield path
    path.close()


def test_clean_cases_pass_at_both_levels(clean: EnginePath, generated: list[Case]) -> None:
    for case in generated:
        for path in (open_path("schedule", None), clean):
            record = judge_case(path, case).record
            assert record["verdict"] == "pass", record["reason"]


@pytest.mark.parametrize("fault", SHARED)
def test_a_fault_gets_one_verdict_at_both_levels(clean: EnginePath, generated: list[Case], fault: str) -> None:
    assert {"schedule", "engine"} <= set(FAULTS[fault].levels)
    faulty = EnginePath(fault)
    faulty.baselines = clean.baselines
    try:
        got = [judge_case(faulty, case).record["verdict"] for case in generated]
    finally:
        faulty.subjects.close()
    assert got == [judge_case(open_path("schedule", fault), case).record["verdict"] for case in generated]
    assert "fail" in got
