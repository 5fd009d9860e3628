"""The kernel level: the decode op alone. Prefilled states and cursors come from the oracles."""

from __future__ import annotations

import numpy as np
import torch

from ..cases.case import Case
from ..cases.inputs import LayerInputs, layer_inputs
from ..cases.timeline import Timeline, play
from .contract import Legs
from .decode_op import DecodeOp, decode_op
from .faults import plant
from .layer_leg import StepRows
from .oracle_path import LayerTruth, layer_truth, ledger_cursors, oracle_trace
from .rounding_leg import in_float32, judged_by_error, rounding_trace, rounds, summand_trace
from .schedule_path import BaselineRunner, flush_lookup, run_subject, told
from .trace import Cursors


class KernelPath:
    """Judges gdn_replay_decode on the rows, ring positions and slots of a timeline, with nothing else in the way.

    target: the backend of both ops, "torch", "triton" (interpreted on the CPU) or "triton_gpu".
    """

    level = "kernel"

    def __init__(self, fault: str | None = None, target: str = "torch") -> None:
        self.fault, self.target = fault, target
        self.options: tuple[str, ...] = ("--target", target) if target != "torch" else ()

    @torch.inference_mode()
    def run(self, case: Case) -> Legs:
        """Truth in float64, replay op, packed op; both ops start from the oracle's float32 prefill."""
        with decode_op(self.target) as op:
            return self._run(case, op)

    def _run(self, case: Case, op: DecodeOp) -> Legs:
        timeline = play(case)
        inputs = layer_inputs(case)
        cursors = ledger_cursors(case, timeline)
        true = layer_truth(case, inputs, torch.float64)
        truth = oracle_trace(timeline, true, cursors)
        rounding, undecided = (
            rounding_trace(case, timeline, inputs, cursors, prefilled=true) if rounds(case) else (None, None)
        )
        prefilled = layer_truth(case, inputs, torch.float32)
        plain, plain_inputs = in_float32(case, inputs)
        baseline = _PackedOp(plain, timeline, plain_inputs, cursors, prefilled, op).run()
        with plant(self.fault, self.level, self.target):
            subject, wide, failure = run_subject(
                lambda given: _ReplayOp(case, timeline, given, cursors, prefilled, op), case, inputs
            )
        summands = summand_trace(case, timeline, inputs, cursors, true) if judged_by_error(case) else None
        return Legs(self.level, case, timeline, truth, subject, baseline, failure, rounding, undecided, summands, wide)


class _PackedOp(BaselineRunner):
    """Decode rows through packed decode; which rows those are is the ledger's word."""

    def __init__(
        self,
        case: Case,
        timeline: Timeline,
        inputs: LayerInputs,
        cursors: Cursors,
        prefilled: LayerTruth,
        op: DecodeOp,
    ) -> None:
        super().__init__(case, timeline, inputs, cursors, op)
        self.cursors, self.prefilled = cursors, prefilled
        self.leg.padding_slot = -(case.inputs.seed % 2)
        self.decoded = set(flush_lookup(cursors))

    def _run_rows(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        decodes = np.array([(step, row) in self.decoded for row in rows.order.tolist()])
        if decodes.any():
            self._decode(step, rows.select(decodes), padded_to)
        if not decodes.all():
            self._prefill(step, rows.select(~decodes))

    def _prefill(self, step: int, rows: StepRows) -> None:
        states = self.prefilled.states[rows.request, rows.position]
        self.memory.state[torch.from_numpy(rows.slot)] = states.to(self.memory.state.dtype)
        outputs = self.prefilled.outputs[rows.request, rows.position]
        self.leg.keep_prefill(step, rows, outputs.to(self.leg.inputs.v.dtype))


class _ReplayOp(_PackedOp):
    """Decode rows through the replay op, told the ledger's cursors."""

    def _decode(self, step: int, rows: StepRows, padded_to: int | None) -> None:
        write_pos, is_flush = told(self.cursors, step, rows)
        self.leg.replay(step, rows, write_pos, is_flush, padded_to or len(rows.slot))
