"""What must hold whatever the numbers: the same rows, the ledger's cursors, no forbidden event."""

from __future__ import annotations

import numpy as np

from .finding import Finding, FirstBad, place
from .trace import Cursors, Trace


def row_findings(truth: Trace, leg: Trace) -> list[Finding]:
    """Rows that are missing, extra or not the Case's: unequal lengths fail."""
    if len(truth.rows) != len(leg.rows):
        return [Finding("mismatch", f"{len(leg.rows)} rows came out where the Case has {len(truth.rows)}")]
    for name in ("step", "row", "request", "position"):
        wrong = np.flatnonzero(getattr(truth.rows, name) != getattr(leg.rows, name))
        if len(wrong):
            entry = int(wrong[0])
            got = int(getattr(leg.rows, name)[entry])
            return [Finding("mismatch", f"{place(truth.rows, entry, None)}: came out as {name} {got}")]
    return []


def event_findings(leg: Trace) -> list[Finding]:
    """What the run itself saw and must not happen: writes outside, poison, host syncs."""
    return [
        Finding(event.symptom, f"step {event.step}: {event.message}", _event_place(leg, event.step, event.row))
        for event in leg.events
    ]


def cursor_findings(truth: Cursors | None, told: Cursors | None, *, whole: bool = True) -> list[Finding]:
    """Rows whose write_pos or is_flush is not the ledger's. A level that shows no cursors has none.

    ``whole``: the leg ran to its end, so a row that is missing is wrong too.
    """
    if truth is None or told is None:
        return []
    right = {
        key: (int(write_pos), bool(is_flush))
        for key, write_pos, is_flush in zip(truth.rows.labels(), truth.write_pos, truth.is_flush, strict=True)
    }
    findings = []
    for entry, key in enumerate(told.rows.labels()):
        got = (int(told.write_pos[entry]), bool(told.is_flush[entry]))
        want = right.pop(key, None)
        if got != want:
            where = place(told.rows, entry, None)
            findings.append((key, Finding("cursor", f"{where}: {_told(got)}, right is {_told(want)}", where)))
    for key in right if whole else ():
        entry = truth.rows.labels().index(key)
        where = place(truth.rows, entry, None)
        findings.append((key, Finding("cursor", f"{where}: ran as prefill, right is {_told(right[key])}", where)))
    return [finding for _, finding in sorted(findings, key=lambda item: item[0])]


def _told(cursor: tuple[int, bool] | None) -> str:
    if cursor is None:
        return "prefill, not decode"
    write_pos, is_flush = cursor
    return f"write_pos {write_pos} {'flush' if is_flush else 'append'}"


def _event_place(leg: Trace, step: int, row: int | None) -> FirstBad | None:
    entries = np.flatnonzero((leg.rows.step == step) & (leg.rows.row == (0 if row is None else row)))
    return place(leg.rows, int(entries[0]), None) if len(entries) else None
