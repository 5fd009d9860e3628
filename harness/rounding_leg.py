"""The leg of storage: a Case in float64 with only the roundings that its ring and state dtypes make unavoidable."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from ..cases.case import Case, Replay
from ..cases.inputs import TORCH_DTYPES, LayerInputs
from ..cases.timeline import Row, Timeline
from ..oracles.recurrence import gdn_recurrence
from ..oracles.rounding import carried_through, rounded_decode, summand_squares, undecided_state
from .oracle_path import LayerTruth, timeline_rows
from .trace import Cursors, Trace


class RoundingError(ValueError):
    """A Case whose right values do not fit the dtypes it asks for: no run of it can be judged."""


def rounds(case: Case) -> bool:
    """True where anything is stored in 16 bits and rounds for it: nothing does in the exact regime."""
    replay = case.replay
    kinds = {replay.ring_dtype, replay.state_dtype, replay.activation_dtype}
    return kinds != {"float32"} and judged_by_error(case)


def judged_by_error(case: Case) -> bool:
    """True where legs are held against each other by their errors; in the exact regime bits must be equal."""
    return case.inputs.regime != "exact"


def in_float32(case: Case, inputs: LayerInputs) -> tuple[Case, LayerInputs]:
    """The Case with nothing but its inputs rounded: what its baseline runs. In the exact regime as it is."""
    if not rounds(case):
        return case, inputs
    return replace(case, replay=Replay(case.replay.buffer_len)), widened(inputs)


def widened(inputs: LayerInputs) -> LayerInputs:
    """The same numbers in float32."""
    return LayerInputs(*(getattr(inputs, entry.name).float() for entry in fields(inputs)))


def rounding_trace(
    case: Case, timeline: Timeline, inputs: LayerInputs, cursors: Cursors, prefilled: LayerTruth | None = None
) -> tuple[Trace, Trace]:
    """Outputs of every row, unrounded, and the states after flushes; then what undecided roundings may change in both.

    All float64. ``prefilled``: what the kernel level starts from after each prefill chunk; None: the rows' own prefill.
    Raises RoundingError where the ring or the state overflows.
    """
    leg = _Leg(case, timeline, inputs, cursors, prefilled)
    for index in range(len(timeline.steps)):
        leg.step(index)
    outputs, undecided = torch.cat(leg.outputs), torch.cat(leg.undecided_outputs).sqrt()
    states, undecided_states = (
        torch.stack(kept) if kept else leg.states[:0] for kept in (leg.kept, leg.undecided_kept)
    )
    for name, values in (("output", outputs), ("state", leg.states), ("state", states)):
        if not bool(torch.isfinite(values).all()):
            raise RoundingError(f"inputs: the right {name} overflows the ring or state dtype; use smaller values")
    rows, flushes = timeline_rows(timeline), cursors.rows.select(cursors.is_flush.nonzero()[0])
    return Trace(rows, outputs, flushes, states), Trace(rows, undecided, flushes, undecided_states.sqrt())


def summand_trace(case: Case, timeline: Timeline, inputs: LayerInputs, cursors: Cursors, true: LayerTruth) -> Trace:
    """Sizes of the summands behind each entry of the oracle's trace: see oracles/rounding.py.

    The state counts as one summand wherever it has been put together: after a prefill chunk and after a flush.
    """
    is_flush = dict(zip(cursors.rows.labels(), cursors.is_flush.tolist(), strict=True))
    held = true.states.new_zeros((timeline.num_slots, *true.states.shape[2:]))
    outputs, states = [], []
    for index, step in enumerate(timeline.steps):
        for row in step.rows:
            if row.copy_from is not None:
                held[row.slot] = held[row.copy_from]
        slots = [row.slot for row in step.rows]
        where = (torch.tensor([row.request for row in step.rows]), torch.tensor([row.position for row in step.rows]))
        joined = torch.tensor([is_flush.get((index, place), True) for place in range(len(step.rows))])
        fresh = torch.tensor([not row.runs_as_decode for row in step.rows])
        before = true.states[where[0], (where[1] - 1).clamp_min(0)] * (where[1] > 0)[:, None, None, None]
        token = _select(inputs, where)
        output, state, after = summand_squares(
            torch.where(fresh[:, None, None, None], before.square(), held[slots]),
            before,
            token.q,
            token.k,
            token.v,
            token.a,
            token.b,
            token.A_log,
            token.dt_bias,
        )
        held[slots] = torch.where(joined[:, None, None, None], true.states[where].square(), after)
        outputs.append(output.sqrt())
        states.append((state + true.states[where].square())[joined & ~fresh].sqrt())
    flushes = cursors.rows.select(cursors.is_flush.nonzero()[0])
    return Trace(timeline_rows(timeline), torch.cat(outputs), flushes, torch.cat(states))


class _Leg:
    """States by slot on their way through the timeline."""

    def __init__(
        self, case: Case, timeline: Timeline, inputs: LayerInputs, cursors: Cursors, prefilled: LayerTruth | None
    ) -> None:
        self.timeline, self.inputs, self.prefilled = timeline, inputs, prefilled
        self.ring_dtype = TORCH_DTYPES[case.replay.ring_dtype]
        self.state_dtype = TORCH_DTYPES[case.replay.state_dtype]
        self.is_flush = dict(zip(cursors.rows.labels(), cursors.is_flush.tolist(), strict=True))
        geometry = case.geometry
        shape = (timeline.num_slots, geometry.num_v_heads, geometry.head_v_dim, geometry.head_k_dim)
        self.states = torch.zeros(shape, dtype=torch.float64)
        # squares of undecided steps, by slot like the states
        self.undecided = torch.zeros_like(self.states)
        self.outputs: list[Tensor] = []
        self.undecided_outputs: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.undecided_kept: list[Tensor] = []

    def step(self, index: int) -> None:
        """Run one step's rows and keep their outputs [R, HV, V]."""
        rows = self.timeline.steps[index].rows
        for row in rows:
            if row.copy_from is not None:
                self.states[row.slot] = self.states[row.copy_from]
                self.undecided[row.slot] = self.undecided[row.copy_from]
        decodes = [place for place, row in enumerate(rows) if row.runs_as_decode]
        outputs = torch.empty((len(rows), *self.states.shape[1:3]), dtype=torch.float64)
        undecided = torch.zeros_like(outputs)
        if decodes:
            flushes = torch.tensor([self.is_flush[index, place] for place in decodes])
            outputs[decodes], undecided[decodes] = self._decode([rows[place] for place in decodes], flushes)
        for place, row in enumerate(rows):
            if not row.runs_as_decode:
                outputs[place] = self._prefill(row)
        self.outputs.append(outputs)
        self.undecided_outputs.append(undecided)

    def _decode(self, rows: list[Row], is_flush: Tensor) -> tuple[Tensor, Tensor]:
        slots = [row.slot for row in rows]
        where = (torch.tensor([row.request for row in rows]), torch.tensor([row.num_computed for row in rows]))
        token = _select(self.inputs, where)
        output, self.states[slots], undecided, self.undecided[slots] = rounded_decode(
            self.states[slots],
            self.undecided[slots],
            token.q,
            token.k,
            token.v,
            token.a,
            token.b,
            token.A_log,
            token.dt_bias,
            is_flush,
            self.ring_dtype,
            self.state_dtype,
        )
        flushed = [slot for slot, folds in zip(slots, is_flush.tolist(), strict=True) if folds]
        self.kept += [self.states[slot].clone() for slot in flushed]
        self.undecided_kept += [self.undecided[slot].clone() for slot in flushed]
        return output, undecided

    def _prefill(self, row: Row) -> Tensor:
        """A chunk ends in one rounding of the state."""
        carried = torch.zeros(())
        if self.prefilled is not None:
            where = row.request, row.position
            output, state = self.prefilled.outputs[where], self.prefilled.states[where]
        else:
            output, state = self._own_prefill(row)
            if row.num_computed:
                gates = self.inputs.a[row.request, row.num_computed : row.position + 1]
                carried = carried_through(self.undecided[row.slot], gates, self.inputs.A_log, self.inputs.dt_bias)
        self.states[row.slot] = state.to(self.state_dtype).double()
        self.undecided[row.slot] = carried + undecided_state(state.double(), self.state_dtype).square()
        return output.double()

    def _own_prefill(self, row: Row) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(row.num_computed, row.position + 1)
        chunk = _select(self.inputs, (torch.tensor([[row.request]]), tokens[None]))
        before = self.states[row.slot : row.slot + 1] if row.num_computed else None
        steps = gdn_recurrence(
            chunk.q,
            chunk.k,
            chunk.v,
            chunk.a,
            chunk.b,
            chunk.A_log,
            chunk.dt_bias,
            initial_state=before,
            dtype=torch.float64,
        )
        output, state = list(steps)[-1]
        return output[0], state[0]


def _select(inputs: LayerInputs, where: tuple[Tensor, Tensor]) -> LayerInputs:
    """The inputs of some (requests, positions)."""
    parts = (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b)
    q, k, v, a, b = (part[where] for part in parts)
    return LayerInputs(q, k, v, a, b, inputs.A_log, inputs.dt_bias)
