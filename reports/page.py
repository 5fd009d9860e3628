"""The parity report: a run directory in, one self-contained HTML file out.

Needs neither torch nor vLLM, and judges nothing anew: it shows the worst verdict that the records or the summary hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from . import table
from .run import ReportError, Run, load_run

__all__ = ["ReportError", "render", "write_report"]

# a failing case with its timeline is some 10 kB: what more there is stays in records.jsonl, and the page says so
DETAILED_CASES = 500
# shown without JavaScript; with it the list is drawn from the data, a screenful at a time
LISTED_CASES = 100
COMPARED_ROWS = 30

_FOLDER = Path(__file__).parent
_PROOF_WORDS = {
    "replay_steps": ("Replay steps", "decode rows that ran through the ring"),
    "flushes": ("Flushes", "ring folded into the checkpoint state"),
    "resumes": ("Resumes", "preempted requests that came back"),
    "one_token_tails": ("One-token tails", "last prompt tokens that ran as decode"),
}


def write_report(run_dir: Path, out: Path | None = None, against: Path | None = None) -> Path:
    """Write the HTML page of ``run_dir`` to ``out`` (default: its report.html) and return where it is.

    ``against``: the directory of an earlier run to compare with. Raises ReportError for what cannot be read.
    """
    run = load_run(run_dir)
    earlier = None if against is None else load_run(against)
    target = Path(run_dir) / "report.html" if out is None else Path(out)
    try:
        target.write_text(render(run, earlier), encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{target}: cannot be written: {error.strerror}") from None
    return target


def render(run: Run, earlier: Run | None = None) -> str:
    """The whole page as text; a function of the run alone, so the same records give the same bytes."""
    loader = jinja2.FileSystemLoader(_FOLDER)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(value=_value, times=_times, count=lambda number: f"{number:,}")
    css, picture, page = (_own(name) for name in ("page.css", "timeline.js", "page.js"))
    return environment.get_template("template.html").render(
        **_view(run), **_compared(run, earlier), css=css, scripts=(picture, page)
    )


def _own(name: str) -> Markup:
    return Markup((_FOLDER / name).read_text(encoding="utf-8"))


# ---- what the page says --------------------------------------------------------------------------------------------


def _view(run: Run) -> dict[str, Any]:
    records, summary = run.records, run.summary
    proof = {**table.proof(records), **(summary.get("proof") or {})}
    verdict, notes = _verdict(run, proof)
    counts = {name: sum(record["verdict"] == name for record in records) for name in table.VERDICTS}
    listed = [_listed(record) for record in records if record["verdict"] != "pass"]
    return {
        "verdict": verdict,
        "sentence": _sentence(counts, run),
        "notes": notes,
        "counts": counts,
        "total": len(records),
        "summary": {**dict.fromkeys(_SHOWN), **summary},
        "versions": [(name, text) for name, text in (summary.get("versions") or {}).items() if text],
        "git": _git(summary),
        "groups": [("level", _rows(table.level_table(records))), ("regime", _rows(table.regime_table(records)))],
        "proof": [(*_PROOF_WORDS[name], proof[name]) for name in table.PROOF],
        "largest": _largest(records, summary),
        "listed": listed[:LISTED_CASES],
        "unlisted": len(listed) - len(listed[:LISTED_CASES]),
        "situations": _entries(table.situation_table(records, summary.get("situations"))),
        "pairs": _pairs(summary.get("situation_pairs") or {}),
        "not_planned": _not_planned(summary.get("not_planned") or []),
        "stock_reads": _stock_reads(run),
        "data": _blob(run),
    }


_SHOWN = ("versions", "device", "seed", "command", "profile", "fault")


def _git(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"revision": None, "dirty": None, **(summary.get("git") or {})}


def _verdict(run: Run, proof: Mapping[str, int | None]) -> tuple[str, list[str]]:
    """The worst that the records or the summary say, and a note for whatever makes it worse than the records."""
    own = table.worst_verdict(record["verdict"] for record in run.records)
    verdicts, notes = [own], []
    if not run.records:
        notes.append("The run holds no record: nothing was compared.")
    if "verdict" not in run.summary:
        verdicts.append("unknown")
        notes.append("summary.json is missing or holds no verdict: the run did not end, cases may be missing.")
    elif run.summary["verdict"] != own:
        verdicts.append(run.summary["verdict"])
        notes.append(f"The summary says {run.summary['verdict']}, the records say {own}: the worse one is shown.")
    counted = sum(sum(row.values()) for row in (run.summary.get("counts") or {}).values())
    if run.summary.get("counts") and counted != len(run.records):
        verdicts.append("unknown")
        notes.append(f"The summary counts {counted:,} cases, records.jsonl holds {len(run.records):,}.")
    if proof["replay_steps"] == 0 and run.records:
        verdicts.append("unknown")
        notes.append("No step ran through the ring: the path was never entered.")
    return table.worst_verdict(verdicts), notes


def _sentence(counts: Mapping[str, int], run: Run) -> tuple[str, str]:
    """How many cases came out how, and what was compared with what."""
    total, present = sum(counts.values()), {record["level"] for record in run.records}
    levels = [name for name in table.LEVELS if name in present]
    if not total:
        return "No case was judged", ""
    cases = "1 case" if total == 1 else f"{total:,} cases"
    compared = (
        f"ReplaySSM decode was compared with a sequential decoder that shares no code with it, at {_and(levels)} level."
    )
    if counts["fail"]:
        return f"{counts['fail']:,} of {cases} failed", compared
    if counts["unknown"]:
        return f"{counts['unknown']:,} of {cases} could not be judged", compared
    return f"{cases} passed", compared


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{"name": name, **{str(k): v for k, v in row.items()}} for name, row in frame.to_dict("index").items()]


def _entries(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dicts with None again where pandas put NaN for it; a measured distance that is NaN stays."""
    measured = ("value", "before", "after")
    rows = frame.to_dict("records")
    return [{str(k): None if k not in measured and pd.isna(v) else v for k, v in row.items()} for row in rows]


def _largest(records: list[table.Record], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = _entries(table.distance_table(records))
    known = {(row["level"], row["distance"]) for row in rows}
    for level, values in (summary.get("largest") or {}).items():
        rows += [
            {"level": level, "distance": name, "value": value, "limit": None, "ratio": None, "id": None}
            for name, value in values.items()
            if (level, name) not in known
        ]
    return rows


def _listed(record: table.Record) -> dict[str, Any]:
    limits = record.get("limits") or {}
    distances = [(name, value, limits.get(name)) for name, value in (record.get("distances") or {}).items()]
    keys = ("target", "regime", "fault", "symptom", "stage", "reason", "rerun", "guards")
    found = {"where": table.where(record.get("first_bad")), "worst": table.worst_distance(record)}
    return {**record, **{key: record.get(key) for key in keys}, **found, "distances": distances}


def _pairs(pairs: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """A lower triangle of counts, and of shades from 0 to 1 (logarithmic), in the order the names first occur."""
    names = list(dict.fromkeys([*pairs, *(other for row in pairs.values() for other in row)]))
    both = {(a, b): max(pairs.get(a, {}).get(b, 0), pairs.get(b, {}).get(a, 0)) for a in names for b in names}
    top = math.log1p(max(both.values(), default=0)) or 1.0
    rows = []
    for index, name in enumerate(names):
        cells = [(other, both[name, other]) for other in names[: index + 1]]
        rows.append({"name": name, "cells": [(other, n, round(math.log1p(n) / top, 3)) for other, n in cells]})
    return {"names": names, "rows": rows, "missing": sum(both[a, b] == 0 for a in names for b in names if a < b)}


def _not_planned(entries: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        groups.setdefault((entry.get("level") or "", entry.get("reason") or "no reason given"), []).append(entry["id"])
    return [{"level": level, "reason": reason, "ids": ids} for (level, reason), ids in groups.items()]


def _stock_reads(run: Run) -> list[str]:
    """Places in vLLM's own code that read a device value on the host, each once, from the records and the summary."""
    found = {read for record in run.records for read in record.get("stock_reads") or ()}
    return sorted(found | set(run.summary.get("stock_reads") or ()))


def _compared(run: Run, earlier: Run | None) -> dict[str, Any]:
    if earlier is None:
        return {"against": None}
    found = table.compare(earlier.records, run.records)
    frames = {"changed": found.changed, "grew": found.grew, "gone": found.gone, "new": found.new}
    shown = {name: _entries(frame.head(COMPARED_ROWS)) for name, frame in frames.items()}
    git = _git(earlier.summary)
    sizes = {name: len(frame) for name, frame in frames.items()}
    return {"against": {"name": earlier.path.name, "git": git, "shared": found.shared, "sizes": sizes, **shown}}


# ---- data for page.js ----------------------------------------------------------------------------------------------

_ALWAYS = ("id", "level", "target", "regime", "fault", "verdict", "symptom", "stage", "reason", "first_bad",
           "distances", "limits", "guards", "rerun")  # fmt: skip
_DETAIL = ("counts", "case", "timeline", "text")


def _blob(run: Run) -> Markup:
    """The records as JSON that is safe inside a script element, situations as indices into one list of names."""
    names: dict[str, int] = {}
    records, detailed = [], 0
    for record in run.records:
        telling = record["verdict"] != "pass" or record.get("guards")
        keys = _ALWAYS + _DETAIL if telling and detailed < DETAILED_CASES else _ALWAYS
        detailed += keys != _ALWAYS
        entry = {key: record[key] for key in keys if record.get(key) not in (None, {}, [])}
        worst = table.worst_distance(record)
        seconds = run.seconds.get((record["id"], record["level"], record.get("target") or ""))
        entry |= {} if worst is None else {"worst": list(worst)}
        entry |= {} if seconds is None else {"seconds": seconds}
        entry |= {"cut": True} if telling and keys == _ALWAYS else {}
        entry["situations"] = [names.setdefault(name, len(names)) for name in record.get("situations") or ()]
        records.append(_json(entry))
    text = f'{{"situations":{_json(list(names))},"records":[{",".join(records)}]}}'
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _json(value: Any) -> str:
    """JSON has no NaN: such numbers become the strings that JavaScript's Number() reads back."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _value(number: float | None) -> str:
    """0.31, 3.1e-6, 0; a dash for what was not measured."""
    if number is None:
        return "–"
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞"
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _times(ratio: float | None) -> str:
    """A ratio to its limit: 0.42×, 1.0e5×, 0 for an exact match."""
    return _value(ratio) if not ratio or math.isinf(ratio) else f"{_value(float(f'{ratio:.2g}'))}×"
