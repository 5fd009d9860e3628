"""Which Cases a level can play, told without opening it."""

from __future__ import annotations

from ..cases.case import Case


def cannot_play(level: str, case: Case) -> str | None:
    """None where the level can play the Case, else one line that names the field."""
    if level != "engine":
        return None
    if case.graphs is not None:
        return "graphs.capture_sizes: the engine level runs eagerly, FULL graphs are not emulated yet; use null"
    if case.cache.mode != "none":
        return "cache.mode: the engine level does not play prefix caching yet; use none"
    for name in ("activation_dtype", "ring_dtype", "state_dtype"):
        if getattr(case.replay, name) != "float32":
            return f"replay.{name}: the engine level is judged in float32 only; use float32"
    return None
