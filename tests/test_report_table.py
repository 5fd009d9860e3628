"""How this tests the tables: six records small enough to count by hand, each frame compared with the hand count."""

from __future__ import annotations

import math
from typing import Any

import pytest
from replay_parity.reports import table


def record(id: str, level: str, verdict: str, **rest: Any) -> dict[str, Any]:
    return {"id": id, "level": level, "target": "torch", "regime": "exact", "verdict": verdict, **rest}


RECORDS = [
    record("a", "engine", "pass", distances={"rms": 2e-7}, limits={"rms": 4e-7}, situations=["resume", "flush"]),
    record("b", "kernel", "unknown", symptom="timeout", regime=None),
    record("c", "kernel", "pass", distances={"rms": 1e-7, "bytes": 0}, limits={"rms": 4e-7, "bytes": 0}),
    record("d", "schedule", "fail", regime="model_like", symptom="mismatch", situations=["flush"], reason="off",
           distances={"rms": 8e-7, "bytes": 3, "extra": None}, limits={"rms": 4e-7, "bytes": 0},
           first_bad={"step": 7, "row": 1, "head": None, "request": 0, "position": 9}, counts={"flushes": 3}),
    record("e", "kernel", "fail", counts={"flushes": 0, "replay_steps": 5}, distances={"max": 9.0}, limits={}),
    record("f", "kernel", "pass", counts={"replay_steps": 7}),
]  # fmt: skip


def test_counts_by_level() -> None:
    frame = table.level_table(RECORDS)
    assert list(frame.index) == ["kernel", "schedule", "engine"]
    assert frame.loc["kernel"].to_dict() == {"fail": 1, "unknown": 1, "pass": 2, "total": 4}
    assert frame.loc["schedule"].to_dict() == {"fail": 1, "unknown": 0, "pass": 0, "total": 1}
    assert frame.loc["engine"].to_dict() == {"fail": 0, "unknown": 0, "pass": 1, "total": 1}


def test_counts_by_regime_keep_what_has_none() -> None:
    frame = table.regime_table(RECORDS)
    assert frame["total"].to_dict() == {"exact": 4, "model_like": 1, "not recorded": 1}
    assert frame["fail"].to_dict() == {"exact": 1, "model_like": 1, "not recorded": 0}


def test_failures_come_worst_first_and_passes_not_at_all() -> None:
    frame = table.failure_table(RECORDS)
    assert list(frame["id"]) == ["e", "d", "b"]
    worst = frame.iloc[1]
    assert worst["where"] == "step 7, row 1, request 0, token 9"
    assert (worst["distance"], worst["value"], worst["limit"], worst["ratio"]) == ("bytes", 3, 0, math.inf)


def test_worst_first_is_stable() -> None:
    assert [entry["id"] for entry in table.worst_first(RECORDS)] == ["e", "d", "b", "c", "f", "a"]


def test_the_distance_furthest_over_its_limit_stands_for_its_level() -> None:
    worse = record("g", "kernel", "pass", distances={"rms": 9e-7}, limits={"rms": 1e-6})
    frame = table.distance_table([*RECORDS, worse])
    rows = {(row["level"], row["distance"]): row for row in frame.to_dict("records")}
    assert [key[0] for key in rows] == ["kernel", "kernel", "kernel", "schedule", "schedule", "engine"]
    assert rows["kernel", "rms"]["id"] == "g" and rows["kernel", "rms"]["ratio"] == pytest.approx(0.9)
    assert rows["kernel", "max"]["value"] == 9.0 and math.isnan(rows["kernel", "max"]["ratio"])
    assert rows["schedule", "bytes"]["ratio"] == math.inf


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [(2.0, 4.0, 0.5), (0.0, 0.0, 0.0), (1e-30, 0.0, math.inf), (math.nan, 1.0, math.inf), (math.nan, 0.0, math.inf),
     (None, 1.0, None), (1.0, None, None), (math.inf, 1.0, math.inf)],
)  # fmt: skip
def test_ratio(value: float | None, limit: float | None, expected: float | None) -> None:
    assert table.ratio(value, limit) == expected


def test_situations_that_never_occurred_are_last_and_there() -> None:
    assert table.situation_table(RECORDS).to_dict("list") == {"situation": ["flush", "resume"], "cases": [2, 1]}
    known = {"align": 0, "flush": 2, "resume": 1}
    assert list(table.situation_table(RECORDS, known)["situation"]) == ["flush", "resume", "align"]


def test_proof_tells_zero_from_never_counted() -> None:
    assert table.proof(RECORDS) == {"replay_steps": 12, "flushes": 3, "resumes": None, "one_token_tails": None}
    assert table.proof(RECORDS[4:5])["flushes"] == 0


def test_of_nothing_every_table_is_empty_and_the_verdict_unknown() -> None:
    frames = (table.level_table, table.regime_table, table.failure_table, table.distance_table, table.situation_table)
    assert [len(frame([])) for frame in frames] == [0] * 5
    assert table.worst_verdict([]) == "unknown"
    assert table.worst_verdict(["pass", "unknown", "pass"]) == "unknown"
    assert table.worst_verdict(["unknown", "fail"]) == "fail"


def test_compare_sees_what_turned_and_what_grew() -> None:
    before = [record("a", "kernel", "pass", distances={"x": 1.0, "y": 0.0, "z": 1.0}), record("b", "kernel", "fail"),
              record("c", "kernel", "pass")]  # fmt: skip
    after = [record("a", "kernel", "fail", distances={"x": 3.0, "y": 1e-9, "z": 1.005}, limits={"x": 2.0}, reason="r"),
             record("b", "kernel", "pass"), record("d", "engine", "pass")]  # fmt: skip
    found = table.compare(before, after)
    assert found.shared == 2
    assert found.changed[["id", "before", "after"]].values.tolist() == [["a", "pass", "fail"], ["b", "fail", "pass"]]
    assert found.grew[["distance", "factor"]].values.tolist() == [["y", math.inf], ["x", 3.0]]
    assert list(found.gone["id"]) == ["c"] and list(found.new["id"]) == ["d"]


def test_a_run_against_itself_changes_nothing() -> None:
    found = table.compare(RECORDS, RECORDS)
    assert found.shared == 6 and all(frame.empty for frame in (found.changed, found.grew, found.gone, found.new))


def test_a_case_judged_on_two_targets_is_two_cases() -> None:
    other = {**RECORDS[0], "target": "plugin", "verdict": "fail"}
    found = table.compare([RECORDS[0], other], [RECORDS[0], {**other, "verdict": "pass"}])
    assert found.changed["target"].tolist() == ["plugin"]
