"""The directory of one run: records and timings appended as cases finish, failing cases, the summary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..cases.case import Case
from ..cases.refusal import Refusal
from .architectures import DEFAULT_ARCHITECTURE
from .outcome import FAIL
from .record import Record, dumps, failure_name

RUN_FILES = ("records.jsonl", "timings.jsonl", "summary.json", "report.html")
# what the ids of generated cases begin with
GENERATED = "generated-"
# what a resumed run takes over from the interrupted one
SETTINGS = ("levels", "profile", "seed", "examples", "target", "fault")
# the same of settings that earlier versions did not have
LATER_SETTINGS: dict[str, Any] = {"engine_arg": [], "architecture": DEFAULT_ARCHITECTURE}


class RunDirError(Refusal):
    """A directory that cannot be used as asked; the message says what to do."""


class RunDir:
    """Writes below ``path``; a fresh run replaces the files of an earlier one, a resumed one goes on behind them."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.records_file = path / "records.jsonl"
        self.timings_file = path / "timings.jsonl"
        self.failures = path / "failures"
        if resume:
            self._check_resumable()
        else:
            self._clear()

    def add(self, record: Record, seconds: float, case: Case) -> None:
        """Append one finished case."""
        if record["verdict"] == FAIL:
            self.failures.mkdir(exist_ok=True)
            (self.failures / failure_name(case.id, record["level"])).write_text(case.dumps(), encoding="utf-8")
        timing = {name: record[name] for name in ("id", "level", "target")} | {"seconds": round(seconds, 4)}
        _append(self.timings_file, json.dumps(timing))
        _append(self.records_file, dumps(record))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace summary.json."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")

    def records(self) -> list[Record]:
        """All records so far."""
        return list(read_records(self.records_file))

    def _check_resumable(self) -> None:
        if not self.records_file.exists():
            raise RunDirError(f"--resume {self.path}: holds no records.jsonl; start without --resume")
        # a kill may have cut the last line: drop what is no whole record
        whole = [line for line in self.records_file.read_text(encoding="utf-8").splitlines() if _is_json(line)]
        kept = whole[: len(whole) - _unfinished([json.loads(line) for line in whole])]
        self.records_file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def _clear(self) -> None:
        make_dir(self.path, RUN_FILES)
        shutil.rmtree(self.failures, ignore_errors=True)
        self.records_file.touch()


def make_dir(path: Path, files: Sequence[str]) -> None:
    """Make a directory of our own, or empty an earlier one of ``files``. Raises RunDirError for anybody else's."""
    if path.exists() and not path.is_dir():
        raise RunDirError(f"--out {path}: is a file; name a directory")
    if path.exists() and any(path.iterdir()) and not any((path / name).exists() for name in files):
        raise RunDirError(f"--out {path}: is not empty and holds no earlier run; name another directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"--out {path}: cannot be made: {error.strerror}") from None
    for name in files:
        (path / name).unlink(missing_ok=True)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of an interrupted run. Raises RunDirError where its summary.json is missing or lacks one."""
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        return LATER_SETTINGS | {name: summary[name] for name in (*SETTINGS, *LATER_SETTINGS.keys() & summary.keys())}
    except OSError as error:
        raise RunDirError(f"--resume {path}: summary.json cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise RunDirError(f"--resume {path}: summary.json is no summary of a run ({error})") from None


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file. Raises RunDirError with file and line for what is no record."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RunDirError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not _is_json(line):
            raise RunDirError(f"{path}: line {number} is no whole JSON object")
        yield json.loads(line)


def _unfinished(records: list[Record]) -> int:
    """Records at the end that belong to the chunk of generated cases a kill may have cut short."""
    if not records or not records[-1]["id"].startswith(GENERATED):
        return 0
    last = (records[-1]["level"], records[-1]["id"].rpartition("-")[0])
    return sum((record["level"], record["id"].rpartition("-")[0]) == last for record in records)


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _is_json(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False
