"""One pass over a timeline: what each row finds and what each departure leaves behind, in tokens and slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from .case import Case
from .timeline import DECODE, LEFTOVER, Row, Timeline, TimelineStep, prefix_root


@dataclass(frozen=True)
class SeenRow:
    """One row and what came before it.

    ``pending`` ring entries stand before the row, counted token by token (no cursor is looked at). ``folds``: the row
    must end in the checkpoint; ``fills``: because the ring is full. ``cycles``: how often the ring has filled since the
    latest (re)admission, before the row. ``last_slot``: slot of the request's row before, None on its first.
    ``tenant``: who had the slot before, None where nobody else had. ``decoded_hit``: the state that an admission starts
    from was left at a block boundary by a decode row.
    """

    step: int
    row: Row
    pending: int
    folds: bool
    fills: bool
    cycles: int
    last_slot: int | None
    tenant: int | None
    preempted_in: int | None
    decoded_hit: bool

    @property
    def resumed(self) -> bool:
        """True for every row of a request that has been preempted before."""
        return self.preempted_in is not None


@dataclass(frozen=True)
class Departure:
    """A request that gives up its slot: ``how`` is "preempt", "abort" or "finish".

    ``pending`` ring entries are lost; ``decoded`` tokens since the latest (re)admission ran as decode; ``before``: how
    often it was preempted before. ``slot`` is 0 for one that was waiting to be resumed.
    """

    step: int
    request: int
    how: str
    pending: int
    decoded: int
    before: int
    slot: int


@dataclass(frozen=True)
class History:
    """All rows by step, and all departures in order."""

    steps: tuple[tuple[SeenRow, ...], ...]
    departures: tuple[Departure, ...]

    @property
    def rows(self) -> tuple[SeenRow, ...]:
        """All rows, in order."""
        return tuple(row for step in self.steps for row in step)


def history(case: Case, timeline: Timeline) -> History:
    """Follow every request and slot through a timeline."""
    walk = _Walk(case)
    steps = tuple(walk.step(index, step) for index, step in enumerate(timeline.steps))
    return History(steps, tuple(walk.departures))


@dataclass
class _Track:
    """One request on its way."""

    pending: int = 0
    cycles: int = 0
    decoded: int = 0
    slot: int = 0
    last_slot: int | None = None
    preemptions: int = 0
    preempted_in: int | None = None


@dataclass
class _Walk:
    case: Case
    tracks: dict[int, _Track] = field(default_factory=dict)
    tenants: dict[int, int] = field(default_factory=dict)
    # block boundaries whose state a decode row left behind
    decoded: set[tuple[int, int]] = field(default_factory=set)
    departures: list[Departure] = field(default_factory=list)

    def step(self, index: int, step: TimelineStep) -> tuple[SeenRow, ...]:
        for how, requests in (("preempt", step.preempt), ("abort", step.abort)):
            for request in requests:
                self._leave(index, request, how)
        seen = tuple(self._row(index, row) for row in step.rows)
        for request in step.finished:
            self._leave(index, request, "finish")
        return seen

    def _row(self, index: int, row: Row) -> SeenRow:
        track = self.tracks.setdefault(row.request, _Track())
        tokens = row.position + 1
        fills = row.kind == DECODE and track.pending + 1 == self.case.replay.buffer_len
        ends_block = self.case.cache.mode == "align" and tokens % self.case.cache.block_size == 0
        folds = row.runs_as_decode and (fills or ends_block or row.kind == LEFTOVER)
        tenant = self.tenants.get(row.slot)
        seen = SeenRow(
            step=index,
            row=row,
            pending=track.pending if row.runs_as_decode else 0,
            folds=folds,
            fills=fills,
            cycles=track.cycles,
            last_slot=track.last_slot,
            tenant=None if tenant == row.request else tenant,
            preempted_in=track.preempted_in,
            decoded_hit=row.admission is not None and self._root(row.request, row.num_computed) in self.decoded,
        )
        if ends_block and row.kind == DECODE:
            self.decoded.add(self._root(row.request, tokens))
        self._go_on(track, row, folds, fills)
        return seen

    def _go_on(self, track: _Track, row: Row, folds: bool, fills: bool) -> None:
        appends = row.kind == DECODE and not folds
        track.pending = track.pending + 1 if appends else 0
        track.decoded += row.kind == DECODE
        track.cycles += fills
        track.slot = track.last_slot = row.slot
        self.tenants[row.slot] = row.request

    def _leave(self, index: int, request: int, how: str) -> None:
        track = self.tracks[request]
        self.departures.append(
            Departure(index, request, how, track.pending, track.decoded, track.preemptions, track.slot)
        )
        track.pending = track.cycles = track.decoded = track.slot = 0
        if how == "preempt":
            track.preemptions += 1
            track.preempted_in = index

    def _root(self, request: int, length: int) -> tuple[int, int]:
        return prefix_root(self.case, request, length)
