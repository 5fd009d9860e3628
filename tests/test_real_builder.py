"""The plugin's real metadata builder, fed the steps of generated timelines, agrees with the ledger row by row.

vLLM is imported but no engine runs. The comparison must reject: with a cursor fault planted it has to find a row.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from replay_parity.cases.case import Case
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.strategies import cases
from replay_parity.cases.timeline import play
from replay_parity.harness.builder_path import BuilderPath, builder_findings
from replay_parity.harness.faults import plant
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.outcome import PASS

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", scenarios())
def test_scenarios_agree(name: str) -> None:
    case = scenarios()[name].case
    assert builder_findings(case, play(case)) == []


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(cases("schedule", ("exact",)))
def test_generated_timelines_agree(case: Case) -> None:
    assert builder_findings(case, play(case)) == []


@pytest.mark.parametrize(
    "fault", ["cursor.leftover_append", "cursor.flush_early", "cursor.modulo", "cursor.base_plus_one"]
)
def test_a_planted_cursor_fault_is_seen(fault: str) -> None:
    with plant(fault, "engine"):
        found = [finding for s in scenarios().values() for finding in builder_findings(s.case, play(s.case))]
    assert found and "right is" in found[0].message


def test_the_builder_drives_a_whole_case() -> None:
    record = judge_case(BuilderPath(), scenarios()["resume-into-another-slot"].case).record
    assert (record["verdict"], record["target"]) == (PASS, "builder")
