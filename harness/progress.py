"""What a person sees while a run goes on and at its end."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .fault_run import CAUGHT, SURVIVED, Hunt
from .judge_case import Judged
from .outcome import FAIL, OUTCOMES, PASS, UNKNOWN
from .record import Record

_COLOUR = {PASS: "green", FAIL: "red", UNKNOWN: "yellow"}
_SHOWN_FAILURES = 5
WIDE = 110


class Progress:
    """A bar on stderr where that is a terminal; elsewhere one line when a level is done."""

    def __init__(self, total: int, done: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Bar(*columns, console=console, disable=not console.is_terminal, transient=True)
        self.task = self.bar.add_task("starting", total=total, completed=done)
        self.failed = 0

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def advance(self, description: str) -> None:
        """One piece of work is done."""
        self.bar.update(self.task, advance=1, description=description)

    def add(self, judged: Judged) -> None:
        """One case is done."""
        self.failed += judged.record["verdict"] == FAIL
        failed = f", {self.failed} failed" if self.failed else ""
        self.bar.update(self.task, advance=1, description=f"{judged.record['level']}{failed}")


def say_hunts(found: list[Hunt]) -> None:
    """Faults and what became of them, as a table on stdout; the survivors last, where they are seen."""
    table = Table(box=None, header_style="bold")
    for name, justify in (("fault", "left"), ("level", "left"), ("outcome", "left"), ("examples", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name in ("seconds", "requests", "steps"):
        table.add_column(name, justify="right")
    table.add_column("symptom")
    for hunt in sorted(found, key=lambda entry: entry.outcome):
        size = hunt.to_json()["size"] or {"requests": "", "steps": ""}
        colour = {CAUGHT: "green", SURVIVED: "red"}.get(hunt.outcome, "yellow")
        numbers = (str(hunt.examples), f"{hunt.seconds:.1f}", str(size["requests"]), str(size["steps"]))
        why = hunt.symptom if hunt.outcome == CAUGHT else hunt.reason
        table.add_row(hunt.fault, hunt.level, f"[{colour}]{hunt.outcome}[/]", *numbers, escape(why or ""))
    console = Console(highlight=False)
    # a pipe has no width: names are not to be cut there
    console.width = max(console.width, WIDE)
    console.print(table)
    caught = [hunt.examples for hunt in found if hunt.outcome == CAUGHT]
    middle = f", median {median(caught):g} examples" if caught else ""
    console.print(f"{len(caught)} of {len(found)} caught{middle}")


def say_verdict(summary: dict[str, Any], records: list[Record], page: Path) -> None:
    """The end of a run on stdout: counts by level, the first failures, verdict and page."""
    console = Console(highlight=False, soft_wrap=True)
    for level, row in summary["counts"].items():
        counts = "  ".join(f"[{_COLOUR[name]}]{row[name]} {name}[/]" for name in OUTCOMES if row[name])
        console.print(f"{level:9} {counts}   {_proof(summary['proof_by_level'][level])}")
    wrong = sorted((r for r in records if r["verdict"] != PASS), key=lambda r: r["verdict"] != FAIL)
    for record in wrong[:_SHOWN_FAILURES]:
        colour = _COLOUR[record["verdict"]]
        name, reason = escape(record["id"]), escape(record["reason"])
        console.print(f"  [{colour}]{record['verdict']}[/] {record['level']} {name}: {reason}")
    if len(wrong) > _SHOWN_FAILURES:
        console.print(f"  and {len(wrong) - _SHOWN_FAILURES} more, see the page")
    verdict = summary["verdict"]
    console.print(f"verdict: [bold {_COLOUR[verdict]}]{verdict}[/]   page: {escape(str(page))}")
    sys.stdout.flush()


def _proof(proof: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in proof.items())
