"""Tables from records: pandas frames that the terminal and the page both show.

A record is a plain dict, one line of ``records.jsonl``. Nothing here needs torch or vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

Record = Mapping[str, Any]

# worst first: the order of every table, and of the verdict of a whole run
VERDICTS = ("fail", "unknown", "pass")
LEVELS = ("kernel", "schedule", "engine")
PROOF = ("replay_steps", "flushes", "resumes", "one_token_tails")

_FAILURE_COLUMNS = ("verdict", "level", "target", "regime", "id", "symptom", "stage", "where", "distance", "value",
                    "limit", "ratio", "reason", "rerun")  # fmt: skip
_DISTANCE_COLUMNS = ("level", "distance", "value", "limit", "ratio", "id")


@dataclass(frozen=True)
class Comparison:
    """What changed from run ``before`` to run ``after``; a case is known by (id, level, target).

    ``changed``: id, level, target, before, after (verdicts), reason; what got worse first.
    ``grew``: id, level, target, distance, before, after, factor, limit; largest factor first.
    ``gone`` and ``new``: id, level, target, verdict of cases that only one of the runs has.
    """

    changed: pd.DataFrame
    grew: pd.DataFrame
    gone: pd.DataFrame
    new: pd.DataFrame
    shared: int


def worst_verdict(verdicts: Iterable[str]) -> str:
    """The worst of some verdicts: fail before unknown before pass; of none it is unknown, never pass."""
    return min(verdicts, key=VERDICTS.index, default="unknown")


def worst_first(records: Sequence[Record]) -> list[Record]:
    """Records in the order that they are read in: fail, unknown, pass; kernel, schedule, engine; then as recorded."""
    return sorted(records, key=lambda record: (VERDICTS.index(record["verdict"]), LEVELS.index(record["level"])))


def ratio(value: float | None, limit: float | None) -> float | None:
    """How many times its limit a distance is; None where either was not taken.

    A distance that is not a number is infinitely wrong; over a limit of 0 only 0 is within.
    """
    if value is None or limit is None:
        return None
    if math.isnan(value):
        return math.inf
    if limit > 0:
        return value / limit
    return 0.0 if value <= limit else math.inf


def worst_distance(record: Record) -> tuple[str, float, float, float] | None:
    """(name, value, limit, ratio) of the distance furthest over its limit, None when nothing was measured."""
    limits = record.get("limits") or {}
    found = []
    for name, value in (record.get("distances") or {}).items():
        times = ratio(value, limits.get(name))
        if times is not None:
            found.append((name, value, limits[name], times))
    return max(found, key=lambda entry: entry[3], default=None)


def where(first_bad: Mapping[str, Any] | None) -> str:
    """``{"step": 7, "row": 1, ...}`` as "step 7, row 1, head 2, request 0, token 9"; "" for None."""
    if not first_bad:
        return ""
    names = (("step", "step"), ("row", "row"), ("head", "head"), ("request", "request"), ("position", "token"))
    return ", ".join(f"{word} {first_bad[key]}" for key, word in names if first_bad.get(key) is not None)


def level_table(records: Sequence[Record]) -> pd.DataFrame:
    """Cases by level (index, in the order of LEVELS): columns fail, unknown, pass, total."""
    return _counts(records, "level", LEVELS)


def regime_table(records: Sequence[Record]) -> pd.DataFrame:
    """Cases by input regime (index): columns fail, unknown, pass, total."""
    return _counts(records, "regime", ("exact", "model_like", "adversarial", "trained"))


def failure_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row a case that did not pass, failed before unknown, with where, how far and how to run it again.

    ``distance``, ``value``, ``limit`` and ``ratio`` are those of the distance furthest over its limit.
    """
    rows = []
    for record in worst_first(records):
        if record["verdict"] == "pass":
            continue
        name, value, limit, times = worst_distance(record) or (None, None, None, None)
        found = {"where": where(record.get("first_bad")), "distance": name, "value": value, "limit": limit}
        plain = {key: record.get(key) for key in _FAILURE_COLUMNS if key not in found and key != "ratio"}
        rows.append({**plain, **found, "ratio": times})
    return pd.DataFrame(rows, columns=list(_FAILURE_COLUMNS))


def distance_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each level and distance name: the record nearest to, or furthest over, its limit.

    Where nothing of that name has a limit, the largest value; ``limit`` and ``ratio`` are then NaN.
    """
    best: dict[tuple[str, str], tuple[tuple[float, float], dict[str, Any]]] = {}
    for record in records:
        limits = record.get("limits") or {}
        for name, value in (record.get("distances") or {}).items():
            if value is None:
                continue
            times = ratio(value, limits.get(name))
            key, rank = (record["level"], name), (-1.0 if times is None else times, value)
            if key not in best or rank > best[key][0]:
                row = dict(zip(_DISTANCE_COLUMNS, (*key, value, limits.get(name), times, record["id"]), strict=True))
                best[key] = (rank, row)
    rows = [row for _, row in sorted(best.values(), key=lambda entry: LEVELS.index(entry[1]["level"]))]
    frame = pd.DataFrame(rows, columns=list(_DISTANCE_COLUMNS))
    return frame.astype({name: float for name in ("value", "limit", "ratio")})


def situation_table(records: Sequence[Record], known: Mapping[str, int] | None = None) -> pd.DataFrame:
    """Situations and in how many cases each occurs, most frequent first: columns situation, cases.

    ``known`` is the summary's count: it also names situations that never occurred.
    """
    counts = dict(known) if known else _situations(records)
    frame = pd.DataFrame(list(counts.items()), columns=["situation", "cases"])
    return frame.sort_values("cases", ascending=False, kind="stable", ignore_index=True)


def proof(records: Sequence[Record]) -> dict[str, int | None]:
    """Sums of the counters that show the path was entered; None for a counter that no record holds."""
    seen: dict[str, int | None] = dict.fromkeys(PROOF)
    for record in records:
        for name, count in (record.get("counts") or {}).items():
            if name in seen and count is not None:
                seen[name] = (seen[name] or 0) + count
    return seen


def compare(before: Sequence[Record], after: Sequence[Record]) -> Comparison:
    """Two runs case by case. A distance grew when it is larger by more than 1 %; one that became NaN grew most."""
    old, new = _keyed(before), _keyed(after)
    both = [key for key in new if key in old]
    changed = [
        _named(key, before=old[key]["verdict"], after=new[key]["verdict"], reason=new[key].get("reason"))
        for key in both
        if old[key]["verdict"] != new[key]["verdict"]
    ]
    changed.sort(key=lambda row: (VERDICTS.index(row["after"]), LEVELS.index(row["level"])))
    grew = [row for key in both for row in _growth(key, old[key], new[key])]
    grew.sort(key=lambda row: -row["factor"])
    names = ["id", "level", "target"]
    return Comparison(
        changed=pd.DataFrame(changed, columns=[*names, "before", "after", "reason"]),
        grew=pd.DataFrame(grew, columns=[*names, "distance", "before", "after", "factor", "limit"]),
        gone=_only(old, new),
        new=_only(new, old),
        shared=len(both),
    )


def _counts(records: Sequence[Record], key: str, order: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame(
        {key: [record.get(key) or "not recorded" for record in records], "verdict": [r["verdict"] for r in records]},
        dtype=object,
    )
    table = frame.groupby([key, "verdict"]).size().unstack(fill_value=0).reindex(columns=VERDICTS, fill_value=0)
    names = [*(name for name in order if name in table.index), *(name for name in table.index if name not in order)]
    table = table.reindex(names).astype(int)
    table.columns.name = None
    return table.assign(total=table.sum(axis=1))


def _situations(records: Sequence[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        for name in record.get("situations") or ():
            counts[name] = counts.get(name, 0) + 1
    return counts


_Key = tuple[str, str, str]


def _keyed(records: Sequence[Record]) -> dict[_Key, Record]:
    return {(record["id"], record["level"], record.get("target") or ""): record for record in records}


def _named(key: _Key, **rest: object) -> dict[str, Any]:
    return {"id": key[0], "level": key[1], "target": key[2], **rest}


def _growth(key: _Key, before: Record, after: Record) -> Iterable[dict[str, Any]]:
    old, limits = before.get("distances") or {}, after.get("limits") or {}
    for name, value in (after.get("distances") or {}).items():
        was = old.get(name)
        if was is None or value is None or math.isnan(was):
            continue
        times = ratio(value, was)
        if times is not None and times > 1.01:
            yield _named(key, distance=name, before=was, after=value, factor=times, limit=limits.get(name))


def _only(here: Mapping[_Key, Record], there: Mapping[_Key, Record]) -> pd.DataFrame:
    rows = [_named(key, verdict=record["verdict"]) for key, record in here.items() if key not in there]
    return pd.DataFrame(rows, columns=["id", "level", "target", "verdict"])
