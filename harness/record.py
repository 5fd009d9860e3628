"""One JSON object a case and level: what is kept, shown and judged again; nothing that varies from run to run."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from ..cases.case import Case
from ..cases.situations import situations
from ..cases.timeline import Timeline, play
from .architectures import DEFAULT_ARCHITECTURE
from .contract import Legs, Path
from .outcome import PASS
from .trace import Cursors
from .verdict import Verdict

Record = dict[str, Any]


def make_record(case: Case, path: Path, verdict: Verdict, legs: Legs | None) -> Record:
    """The record of one Case in a path. ``case`` and ``timeline`` are kept where there is something to look at.

    ``architecture`` is there where it is not the first one, ``execution`` (vLLM's mode and cudagraph_mode) where the
    subject's engine has opened.
    """
    timeline = play(case)
    # of a level that loads no model there is none
    architecture = getattr(path, "architecture", DEFAULT_ARCHITECTURE)
    execution = None if legs is None else legs.execution
    found = situations(case, timeline)
    return {
        "id": case.id,
        "level": path.level,
        "target": path.target,
        **({} if architecture == DEFAULT_ARCHITECTURE else {"architecture": architecture}),
        **({} if execution is None else {"execution": execution}),
        "regime": case.inputs.regime,
        "fault": path.fault,
        "verdict": verdict.outcome,
        "symptom": verdict.symptom,
        "stage": verdict.stage,
        "reason": verdict.reason,
        "first_bad": None if verdict.first_bad is None else dict(vars(verdict.first_bad)),
        "distances": {name: _short(value) for name, value in verdict.distances.items()},
        "limits": {name: _short(value) for name, value in verdict.limits.items()},
        "situations": [name for name, count in found.items() if count],
        "counts": _counts(found, legs),
        "stock_reads": [] if legs is None or legs.subject is None else list(legs.subject.stock_reads),
        "guards": case.guards or None,
        "rerun": rerun_command(case, path) if verdict.outcome != PASS else None,
        "case": case.to_json() if verdict.outcome != PASS else None,
        "timeline": _picture(case, timeline, legs) if verdict.outcome != PASS else None,
    }


def dumps(record: Record) -> str:
    """The record as one line. Numbers that are not finite are None in it."""
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


def failure_name(case_id: str, level: str) -> str:
    """File name of a failing case below failures/."""
    safe = "".join(letter if letter.isalnum() or letter in "-_.#" else "_" for letter in case_id)
    return f"{level}-{safe}.json"


def rerun_command(case: Case, path: Path) -> str:
    """The command that judges the case again, to be typed in the run's directory."""
    words = ["replay-parity", "replay", f"failures/{failure_name(case.id, path.level)}", "--level", path.level]
    words += [*path.options, *(["--fault", path.fault] if path.fault else [])]
    return shlex.join(words)


def _counts(found: dict[str, int], legs: Legs | None) -> dict[str, int]:
    """Proof that the path was entered: what the subject ran, and what was played to it. Empty where it did not run."""
    if legs is None or legs.subject is None:
        return {}
    return {**legs.subject.counts, "resumes": found["resume"], "one_token_tails": found["one_token_tail"]}


def _short(value: float) -> float | None:
    """Six digits: enough to judge by, few enough to read. None where the number is not finite: JSON has no such."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def _picture(case: Case, timeline: Timeline, legs: Legs | None) -> dict[str, Any]:
    """The timeline with right and told cursors, for the page to draw."""
    right = _by_key(legs.truth.cursors if legs is not None and legs.truth is not None else None)
    got = _by_key(legs.subject.cursors if legs is not None and legs.subject is not None else None)
    steps = []
    for index, step in enumerate(timeline.steps):
        rows = []
        for place, row in enumerate(step.rows):
            write_pos, is_flush = right.get((index, place), (None, None))
            got_pos, got_flush = got.get((index, place), (None, None))
            rows.append(
                {
                    "request": row.request,
                    "num_tokens": row.num_tokens,
                    "num_computed": row.num_computed,
                    "kind": row.kind,
                    "slot": row.slot,
                    "write_pos": write_pos,
                    "is_flush": is_flush,
                    "got_write_pos": got_pos,
                    "got_is_flush": got_flush,
                }
            )
        steps.append(
            {
                "rows": rows,
                "preempt": list(step.preempt),
                "abort": list(step.abort),
                "finished": list(step.finished),
                "padded_to": step.padded_to,
            }
        )
    return {"buffer_len": case.replay.buffer_len, "steps": steps}


def _by_key(cursors: Cursors | None) -> dict[tuple[int, int], tuple[int, bool]]:
    if cursors is None:
        return {}
    values = zip(cursors.write_pos.tolist(), cursors.is_flush.tolist(), strict=True)
    return dict(zip(cursors.rows.labels(), values, strict=True))
