"""The audit of an engine's GDN memory, on hand-made pages: what a step may write passes, each byte beyond is reported.

Two layers of different cache groups share one set of pages, as vLLM's hybrid cache lays them out. No engine is needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from replay_parity.cases.scenarios import scenarios
from replay_parity.harness.engine_memory import EngineLayer, EngineMemory

BLOCKS, HV, L = 8, 2, 4
CASE = scenarios()["plain-flush"].case


def _pages() -> tuple[torch.Tensor, ...]:
    shapes = ((3, 5), (HV, 4, 4), (HV, L, 4), (1, L, 4), (HV, L))
    return tuple(torch.zeros((BLOCKS, *shape)) for shape in shapes)


def _told(layer: str, slot: int, write_pos: int, *, flush: bool = False, decode: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        layer_names=(layer,),
        state_indices=torch.tensor([slot]),
        write_pos=np.array([write_pos]),
        is_flush=np.array([flush]),
        runs_as_decode=np.array([decode]),
    )


def _memory(*, aligned: bool = False) -> tuple[EngineMemory, tuple[torch.Tensor, ...]]:
    tensors = _pages()
    memory = EngineMemory([EngineLayer("first", tensors), EngineLayer("second", tensors)], aligned)
    memory.spread_poison(CASE)
    return memory, tensors


def test_what_rows_may_write_is_no_event() -> None:
    memory, (conv, state, ring_d, ring_k, ring_g) = _memory()
    for ring in (ring_d, ring_k, ring_g):
        ring[1, :, 2] = 1.0
    conv[1] = conv[2] = state[2] = 1.0
    # an attention layer's block in the same pages
    state[5] = 1.0
    told = [_told("first", 1, 2), _told("second", 2, 0, flush=True)]
    assert memory.audit(0, told, [0], [5]) == []
    # remembered anew
    assert memory.audit(1, [], [], []) == []


@pytest.mark.parametrize(
    ("tensor", "place", "message"),
    [
        (1, (1, 0, 0, 0), "block 1: state[0, 0, 0] was written"),
        (2, (1, 0, 3, 1), "block 1: ring_d[0, 3, 1] was written"),
        (3, (4, 0, 2, 0), "block 4: ring_k[0, 2, 0] was written"),
        (4, (0, 1, 2), "the NULL block: ring_g[1, 2] was written"),
        (0, (6, 0, 0), "block 6: conv[0, 0] was written"),
    ],
)
def test_a_write_beyond_is_an_event(tensor: int, place: tuple[int, ...], message: str) -> None:
    memory, tensors = _memory()
    tensors[tensor][place] = 7.0
    (event,) = memory.audit(3, [_told("first", 1, 2)], [0], [])
    assert (event.symptom, event.step) == ("out_of_bounds", 3)
    assert event.message == f"first and second: {message}"


def test_a_prefill_writes_its_state_and_no_ring() -> None:
    memory, tensors = _memory()
    tensors[1][1] = 7.0
    assert memory.audit(0, [_told("first", 1, 0, decode=False)], [0], []) == []
    tensors[4][1, 0, 0] = 7.0
    assert len(memory.audit(1, [_told("first", 1, 0, decode=False)], [0], [])) == 1


def test_under_align_a_state_is_copied_into_the_block_entered() -> None:
    for aligned, events in ((True, 0), (False, 1)):
        memory, tensors = _memory(aligned=aligned)
        tensors[1][3] = 7.0
        assert len(memory.audit(0, [_told("first", 3, 0)], [0], [])) == events
        # the second decode in a block copies nothing
        tensors[1][3] = 8.0
        assert len(memory.audit(1, [_told("first", 3, 1)], [0], [])) == 1
