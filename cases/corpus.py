"""Minimised failures that are kept: replayed first by every run and by the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .case import Case, Inputs, Replay, load_case
from .geometry import ENGINE

FOLDER = Path(__file__).parent / "corpus"


def corpus() -> list[Case]:
    """All kept cases, by file name; each one's ``guards`` says what it was found with."""
    return [load_case(path) for path in sorted(FOLDER.glob("*.json"))]


def for_engine(case: Case) -> Case:
    """The same schedule in what the engine level plays: its layer shapes, float32, model_like inputs, no graphs."""
    return replace(
        case,
        geometry=ENGINE,
        replay=Replay(case.replay.buffer_len),
        graphs=None,
        inputs=Inputs("model_like", case.inputs.seed),
    )
