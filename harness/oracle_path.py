"""The oracle's leg at the layer levels: outputs, states and cursors that a Case must show, from oracles/ alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cases.case import Case
from ..cases.inputs import LayerInputs
from ..cases.timeline import Timeline
from ..oracles.memory import memory_truth
from ..oracles.recurrence import gdn_recurrence
from ..oracles.ring import RingLedger
from .trace import Cursors, RowIndex, Trace, row_index


@dataclass(frozen=True)
class LayerTruth:
    """What a regime's oracle gives for whole requests: ``outputs`` [R, T, HV, V], ``states`` [R, T, HV, V, K]."""

    outputs: Tensor
    states: Tensor

    def state_after(self, request: int, position: int) -> Tensor:
        """The state [HV, V, K] that includes the token at ``position``."""
        return self.states[request, position]


def layer_truth(case: Case, inputs: LayerInputs, dtype: torch.dtype) -> LayerTruth:
    """All requests of a Case side by side, in ``dtype``: the dictionaries in the exact regime, else the recurrence."""
    if case.inputs.regime == "exact":
        memory = memory_truth(inputs)
        return LayerTruth(memory.outputs.to(dtype), memory.states.to(dtype))
    tokens = list(
        gdn_recurrence(inputs.q, inputs.k, inputs.v, inputs.a, inputs.b, inputs.A_log, inputs.dt_bias, dtype=dtype)
    )
    outputs = torch.stack([output for output, _ in tokens], dim=1)
    return LayerTruth(outputs, torch.stack([state for _, state in tokens], dim=1))


def timeline_rows(timeline: Timeline) -> RowIndex:
    """Every row of a timeline, in order."""
    return row_index(
        [
            (step, index, row.request, row.position)
            for step, entry in enumerate(timeline.steps)
            for index, row in enumerate(entry.rows)
        ]
    )


def ledger_cursors(case: Case, timeline: Timeline) -> Cursors:
    """Ring position and flush of each row that runs as decode, counted in tokens by the ledger."""
    block = case.cache.block_size if case.cache.mode == "align" else None
    ledger = RingLedger(case.replay.buffer_len, block)
    entries, write_pos, is_flush = [], [], []
    for step, entry in enumerate(timeline.steps):
        for request in (*entry.preempt, *entry.abort):
            ledger.release(request)
        for index, row in enumerate(entry.rows):
            if row.admission and row.num_computed:
                ledger.adopt(row.request, row.num_computed)
            if row.runs_as_decode:
                told = ledger.decode(row.request, row.num_computed, row.prefill_len)
                entries.append((step, index, row.request, row.position))
                write_pos.append(told.write_pos)
                is_flush.append(told.is_flush)
            else:
                ledger.prefill(row.request, row.num_computed, row.num_tokens, row.prefill_len)
        for request in entry.finished:
            ledger.release(request)
    return Cursors(row_index(entries), np.array(write_pos, np.int64), np.array(is_flush, np.bool_))


def oracle_trace(timeline: Timeline, truth: LayerTruth, cursors: Cursors) -> Trace:
    """The oracle's Trace: outputs of every row, states after each row that must flush."""
    rows = timeline_rows(timeline)
    flushes = cursors.rows.select(np.flatnonzero(cursors.is_flush))
    return Trace(
        rows=rows,
        outputs=truth.outputs[rows.request, rows.position],
        state_rows=flushes,
        states=truth.states[flushes.request, flushes.position],
        cursors=cursors,
    )
