"""A state machine drives one layer's kernels step by step, with an account of tokens beside it.

Hypothesis picks what happens next: a request is admitted, prefilled in chunks, decodes, is preempted, resumed, finished
or aborted, a freed slot goes to the front of the queue, a decode step is padded. Inputs are those of the exact regime,
so every output has one right value and is compared by bits. After each step the ledger of oracles/ring.py says what
state and ring must hold: every checkpoint is compared with the dictionaries at that token, every pending ring row must
hold the key of the token it stands for, and free slots and the NULL slot must be untouched. The machine itself is
tested with planted faults: it must fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from replay_parity.cases.case import Cache, Case, Inputs, Replay, Request
from replay_parity.cases.geometry import TINY
from replay_parity.cases.inputs import TORCH_DTYPES, layer_inputs
from replay_parity.cases.strategies import BACKEND, FLOAT32, allowed_dtypes
from replay_parity.harness.faults import plant
from replay_parity.harness.layer_leg import LayerLeg, StepRows
from replay_parity.harness.layer_memory import LayerMemory
from replay_parity.kernels.cursor import decode_cursor, runs_as_decode
from replay_parity.oracles.memory import memory_truth
from replay_parity.oracles.ring import LedgerRow, RingLedger

# one that has ended comes again as a new one, when all others have had their turn
NUM_REQUESTS = 12
# tokens that a request has inputs for
LONGEST = 24
# fewer than requests, so that they wait for each other's slots
NUM_SLOTS = 4

PICK = st.integers(0, 7)


@dataclass
class Live:
    """One request: ``known`` tokens, ``computed`` of them in the state; ``slot`` is None while it waits."""

    known: int
    prefill_len: int
    computed: int = 0
    slot: int | None = None

    @property
    def decoding(self) -> bool:
        """True where the prefill is done: one token is known beyond the state."""
        return self.slot is not None and self.computed >= self.prefill_len

    @property
    def prefilling(self) -> bool:
        """True where tokens handed to prefill are left."""
        return self.slot is not None and self.computed < self.prefill_len


class Layer(RuleBasedStateMachine):
    """Rules are what a scheduler can do; each one that gives rows is one step."""

    # what walks came through, over all of them
    visits: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Live] = {}
        self.new = list(range(NUM_REQUESTS))
        self.free = list(range(1, NUM_SLOTS + 1))
        self.steps = 0
        self.padding = 0
        self.recycled = False

    @initialize(
        buffer_len=st.sampled_from((2, 1, 3, 4, 3, 5)),
        dtypes=st.sampled_from((FLOAT32, *allowed_dtypes("exact"))),
        seed=st.integers(0, 1000),
    )
    def open(self, buffer_len: int, dtypes: tuple[str, str, str], seed: int) -> None:
        requests = tuple(Request(1, LONGEST) for _ in range(NUM_REQUESTS))
        replay = Replay(buffer_len, *dtypes)
        self.case = Case("stateful", TINY, replay, Cache(), None, Inputs("exact", seed), requests, ())
        self.inputs = layer_inputs(self.case)
        self.truth = memory_truth(self.inputs)
        self.outputs = self.truth.outputs.to(TORCH_DTYPES[replay.activation_dtype])
        self.states = self.truth.states
        self.memory = LayerMemory(self.case, NUM_SLOTS + 1)
        self.leg = LayerLeg(self.case, self.inputs, self.memory)
        self.ledger = RingLedger(buffer_len, None)
        self.untouched = self.memory.snapshot()

    @precondition(lambda self: self.new and self.free)
    @rule(prompt_len=st.integers(1, 9), first=PICK, beside=st.booleans())
    def admit(self, prompt_len: int, first: int, beside: bool) -> None:
        request = self.new.pop(0)
        self.live[request] = Live(prompt_len, prompt_len)
        self.start(request, first, beside)

    @precondition(lambda self: self.free and self.having(lambda r: r.slot is None))
    @rule(who=PICK, first=PICK, beside=st.booleans())
    def resume(self, who: int, first: int, beside: bool) -> None:
        request = self.pick(who, lambda r: r.slot is None)
        self.visits["resume"] += 1
        self.live[request].prefill_len = self.live[request].known
        self.start(request, first, beside)

    @precondition(lambda self: self.having(lambda r: r.prefilling))
    @rule(who=PICK, size=PICK, beside=st.booleans())
    def chunk(self, who: int, size: int, beside: bool) -> None:
        request = self.pick(who, lambda r: r.prefilling)
        left = self.live[request].prefill_len - self.live[request].computed
        self.step([(request, left - size % left)], beside)

    @precondition(lambda self: self.having(lambda r: r.decoding))
    @rule(turn=PICK, leave_out=PICK, steps=st.integers(1, 8))
    def decode(self, turn: int, leave_out: int, steps: int) -> None:
        rows = self.having(lambda r: r.decoding)
        rows = rows[turn % len(rows) :] + rows[: turn % len(rows)]
        # half of the time somebody gets no row
        if leave_out < 4 and len(rows) > 1:
            rows.pop()
        for _ in range(steps):
            rows = [request for request in rows if request in self.live]
            if rows:
                self.step([(request, 1) for request in rows])

    @precondition(lambda self: self.having(lambda r: r.slot is not None))
    @rule(who=PICK)
    def preempt(self, who: int) -> None:
        # mostly one that decodes: those have something to lose
        decoding = self.having(lambda r: r.decoding)
        request = self.pick(who, lambda r: r.slot is not None and (r.decoding or not decoding or who > 5))
        held = self.ledger.held(request)
        self.visits["preempted mid-ring"] += held is not None and bool(held.pending)
        self.leave(request)
        self.live[request].computed = 0

    @precondition(lambda self: self.having(lambda r: r.decoding))
    @rule(who=PICK)
    def finish(self, who: int) -> None:
        request = self.pick(who, lambda r: r.decoding)
        self.end(request)

    @precondition(lambda self: self.live)
    @rule(who=PICK)
    def abort(self, who: int) -> None:
        request = self.pick(who, lambda r: True)
        if self.live[request].slot is not None:
            self.end(request)

    @precondition(lambda self: len(self.free) > 1 and not self.recycled)
    @rule(which=PICK)
    def recycle(self, which: int) -> None:
        """Another free slot is handed out next."""
        self.visits["recycle"] += 1
        self.recycled = True
        self.free.append(self.free.pop(which % len(self.free)))

    @precondition(lambda self: not self.padding and self.having(lambda r: r.decoding))
    @rule(rows=st.integers(1, 3))
    def pad(self, rows: int) -> None:
        """The next decode rows run in a graph with that many padded ones."""
        self.padding = rows

    @invariant()
    def nothing_forbidden_was_written(self) -> None:
        assert not self.leg.events, self.leg.events[0].message

    @invariant()
    def ledger_counts_the_same_tokens(self) -> None:
        for request, live in self.live.items():
            held = self.ledger.held(request)
            assert (0 if held is None else held.num_tokens) == live.computed

    @invariant()
    def checkpoints_hold_their_tokens(self) -> None:
        for request, live in self.live.items():
            held = self.ledger.held(request)
            if live.slot is None or held is None or not held.checkpointed:
                continue
            right = self.states[request, held.checkpointed - 1]
            assert torch.equal(self.memory.state[live.slot].double(), right), f"request {request}: checkpoint is wrong"

    @invariant()
    def rings_hold_their_tokens(self) -> None:
        for request, live in self.live.items():
            held = self.ledger.held(request)
            if live.slot is None or held is None:
                continue
            for entry, position in enumerate(held.pending):
                # a one-hot key normalises to exactly 1
                key = (self.inputs.k[request, position] != 0).double()
                ring_k = self.memory.ring_k[live.slot, :, entry].double()
                assert torch.equal(ring_k, key), f"request {request}: ring entry {entry} is not token {position}"

    @invariant()
    def idle_slots_rest(self) -> None:
        now = self.memory.pages[[0, *self.free]]
        assert torch.equal(now, self.untouched[[0, *self.free]]), "the NULL slot or a free one was written"

    def having(self, accepts: Callable[[Live], bool]) -> list[int]:
        return [request for request, live in self.live.items() if accepts(live)]

    def pick(self, who: int, accepts: Callable[[Live], bool]) -> int:
        able = self.having(accepts)
        return able[who % len(able)]

    def start(self, request: int, first: int, beside: bool) -> None:
        live = self.live[request]
        live.slot = self.free.pop()
        self.recycled = False
        self.step([(request, live.known - first % live.known)], beside)

    def leave(self, request: int) -> None:
        slot = self.live[request].slot
        assert slot is not None
        self.memory.retire([slot])
        self.ledger.release(request)
        self.free.append(slot)
        self.live[request].slot = None
        self.untouched = self.memory.snapshot()

    def end(self, request: int) -> None:
        if self.live[request].slot is not None:
            self.leave(request)
        del self.live[request]
        self.new.append(request)

    def step(self, rows: list[tuple[int, int]], beside: bool = False) -> None:
        """Run a step: rows of (request, num_tokens), on demand with everyone who decodes."""
        if beside:
            rows = [(request, 1) for request in self.having(lambda r: r.decoding)] + rows
        table = [(i, r, self.live[r].computed, n, self.live[r].slot) for i, (r, n) in enumerate(rows)]
        step_rows = StepRows(*np.array(table, np.int64).T)
        decodes = runs_as_decode(step_rows.num_computed, step_rows.num_tokens)
        if decodes.any():
            self.replay(step_rows.select(decodes))
        if not decodes.all():
            self.prefill(step_rows.select(~decodes))
        for request, num_tokens in rows:
            live = self.live[request]
            live.computed += num_tokens
            live.known += live.computed == live.known
            if live.computed == LONGEST:
                self.end(request)
        self.steps += 1

    def replay(self, rows: StepRows) -> None:
        base = np.array([self.live[request].prefill_len for request in rows.request.tolist()])
        cursor = decode_cursor(rows.num_computed, base, rows.num_tokens, self.case.replay.buffer_len)
        for index, request in enumerate(rows.request.tolist()):
            told = self.ledger.decode(request, int(rows.num_computed[index]), int(base[index]))
            self.check_cursor(request, (int(cursor.write_pos[index]), int(cursor.is_flush[index])), told)
        write_pos, is_flush = cursor.write_pos.astype(np.int64), cursor.is_flush.astype(np.int64)
        self.visits["append"] += int((is_flush == 0).sum())
        self.visits["flush"] += int((write_pos[is_flush == 1] == self.case.replay.buffer_len - 1).sum())
        self.visits["leftover"] += int((rows.num_computed < base).sum())
        self.visits["padded"] += self.padding > 0
        self.leg.replay(self.steps, rows, write_pos, is_flush, len(rows.slot) + self.padding)
        self.padding = 0
        self.compare(rows)

    def check_cursor(self, request: int, got: tuple[int, int], told: LedgerRow) -> None:
        assert got == (told.write_pos, told.is_flush), f"request {request}: cursor {got}, the ledger says {told}"

    def prefill(self, rows: StepRows) -> None:
        for index, request in enumerate(rows.request.tolist()):
            start, count = int(rows.num_computed[index]), int(rows.num_tokens[index])
            self.ledger.prefill(request, start, count, self.live[request].prefill_len)
        self.leg.prefill(self.steps, rows)
        self.compare(rows)

    def compare(self, rows: StepRows) -> None:
        got, right = self.leg.outputs[-1], self.outputs[rows.request, rows.position]
        wrong = np.flatnonzero((got != right).flatten(1).any(1).numpy())
        assert not len(wrong), f"output of request {rows.request[wrong[0]]}, token {rows.position[wrong[0]]}, is wrong"


class NumbersAlone(Layer):
    """The machine that does not ask the ledger about cursors: outputs, states and rings must give a fault away."""

    def check_cursor(self, request: int, got: tuple[int, int], told: LedgerRow) -> None:
        """Any cursor will do."""


def run(machine: type[Layer], examples: int) -> None:
    """The same walks each time; a failure is raised as it is found."""
    machine.visits.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            derandomize=True,
            # the same walks whatever else is loaded
            backend=BACKEND,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_kernels_hold_every_step() -> None:
    run(Layer, 30)
    rare = {name: count for name, count in Layer.visits.items() if count < 5}
    assert len(Layer.visits) == 7 and not rare


# what stops the machine, and how it may say so
FAULTS = {
    (Layer, "cursor.leftover_append"): "the ledger says",
    (NumbersAlone, "cursor.leftover_append"): "checkpoint is wrong|output of request .* is wrong",
    (Layer, "ring.write_next"): "was written|is not token|output of request .* is wrong",
}


@pytest.mark.parametrize(("machine", "fault"), FAULTS)
def test_planted_faults_stop_the_machine(machine: type[Layer], fault: str) -> None:
    with plant(fault, "schedule"), pytest.raises(AssertionError, match=FAULTS[machine, fault]):
        run(machine, 40)
