"""The schedule level with the plugin's real metadata builder in place of the bare cursor functions."""

from __future__ import annotations

import numpy as np

from ..cases.case import Case
from ..cases.inputs import LayerInputs
from ..cases.timeline import Timeline
from . import cpu_platform
from .engine_sync import host_sync
from .finding import Finding
from .invariants import cursor_findings
from .layer_leg import StepRows, step_rows
from .oracle_path import ledger_cursors
from .real_builder import RealBuilder
from .schedule_path import ReplayRunner, SchedulePath
from .trace import Cursors, row_index


class BuilderPath(SchedulePath):
    """Which rows decode, their write_pos and is_flush are the builder's word; needs vLLM, not an engine.

    The builder's code is watched: it must not read on the host what would live on a device.
    """

    target = "builder"
    options: tuple[str, ...] = ("--target", "builder")

    def __init__(self, fault: str | None = None) -> None:
        super().__init__(fault)
        # a fault may sit in a module that imports vLLM
        cpu_platform.prepare()

    def subject_runner(self, case: Case, timeline: Timeline, inputs: LayerInputs) -> ReplayRunner:
        """A runner that asks the builder."""
        return _BuilderRunner(case, timeline, inputs)


class _BuilderRunner(ReplayRunner):
    def __init__(self, case: Case, timeline: Timeline, inputs: LayerInputs) -> None:
        super().__init__(case, timeline, inputs)
        self.builder = RealBuilder(case)

    def _run_rows(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        size = padded_to or 0
        built = self.builder.build(rows.num_computed, rows.num_tokens, self.prefill_len[rows.request], rows.slot, size)
        self.leg.events += [host_sync(step, str(read)) for read in built.reads]
        decodes = built.runs_as_decode.astype(bool)
        if decodes.any():
            count = max(size, int(decodes.sum()))
            self.leg.replay(step, rows.select(decodes), built.write_pos[decodes], built.is_flush[decodes], count)
        if not decodes.all():
            self._prefill(step, rows.select(~decodes))


def builder_findings(case: Case, timeline: Timeline) -> list[Finding]:
    """Rows of a timeline on which the real builder and the ledger disagree; nothing is computed but cursors."""
    builder = RealBuilder(case)
    entries, write_pos, is_flush = [], [], []
    for step, entry in enumerate(timeline.steps):
        rows = step_rows(entry)
        base = np.array([row.prefill_len for row in entry.rows], np.int64)
        built = builder.build(rows.num_computed, rows.num_tokens, base, rows.slot, entry.padded_to or 0)
        for index in np.flatnonzero(built.runs_as_decode).tolist():
            entries.append((step, index, entry.rows[index].request, entry.rows[index].position))
            write_pos.append(int(built.write_pos[index]))
            is_flush.append(bool(built.is_flush[index]))
    got = Cursors(row_index(entries), np.array(write_pos, np.int64), np.array(is_flush, np.bool_))
    return cursor_findings(ledger_cursors(case, timeline), got)
