"""How this tests, in plain words: an engine child is killed in mid-campaign, as an out-of-memory killer would.

Three named cases run through the command line. As soon as the first one is judged every engine child is stopped, so
that it stands still in the second case, and killed. That case must be unknown with its symptom and stage, the third one
pass in fresh engines, and the command end with 3, because nothing failed and not all was judged.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from replay_parity.__main__ import main
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.harness import plan as planning
from replay_parity.harness.engine_children import nursery
from replay_parity.harness.judge_case import Judged
from replay_parity.harness.plan import Planned
from replay_parity.harness.progress import Progress

pytestmark = pytest.mark.engine

NAMES = ("plain-flush", "two-flushes", "one-token-tail")


def _engine_children() -> list[int]:
    pid = nursery().process.pid
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def _kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_the_rest_of_a_campaign_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Planned(engine_scenarios()[name].case, "engine") for name in NAMES]
    add = Progress.add
    stopped: list[int] = []

    def stop_after_the_first(self: Progress, judged: Judged) -> None:
        add(self, judged)
        if not stopped:
            stopped.extend(_engine_children())
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.0, _kill, [stopped]).start()

    def three_jobs(*_: Any, **__: Any) -> tuple[list[Planned], list[Any]]:
        return jobs, []

    monkeypatch.setattr(planning, "plan", three_jobs)
    monkeypatch.setattr(Progress, "add", stop_after_the_first)
    assert main(["run", "--level", "engine", "--out", str(tmp_path / "report")]) == 3
    assert len(stopped) == 2
    lines = (tmp_path / "report" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    assert [records[name]["verdict"] for name in NAMES] == ["pass", "unknown", "pass"]
    killed = records["two-flushes"]
    assert killed["symptom"] == "crash" and killed["stage"].endswith(": play")
    assert killed["reason"] == "the engine process was killed (SIGKILL: out of memory, or by hand)"
    summary = json.loads((tmp_path / "report" / "summary.json").read_text(encoding="utf-8"))
    assert summary["verdict"] == "unknown" and not summary["interrupted"]
