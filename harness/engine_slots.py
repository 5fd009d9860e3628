"""The state block that each row was told to use, beside the one that vLLM's scheduler gave its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .directed_scheduler import ScheduledRow
from .trace import Event


def slot_events(
    step: int,
    reported: Sequence[Any],
    rows: Sequence[ScheduledRow],
    numbers: Mapping[str, int],
    blocks: Mapping[tuple[str, str], int],
) -> list[Event]:
    """An event for each row whose metadata names another block than its request's; the first GDN group alone counts.

    reported: the plugin's ReplaySteps, one a GDN group; rows: as the scheduler sent them, in batch order; numbers: the
    Case's request by the engine's id; blocks: the running state's block by (request id, the group's first layer).
    """
    for told in reported:
        layer = told.layer_names[0]
        slots = told.state_indices[: len(rows)].tolist()
        wrong = [
            Event(
                "slot",
                step,
                index,
                f"{layer}: request {numbers[row.request_id]} was told block {slot} for its state, "
                f"the scheduler gave it block {blocks[row.request_id, layer]}",
            )
            for index, (row, slot) in enumerate(zip(rows, slots, strict=True))
            if slot != blocks[row.request_id, layer]
        ]
        if wrong:
            return wrong
    return []
