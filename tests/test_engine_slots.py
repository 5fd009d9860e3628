"""How this tests, in plain words: the blocks that rows were told, beside those that a scheduler gave.

Rows, what the builder said of them and what the scheduler holds are written down by hand, one entry is changed, and the
event must name the row, the request and both blocks. That a real engine's rows agree, and that a planted stale block is
seen there, is in tests/test_engine_path.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from replay_parity.harness.directed_scheduler import ScheduledRow
from replay_parity.harness.engine_slots import slot_events

ROWS = (ScheduledRow("a", 1, 5, None), ScheduledRow("b", 1, 9, None))
NUMBERS = {"a": 4, "b": 7}
BLOCKS = {("a", "l0"): 3, ("b", "l0"): 8, ("a", "l1"): 5, ("b", "l1"): 6}


def _told(layer: str, *slots: int) -> SimpleNamespace:
    return SimpleNamespace(layer_names=(layer,), state_indices=torch.tensor(slots, dtype=torch.int32))


def test_right_blocks_are_no_event() -> None:
    # the third row is padding
    assert slot_events(2, [_told("l0", 3, 8, 0), _told("l1", 5, 6, 0)], ROWS, NUMBERS, BLOCKS) == []


def test_a_wrong_block_is_named_with_its_row() -> None:
    (event,) = slot_events(2, [_told("l0", 3, 8), _told("l1", 5, 5)], ROWS, NUMBERS, BLOCKS)
    assert (event.symptom, event.step, event.row) == ("slot", 2, 1)
    assert event.message == "l1: request 7 was told block 5 for its state, the scheduler gave it block 6"


def test_swapped_rows_are_two_events_of_one_group() -> None:
    events = slot_events(0, [_told("l0", 8, 3), _told("l1", 6, 5)], ROWS, NUMBERS, BLOCKS)
    assert [(event.row, event.message[:2]) for event in events] == [(0, "l0"), (1, "l0")]
