"""What a whole run comes to: verdict, counts, coverage, largest distances."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

from ..cases.situations import names
from .environment import device_name, git_state, versions
from .outcome import OUTCOMES, UNKNOWN, worst
from .record import Record

PROOF = ("replay_steps", "flushes", "resumes", "one_token_tails")


def summarise(records: list[Record], settings: dict[str, Any]) -> dict[str, Any]:
    """summary.json: ``settings`` holds seed, command, profile, fault, levels, not_planned, interrupted."""
    outcomes = [record["verdict"] for record in records]
    outcomes += [UNKNOWN] if settings.get("interrupted") or settings.get("missing_levels") else []
    return {
        "verdict": worst(outcomes),
        "counts": _table(records, "level"),
        "regimes": _table(records, "regime"),
        "situations": _situations(records),
        "situation_pairs": _pairs(records),
        "proof": _proof(records),
        "proof_by_level": {level: _proof([r for r in records if r["level"] == level]) for level in _levels(records)},
        "largest": _largest(records),
        # of vLLM's own code, each place once
        "stock_reads": sorted({read for record in records for read in record.get("stock_reads", ())}),
        "versions": versions(),
        "git": git_state(),
        "device": device_name(),
        **settings,
    }


def _table(records: list[Record], key: str) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for record in records:
        row = table.setdefault(record[key], dict.fromkeys(OUTCOMES, 0))
        row[record["verdict"]] += 1
    return table


def _situations(records: list[Record]) -> dict[str, int]:
    """Cases in which each situation occurred, by name; zero where none did."""
    counts = Counter(name for record in records for name in record["situations"])
    return {name: counts[name] for name in names()}


def _pairs(records: list[Record]) -> dict[str, dict[str, int]]:
    counts = Counter(
        pair for record in records for pair in combinations([n for n in names() if n in record["situations"]], 2)
    )
    table: dict[str, dict[str, int]] = {}
    for (first, second), count in sorted(counts.items()):
        table.setdefault(first, {})[second] = count
    return table


def _levels(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(record["level"] for record in records))


def _proof(records: list[Record]) -> dict[str, int]:
    """That the path was entered: rows and flushes that the replay op ran, resumes and one-token tails played."""
    return {name: sum(record["counts"].get(name, 0) for record in records) for name in PROOF}


def _largest(records: list[Record]) -> dict[str, dict[str, float | None]]:
    """Largest distance by level and name; None where one was not finite."""
    largest: dict[str, dict[str, float | None]] = {}
    for record in records:
        row = largest.setdefault(record["level"], {})
        for name, value in record["distances"].items():
            so_far = row.get(name, 0.0)
            row[name] = None if value is None or so_far is None else max(so_far, value)
    return largest
