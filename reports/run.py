"""A run directory, read and checked: ``records.jsonl``, ``summary.json``, ``timings.jsonl``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import table


class ReportError(ValueError):
    """A run directory that cannot be shown; one line that names the file, the line and the key."""


@dataclass(frozen=True)
class Run:
    """What a run left behind: ``records`` worst first, the summary ({} if there is none), seconds by case."""

    path: Path
    records: list[table.Record]
    summary: Mapping[str, Any]
    seconds: Mapping[tuple[str, str, str], float]


def load_run(run_dir: Path) -> Run:
    """Read and check a run directory. Only records.jsonl must be there. Raises ReportError."""
    folder = Path(run_dir)
    records = [_record(line, data) for line, data in _lines(folder / "records.jsonl")]
    path, seconds = folder / "timings.jsonl", {}
    for line, data in _lines(path) if path.exists() else ():
        _refuse(line, _TIMING(data))
        seconds[(data["id"], data["level"], data.get("target") or "")] = float(data["seconds"])
    return Run(folder, table.worst_first(records), _summary(folder / "summary.json"), seconds)


# None for what is right, else why not, led by the path to it: ".steps[0].rows: must be a list"
_Check = Callable[[object], str | None]


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else ": must be a string"


def _number(value: object) -> str | None:
    return None if isinstance(value, int | float) and not isinstance(value, bool) else ": must be a number"


def _integer(value: object) -> str | None:
    return None if isinstance(value, int) and not isinstance(value, bool) else ": must be an integer"


def _anything(value: object) -> str | None:
    return None


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else ": must be true or false"


def _maybe(check: _Check) -> _Check:
    return lambda value: None if value is None else check(value)


def _one_of(names: tuple[str, ...]) -> _Check:
    return lambda value: None if value in names else f": must be one of {', '.join(names)}, not {value!r}"


def _every(check: _Check) -> _Check:
    """A list, or the values of an object, of which each passes ``check``; what does not is named by its place."""

    def inner(value: object) -> str | None:
        named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, entry in named:
            why = check(entry)
            if why:
                return f"[{name}]{why}" if isinstance(name, int) else f".{name}{why}"
        return None

    return inner


def _list_of(check: _Check) -> _Check:
    return lambda value: _every(check)(value) if isinstance(value, list) else ": must be a list"


def _object_of(check: _Check) -> _Check:
    return lambda value: _every(check)(value) if isinstance(value, dict) else ": must be an object"


def _shape(required: Mapping[str, _Check], optional: Mapping[str, _Check]) -> _Check:
    """An object with these keys; others are left alone."""
    known = {**required, **optional}

    def inner(value: object) -> str | None:
        if not isinstance(value, dict):
            return ": must be an object"
        for key, check in known.items():
            if key not in value and key in required:
                return f".{key}: is missing"
            why = check(value[key]) if key in value else None
            if why:
                return f".{key}{why}"
        return None

    return inner


_INTEGERS = _list_of(_integer)
_ROW = _shape(
    {"request": _integer, "num_tokens": _integer, "num_computed": _integer, "kind": _text},
    {"slot": _maybe(_integer), "write_pos": _maybe(_integer), "got_write_pos": _maybe(_integer),
     "is_flush": _maybe(_flag), "got_is_flush": _maybe(_flag)},
)  # fmt: skip
_STEP = _shape(
    {"rows": _list_of(_ROW)},
    {"preempt": _INTEGERS, "abort": _INTEGERS, "finished": _INTEGERS, "padded_to": _maybe(_integer)},
)
_RECORD = _shape(
    {"id": _text, "level": _one_of(table.LEVELS), "verdict": _one_of(table.VERDICTS)},
    {**dict.fromkeys(("target", "regime", "fault", "symptom", "stage", "reason", "guards", "rerun", "text"),
                     _maybe(_text)),
     **dict.fromkeys(("distances", "limits"), _maybe(_object_of(_maybe(_number)))),
     **dict.fromkeys(("situations", "stock_reads"), _maybe(_list_of(_text))),
     "counts": _maybe(_object_of(_maybe(_integer))),
     "first_bad": _maybe(_object_of(_maybe(_integer))),
     "case": _maybe(_object_of(_anything)),
     "timeline": _maybe(_shape({"buffer_len": _integer, "steps": _list_of(_STEP)}, {}))},
)  # fmt: skip
_SUMMARY = _shape({}, {
    "verdict": _one_of(table.VERDICTS),
    **dict.fromkeys(("counts", "situation_pairs"), _maybe(_object_of(_object_of(_integer)))),
    **dict.fromkeys(("situations", "proof"), _maybe(_object_of(_integer))),
    "largest": _maybe(_object_of(_object_of(_maybe(_number)))),
    **dict.fromkeys(("versions", "git"), _maybe(_object_of(_anything))),
    "not_planned": _maybe(_list_of(_shape({"id": _text}, {"level": _maybe(_text), "reason": _maybe(_text)}))),
    "stock_reads": _maybe(_list_of(_text)),
    **dict.fromkeys(("device", "command", "profile", "fault"), _maybe(_text)),
    "seed": _maybe(_integer),
})  # fmt: skip
_TIMING = _shape({"id": _text, "level": _text, "seconds": _number}, {"target": _maybe(_text)})


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """("records.jsonl:7", parsed line) of each line that is not blank."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReportError(f"{path}: is missing; is {path.parent} the directory of a run?") from None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path}: is not UTF-8 text") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _parse(f"{path}:{number}", line)


def _parse(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ReportError(f"{place}: not whole JSON ({error.msg} at column {error.colno})") from None


def _refuse(place: str, why: str | None) -> None:
    if why:
        raise ReportError(f"{place}: {why.lstrip('.: ')}")


def _record(place: str, data: Any) -> table.Record:
    _refuse(place, _RECORD(data))
    record: table.Record = data
    return {**record, "distances": _not_finite(record.get("distances") or {})}


def _not_finite(distances: Mapping[str, float | None]) -> dict[str, float]:
    """A record has None for a distance that is not finite: JSON has no such number."""
    return {name: math.inf if value is None else value for name, value in distances.items()}


def _summary(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        data = _parse(str(path), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: cannot be read: {error}") from None
    _refuse(str(path), _SUMMARY(data))
    summary: Mapping[str, Any] = data
    largest = {level: _not_finite(row) for level, row in (summary.get("largest") or {}).items()}
    return {**summary, "largest": largest}
