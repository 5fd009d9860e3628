"""Every planted fault is caught in the exact regime, and what was read wrongly is named as the fault has it.

Each fault runs over the named scenarios, its likely ones first, until one fails. Then three faults are followed to the
very sentence: which token came out, which one should have, and why.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from replay_parity.cases.case import Case, Inputs, Request, Step
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.contract import Legs
from replay_parity.harness.exact import exact_findings
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.finding import Finding
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.outcome import FAIL
from replay_parity.harness.paths import open_path

LAYER = [(name, level) for name, entry in FAULTS.items() for level in entry.levels if level != "engine"]
# no rounding in this regime: a value rounded to the ring's dtype is the value
INVISIBLE = {"kernel.rounded_current"}
FIRST = (
    "plain-flush",
    "padded-step",
    "resume-at-phase-1",
    "one-token-tail",
    "align-forced-flush",
    "first-chunk-on-recycled-slot",
)


def exact_case(name: str, seed: int) -> Case:
    return replace(scenarios()[name].case, inputs=Inputs("exact", seed))


def judged(name: str, level: str, scenario: str, seed: int) -> str:
    return str(judge_case(open_path(level, name), exact_case(scenario, seed)).record["verdict"])


@pytest.mark.parametrize(("name", "level"), [entry for entry in LAYER if entry[0] not in INVISIBLE])
def test_caught(name: str, level: str) -> None:
    order = [*FIRST, *(scenario for scenario in scenarios() if scenario not in FIRST)]
    assert any(judged(name, level, scenario, seed) == FAIL for scenario in order for seed in (1, 2))


@pytest.mark.parametrize("name", sorted(INVISIBLE))
def test_rounding_faults_need_another_regime(name: str) -> None:
    level = next(iter(FAULTS[name].levels))
    assert not any(judged(name, level, scenario, seed) == FAIL for scenario in FIRST for seed in (1, 2))


def first_finding(fault: str, level: str, scenario: str, seed: int) -> Finding:
    legs: Legs = open_path(level, fault).run(exact_case(scenario, seed))
    _, findings = exact_findings(legs)
    assert findings
    return findings[0]


def test_prompt_base_reads_stale_ring_rows() -> None:
    """Prompt 6, L = 4, preempted with token 10 pending at index 0, resumed with an empty ring at token 12.

    Counted from the prompt its write_pos is 2: index 0 still holds token 10, index 1 token 7 of the ring before.
    """
    found = first_finding("cursor.prompt_base", "schedule", "resume-at-phase-1", 205)
    assert found.cause == "stale ring row" and found.symptom == "mismatch"
    assert found.message.startswith("step 7 row 0 head ")
    assert "request 0 token 12 read tokens 10 and 7 of request 0 on top, expected the sum of " in found.message
    assert found.message.endswith(": stale ring row")


def test_prompt_base_reads_poison_where_the_ring_was_retired() -> None:
    found = first_finding("cursor.prompt_base", "schedule", "resume-at-phase-1", 206)
    assert (found.cause, found.symptom) == ("poison", "poison")
    assert "request 0 token 12 read NaN or infinity, expected " in found.message
    assert found.message.endswith(": poison (its ring should be empty)")


def test_keep_cursor_reads_the_former_tenant() -> None:
    """Request 0 leaves tokens 4 to 6 in the ring, base 4; request 1 (prompt 6) counts on from there: write_pos 2."""
    one, two = (Step(((0, 1),)),) * 3, (Step(((1, 1),)),) * 2
    steps = (Step(((0, 4),)), *one, Step(((1, 6),)), *two)
    case = replace(exact_case("plain-flush", 3), requests=(Request(4, 4), Request(6, 3)), steps=steps)
    _, findings = exact_findings(open_path("schedule", "slot.keep_cursor").run(case))
    found = findings[0]
    assert found.cause == "former tenant" and found.message.startswith("step 5 row 0 head ")
    assert "request 1 token 6 read tokens 4 to 5 of request 0 on top, expected " in found.message
    assert found.message.endswith(": former tenant's ring row")


def test_leftover_append_misses_its_flush() -> None:
    """Prompt 9 in chunks of 8 and 1: token 8 goes into the ring, and the next token starts the ring over it."""
    found = first_finding("cursor.leftover_append", "schedule", "one-token-tail", 1)
    assert found.cause == "missed flush" and found.symptom == "mismatch"
    assert found.message.startswith("step 2 row 0 head ")
    assert "request 0 token 9 read the sum without token 8 of request 0, expected the sum of " in found.message
    assert found.message.endswith("to 9 of request 0: missed flush")


@pytest.mark.parametrize("seed", [1, 2])
def test_write_next_reads_what_nobody_wrote(seed: int) -> None:
    """The first decode's row goes to index 1; the second decode reads index 0, which nobody has written."""
    found = first_finding("ring.write_next", "kernel", "plain-flush", seed)
    assert (found.cause, found.symptom) == ("poison", "poison")
    assert found.message.startswith("step 2 row 0 head ") and "request 0 token 7 read " in found.message
    assert found.message.endswith("(its ring should hold token 6 of request 0)")


def test_stale_slot_names_the_other_request() -> None:
    found = first_finding("slot.stale_after_resume", "schedule", "resume-into-another-slot", 3)
    assert found.cause == "wrong slot" and "step 9 row 0" in found.message
    assert "request 0 token 10 read the state that token 7 of request 1 left, expected the sum of " in found.message
    assert found.message.endswith(": wrong slot, another request's state")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kernel.no_alpha", "wrong decay"),
        ("kernel.decay_prefix", "wrong decay"),
        ("kernel.head_map", "wrong head"),
        ("ring.state_every_step", "stale ring row"),
        ("cursor.flush_late", "missed flush"),
        ("kernel.mask_le", "poison"),
    ],
)
def test_most_findings_of_a_fault_name_its_kind(fault: str, cause: str) -> None:
    causes = [first_finding(fault, "kernel", scenario, 1).cause for scenario in ("plain-flush", "slot-reuse-mid-ring")]
    assert causes == [cause, cause]
