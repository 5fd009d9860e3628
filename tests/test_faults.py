"""Every planted fault is caught at every layer level it has a form at, by a named scenario, and leaves no trace behind.

A fault is an edit of the product's source: an edit that no longer fits its source must be an error, not a clean run.
"""

from __future__ import annotations

import pytest
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.fault_catalogue import FAULTS, Edit
from replay_parity.harness.faults import FaultError, edited, fault, plant
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.kernel_path import KernelPath
from replay_parity.harness.outcome import FAIL, PASS
from replay_parity.harness.paths import open_path

# tests/test_real_builder.py has those that vLLM is needed for
LAYER = [
    (name, level)
    for name, entry in FAULTS.items()
    for level in entry.levels
    if level != "engine" and level not in entry.targets
]


@pytest.mark.parametrize(("name", "level"), LAYER)
def test_caught_by_a_scenario(name: str, level: str) -> None:
    path = open_path(level, name)
    caught = [s.case.id for s in scenarios().values() if judge_case(path, s.case).record["verdict"] == FAIL]
    assert caught
    clean = judge_case(open_path(level, None), scenarios()[caught[0]].case)
    assert clean.record["verdict"] == PASS


def test_unknown_name_is_refused() -> None:
    with pytest.raises(FaultError, match=r"there is no 'cursor\.nothing'; there are cursor\.prompt_base"):
        fault("cursor.nothing")


def test_level_without_the_fault_is_refused() -> None:
    with pytest.raises(FaultError, match="has no form at level kernel"), plant("cursor.prompt_base", "kernel"):
        pass


def test_stale_edit_is_an_error() -> None:
    edit = Edit("kernels.cursor:decode_cursor", "this line is not there", "x")
    with pytest.raises(FaultError, match="0 times"), edited(edit.where, [edit]):
        pass


def test_a_fault_is_gone_after_the_block() -> None:
    case = scenarios()["plain-flush"].case
    assert judge_case(KernelPath("ring.write_next"), case).record["verdict"] == FAIL
    assert judge_case(KernelPath(), case).record["verdict"] == PASS
