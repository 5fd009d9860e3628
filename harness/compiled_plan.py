"""The original work's own check as it ran, compiled: played once more so where vLLM can compile on this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cases.engine_scenarios import engine_scenarios
from .architectures import DEFAULT_ARCHITECTURE
from .cpu_platform import why_no_engine
from .execution import DECIDING, why_not_compiled
from .levels import COMPILED_TARGET
from .paths import EngineArgs
from .plan import LeftOut, Planned
from .playable import cannot_play

# of the named cases; each set of engine settings costs a compilation
PLAYED_COMPILED = ("two-prompts-32-tokens",)


@dataclass(frozen=True)
class PlannedAs(Planned):
    """One Case to run at one level on a target of its own, whatever the run's is."""

    target: str


def compiled_cases(
    levels: Sequence[str],
    target: str | None,
    engine_args: EngineArgs = (),
    architecture: str = DEFAULT_ARCHITECTURE,
) -> tuple[list[PlannedAs], list[LeftOut]]:
    """Jobs that come after the plan's own, which plays the same Cases eagerly; left out where vLLM cannot compile.

    No job where the user has chosen: a target, or an engine argument that decides how the model runs.
    """
    chosen = target is not None or any(name in DECIDING for name, _ in engine_args)
    if chosen or "engine" not in levels or why_no_engine() is not None:
        return [], []
    table = engine_scenarios()
    cases = [table[name].case for name in PLAYED_COMPILED]
    # the plan itself says which of them the engine level cannot play
    cases = [case for case in cases if cannot_play("engine", case, architecture) is None]
    reason = why_not_compiled()
    if reason is not None:
        return [], [LeftOut(case.id, "engine", reason) for case in cases]
    return [PlannedAs(case, "engine", COMPILED_TARGET) for case in cases], []
