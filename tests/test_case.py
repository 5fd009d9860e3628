"""Cases go through JSON unchanged; whatever is wrong with one is refused by the path of its field.

The wrong ones are made from a right one by one change each, so a refusal can only come from that change.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replay_parity.cases.case import Case, CaseError, load_case
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.situations import names, situations
from replay_parity.cases.timeline import play

Json = dict[str, Any]


def right() -> Json:
    return scenarios()["resume-into-another-slot"].case.to_json()


@pytest.mark.parametrize("name", scenarios())
def test_round_trip(name: str) -> None:
    case = scenarios()[name].case
    assert Case.from_json(json.loads(case.dumps())) == case


@pytest.mark.parametrize("name", scenarios())
def test_scenarios_are_legal_at_both_shapes(name: str) -> None:
    assert play(scenarios()[name].case) == play(engine_scenarios()[name].case)


def set_at(*path: str | int, value: Any) -> Callable[[Json], None]:
    def change(data: Json) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


WRONG_FIELDS: dict[str, tuple[Callable[[Json], None], str]] = {
    "unknown key": (set_at("replays", value=1), "replays: unknown key"),
    "unknown inner key": (set_at("requests", 0, "prompt", value=1), "requests[0].prompt: unknown key"),
    "missing key": (lambda data: data["replay"].pop("ring_dtype"), "replay.ring_dtype: is missing"),
    "negative tokens": (set_at("steps", 0, "rows", 0, value=[0, -6]), "steps[0].rows[0][1]: must be from 1"),
    "no tokens": (set_at("steps", 0, "rows", 0, value=[0, 0]), "steps[0].rows[0][1]: must be from 1"),
    "boolean": (set_at("replay", "buffer_len", value=True), "replay.buffer_len: must be an integer, not a boolean"),
    "float": (set_at("inputs", "seed", value=1.5), "inputs.seed: must be an integer, not a float"),
    "dtype": (set_at("replay", "state_dtype", value="float8"), "replay.state_dtype: must be one of float32"),
    "heads": (set_at("geometry", "num_v_heads", value=3), "geometry.num_v_heads: must be a multiple of num_k_heads"),
    "schema": (set_at("schema", value=2), "schema: must be 1"),
    "id": (set_at("id", value=""), "id: must be a string"),
    "no steps": (set_at("steps", value=[]), "steps: must hold at least one entry"),
    "capture sizes": (set_at("graphs", value={"capture_sizes": [4, 2]}), "graphs.capture_sizes: must be ascending"),
    "row shape": (set_at("steps", 0, "rows", 0, value=[0]), "steps[0].rows[0]: must be [request, num_tokens]"),
    "align block": (set_at("cache", value={"mode": "align", "block_size": 0}), "cache.block_size: must be from 1"),
    "few blocks, no size": (
        set_at("cache", value={"mode": "none", "block_size": 0, "num_blocks": 9}),
        "cache.block_size: must be from 1",
    ),
    "few blocks and prefixes": (
        set_at("cache", value={"mode": "align", "block_size": 4, "num_blocks": 9}),
        'cache.num_blocks: goes with mode "none" only',
    ),
    "no blocks": (
        set_at("cache", value={"mode": "none", "block_size": 4, "num_blocks": 1}),
        "cache.num_blocks: must be from 2",
    ),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_wrong_field_is_named(name: str) -> None:
    change, message = WRONG_FIELDS[name]
    data = copy.deepcopy(right())
    change(data)
    with pytest.raises(CaseError) as refusal:
        Case.from_json(data)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


WRONG_TIMELINES: dict[str, tuple[Callable[[Json], None], str]] = {
    "decodes before prefill": (
        set_at("steps", 0, "rows", 0, value=[0, 7]),
        "steps[0].rows[0]: request 0 decodes before its prefill is done: it has 6 known tokens",
    ),
    "runs ahead": (set_at("steps", 1, "rows", 0, value=[0, 2]), "steps[1].rows[0]: request 0 runs ahead"),
    "ends in prefill": (lambda data: data["steps"].__delitem__(slice(1, None)), "steps: end while request 0"),
    "never runs": (lambda data: data["requests"].append(data["requests"][0]), "requests[2]: never gets a row"),
    "no such request": (set_at("steps", 0, "rows", 0, value=[2, 1]), "steps[0].rows[0]: there is no request 2"),
    "twice in a step": (set_at("steps", 1, "rows", value=[[0, 1], [0, 1]]), "steps[1].rows[1]: request 0 already"),
    "preempt idle": (set_at("steps", 0, "preempt", value=[1]), "steps[0].preempt[0]: request 1 is new"),
    "run after abort": (set_at("steps", 1, "abort", value=[0]), "steps[1].rows[0]: request 0 is aborted"),
    "empty step": (set_at("steps", 1, "rows", value=[]), "steps[1].rows: must hold at least one row"),
    "prefix of later": (
        set_at("requests", 0, value={"prompt_len": 6, "output_len": 10, "shared_prefix_of": 1, "shared_prefix_len": 2}),
        "requests[0].shared_prefix_of: must name an earlier request",
    ),
    "chunk across blocks": (
        set_at("cache", value={"mode": "align", "block_size": 4}),
        "steps[0].rows[0]: in align mode",
    ),
}


@pytest.mark.parametrize("name", WRONG_TIMELINES)
def test_illegal_timeline_is_named(name: str) -> None:
    change, message = WRONG_TIMELINES[name]
    data = copy.deepcopy(right())
    change(data)
    case = Case.from_json(data)
    with pytest.raises(CaseError) as refusal:
        play(case)
    assert str(refusal.value).startswith(message)


def test_unfinished_prefill_says_so() -> None:
    data = right()
    data["requests"] = [{"prompt_len": 6, "output_len": 3}]
    data["steps"] = [{"rows": [[0, 1]]}] * 3
    with pytest.raises(CaseError, match=r"request 0 is running with 3 of 6 known tokens .* decodes only after"):
        play(Case.from_json(data))


def test_files_that_are_no_case(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    path.write_text(scenarios()["plain-flush"].case.dumps()[:200], encoding="utf-8")
    with pytest.raises(CaseError, match=r"not whole JSON .* truncated"):
        load_case(path)
    with pytest.raises(CaseError, match="cannot be read"):
        load_case(tmp_path / "none.json")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(CaseError, match="UTF-8"):
        load_case(path)


def test_scenarios_show_what_they_guard() -> None:
    """Counts by hand of what some names promise."""
    table = {name: situations(entry.case, play(entry.case)) for name, entry in scenarios().items()}
    assert table["plain-flush"]["flush"] == 1 and table["plain-flush"]["append"] == 4
    assert table["two-flushes"]["flush"] == 2
    assert table["one-token-tail"]["one_token_tail"] == 1
    assert table["first-chunk-on-recycled-slot"]["one_token_prompt_on_recycled_slot"] == 1
    for phase in range(4):
        counts = table[f"resume-at-phase-{phase}"]
        assert counts["resume"] == 1 and counts["preempt_mid_ring"] == (phase > 0)
    assert table["resume-into-another-slot"]["resume_other_slot"] == 1
    assert table["batch-order-flips"]["batch_order_flip"] >= 4
    assert table["slot-reuse-mid-ring"]["finish_mid_ring"] == 2
    assert table["slot-reuse-mid-ring"]["recycled_slot"] == 1
    assert table["padded-step"]["padded_step"] == 6
    assert table["abort-mid-ring"]["abort_mid_ring"] == 1
    shown = {name for counts in table.values() for name, count in counts.items() if count}
    assert set(names()) - shown <= {"padding_filled", "resume_chunked"}
