"""The three outcomes, and which one wins."""

from __future__ import annotations

from collections.abc import Iterable

PASS, FAIL, UNKNOWN = "pass", "fail", "unknown"
OUTCOMES = (PASS, FAIL, UNKNOWN)


def worst(outcomes: Iterable[str]) -> str:
    """fail over unknown over pass; nothing at all is unknown."""
    seen = set(outcomes)
    if FAIL in seen:
        return FAIL
    return PASS if seen == {PASS} else UNKNOWN
