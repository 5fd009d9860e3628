"""The schedule level: cursor, slots and decode op over a whole timeline, as a model runner would drive one layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..cases.case import Case
from ..cases.inputs import LayerInputs, layer_inputs
from ..cases.timeline import Row, Timeline, TimelineStep, play
from ..kernels.cursor import decode_cursor, runs_as_decode
from .contract import Legs
from .decode_op import DecodeOp, PlainOp
from .faults import plant
from .layer_leg import LayerLeg, StepRows, step_rows
from .layer_memory import LayerMemory
from .oracle_path import layer_truth, ledger_cursors, oracle_trace
from .rounding_leg import in_float32, judged_by_error, rounding_trace, rounds, summand_trace, widened
from .trace import Cursors, Failure, IntArray, Trace


class SchedulePath:
    """Plays a Case on one layer: the scheduler's integers come from the timeline, all others are the subject's own."""

    level = "schedule"
    target = "torch"
    options: tuple[str, ...] = ()

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault

    @torch.inference_mode()
    def run(self, case: Case) -> Legs:
        """Truth in float64, replay, packed decode."""
        timeline = play(case)
        inputs = layer_inputs(case)
        cursors = ledger_cursors(case, timeline)
        true = layer_truth(case, inputs, torch.float64)
        truth = oracle_trace(timeline, true, cursors)
        rounding, undecided = rounding_trace(case, timeline, inputs, cursors) if rounds(case) else (None, None)
        plain, plain_inputs = in_float32(case, inputs)
        baseline = BaselineRunner(plain, timeline, plain_inputs, cursors).run()
        with plant(self.fault, self.level):
            subject, wide, failure = run_subject(lambda given: self.subject_runner(case, timeline, given), case, inputs)
        summands = summand_trace(case, timeline, inputs, cursors, true) if judged_by_error(case) else None
        return Legs(self.level, case, timeline, truth, subject, baseline, failure, rounding, undecided, summands, wide)

    def subject_runner(self, case: Case, timeline: Timeline, inputs: LayerInputs) -> ReplayRunner:
        """The subject of one run; another one in subclasses."""
        return ReplayRunner(case, timeline, inputs)


def run_subject(
    runner: Callable[[LayerInputs], _Runner], case: Case, inputs: LayerInputs
) -> tuple[Trace, Trace | None, Failure | None]:
    """The subject's trace, under 16-bit activations that of its run in float32 too, and the failure if one raised.

    The trace of a run that raised is what it left until then.
    """
    subject, failure = _run(runner(inputs))
    if failure is not None or not rounds(case) or case.replay.activation_dtype == "float32":
        return subject, None, failure
    wide, failure = _run(runner(widened(inputs)))
    return subject, wide, failure


def _run(runner: _Runner) -> tuple[Trace, Failure | None]:
    try:
        return runner.run(), None
    except Exception as error:
        return runner.leg.trace(), Failure("exception", "run", f"{type(error).__name__}: {error}")


class _Runner:
    """Walks the steps: who leaves, who is admitted, which rows run as decode and which as prefill."""

    def __init__(self, case: Case, timeline: Timeline, inputs: LayerInputs, op: DecodeOp | None = None) -> None:
        self.case, self.timeline = case, timeline
        self.memory = LayerMemory(case, timeline.num_slots)
        self.leg = LayerLeg(case, inputs, self.memory, op or PlainOp())
        # by request: tokens handed to prefill at the latest (re)admission
        self.prefill_len = np.zeros(len(case.requests), np.int64)
        self.slot_of: dict[int, int] = {}

    def run(self) -> Trace:
        for index, step in enumerate(self.timeline.steps):
            self._leave((*step.preempt, *step.abort))
            self._admit(step)
            self._move_states(step)
            self._run_rows(index, step_rows(step), step.padded_to)
            self._leave(step.finished)
        return self.leg.trace()

    def _leave(self, requests: tuple[int, ...]) -> None:
        slots = [self.slot_of.pop(request) for request in requests if request in self.slot_of]
        # under "align" a slot may live on as a cached boundary
        if self.case.cache.mode == "none":
            self.memory.retire(slots)

    def _admit(self, step: TimelineStep) -> None:
        for row in step.rows:
            if row.admission:
                self.prefill_len[row.request] = self._handed_to_prefill(row)
            self.slot_of[row.request] = row.slot

    def _handed_to_prefill(self, row: Row) -> int:
        return row.prefill_len

    def _move_states(self, step: TimelineStep) -> None:
        moves = [(row.copy_from, row.slot) for row in step.rows if row.copy_from is not None]
        for source, target in moves:
            self.memory.copy_state(torch.tensor([source]), torch.tensor([target]))

    def _run_rows(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        decodes = runs_as_decode(rows.num_computed, rows.num_tokens)
        if decodes.any():
            self._decode(step, rows.select(decodes), padded_to)
        if not decodes.all():
            self._prefill(step, rows.select(~decodes))

    def _prefill(self, step: int, rows: StepRows) -> None:
        self.leg.prefill(step, rows)

    def _decode(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        raise NotImplementedError


class ReplayRunner(_Runner):
    """The subject: cursors from kernels/cursor.py, decode rows through the replay op."""

    def _decode(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        block = self.case.cache.block_size if self.case.cache.mode == "align" else None
        base = self.prefill_len[rows.request]
        cursor = decode_cursor(rows.num_computed, base, rows.num_tokens, self.case.replay.buffer_len, block)
        write_pos, is_flush = cursor.write_pos.astype(np.int64), cursor.is_flush.astype(np.int64)
        self.leg.replay(step, rows, write_pos, is_flush, padded_to or len(rows.slot))


class BaselineRunner(_Runner):
    """The baseline: the same rows through packed decode; states kept where the ledger says flush."""

    def __init__(
        self, case: Case, timeline: Timeline, inputs: LayerInputs, cursors: Cursors, op: DecodeOp | None = None
    ) -> None:
        super().__init__(case, timeline, inputs, op)
        self.flushes = flush_lookup(cursors)

    def _decode(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        is_flush = np.array([self.flushes[step, row] for row in rows.order.tolist()], np.int64)
        self.leg.packed(step, rows, is_flush)


def flush_lookup(cursors: Cursors) -> dict[tuple[int, int], bool]:
    """(step, row) -> is_flush of the rows that run as decode."""
    return dict(zip(cursors.rows.labels(), cursors.is_flush.tolist(), strict=True))


def position_lookup(cursors: Cursors) -> dict[tuple[int, int], int]:
    """(step, row) -> write_pos of the rows that run as decode."""
    return dict(zip(cursors.rows.labels(), cursors.write_pos.tolist(), strict=True))


def told(cursors: Cursors, step: int, rows: StepRows) -> tuple[IntArray, IntArray]:
    """write_pos and is_flush that the ledger gives the rows of a step, [R] each."""
    positions, flushes = position_lookup(cursors), flush_lookup(cursors)
    keys = [(step, row) for row in rows.order.tolist()]
    return np.array([positions[key] for key in keys], np.int64), np.array([flushes[key] for key in keys], np.int64)
