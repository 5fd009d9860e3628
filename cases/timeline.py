"""The schedule as exact integers: plays a Case's steps, says what each row is, refuses what no scheduler could do."""

from __future__ import annotations

from dataclasses import dataclass, field

from .blocks import Blocks
from .case import Case, CaseError, Step
from .split import may_end

FIRST_CHUNK, PREFILL, LEFTOVER, DECODE = "first_chunk", "prefill", "leftover", "decode"


@dataclass(frozen=True)
class Row:
    """One row of one step.

    ``num_computed`` tokens of the request are in the state before the row; ``prefill_len`` are those handed to prefill
    at the latest (re)admission (the decode base without prefix caching). ``kind``: "first_chunk" (nothing computed
    yet), "prefill" (a longer chunk over existing state), "leftover" (a one-token prefill chunk over existing state: it
    runs as decode), "decode". ``copy_from`` is the slot whose state is copied into ``slot`` first ("align" mode).
    """

    request: int
    num_tokens: int
    num_computed: int
    prefill_len: int
    kind: str
    slot: int
    copy_from: int | None
    admission: str | None
    samples: bool

    @property
    def runs_as_decode(self) -> bool:
        """True for rows that the decode kernel handles."""
        return self.kind in (LEFTOVER, DECODE)

    @property
    def position(self) -> int:
        """Index of the row's last token in its request."""
        return self.num_computed + self.num_tokens - 1


@dataclass(frozen=True)
class TimelineStep:
    """Rows in batch order; the requests that ended after the step; ``padded_to`` rows under FULL graphs, else None."""

    rows: tuple[Row, ...]
    preempt: tuple[int, ...]
    abort: tuple[int, ...]
    finished: tuple[int, ...]
    padded_to: int | None


@dataclass(frozen=True)
class Timeline:
    """A legal schedule. ``num_slots`` counts state slots with the NULL slot 0."""

    steps: tuple[TimelineStep, ...]
    num_slots: int


def play(case: Case) -> Timeline:
    """The timeline of a Case. Raises CaseError with the path of the first field that no scheduler could play."""
    _check_prefixes(case)
    player = _Player(case)
    steps = tuple(player.step(index, step) for index, step in enumerate(case.steps))
    player.check_end()
    return Timeline(steps, player.slots.count + 1)


def prefix_root(case: Case, request: int, length: int) -> tuple[int, int]:
    """The identity of the first ``length`` tokens of a request: the earliest request that has the same ones."""
    asked = case.requests[request]
    if asked.shared_prefix_of is not None and length <= asked.shared_prefix_len:
        return prefix_root(case, asked.shared_prefix_of, length)
    return request, length


@dataclass
class _Slots:
    """State slots: the most recently freed one is handed out first, so that tenants follow each other closely."""

    count: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count

    def give_back(self, slot: int) -> None:
        self.free.append(slot)


@dataclass
class _Live:
    """Progress of one request. ``slot`` is 0 while it holds none."""

    generated: int = 0
    computed: int = 0
    prefill_len: int = 0
    slot: int = 0
    status: str = "new"


class _Player:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.live = [_Live() for _ in case.requests]
        self.slots = _Slots()
        # "align": exact states at block boundaries, by the identity of their prefix
        self.cached: dict[tuple[int, int], int] = {}
        few = case.cache.num_blocks
        self.blocks = None if few is None else Blocks(few, case.cache.block_size)

    def step(self, index: int, step: Step) -> TimelineStep:
        for name in ("preempt", "abort"):
            for item, request in enumerate(getattr(step, name)):
                self._drop(f"steps[{index}].{name}[{item}]", request, name)
        if not step.rows:
            raise CaseError(f"steps[{index}].rows: must hold at least one row")
        seen: set[int] = set()
        rows = []
        for item, (request, num_tokens) in enumerate(step.rows):
            path = f"steps[{index}].rows[{item}]"
            if request in seen:
                raise CaseError(f"{path}: request {request} already has a row in this step")
            seen.add(request)
            rows.append(self._row(path, request, num_tokens))
        if self.blocks is not None:
            self._share(self.blocks, index, step, rows)
        finished = tuple(row.request for row in rows if self._finish(row))
        return TimelineStep(tuple(rows), step.preempt, step.abort, finished, self._padding(rows))

    def _share(self, blocks: Blocks, index: int, step: Step, rows: list[Row]) -> None:
        """Hand blocks to this step's rows; refuse the step unless exactly those it preempts have to give way."""
        for request in step.abort:
            blocks.release(request)
        running = [(row.request, row.num_computed + row.num_tokens) for row in rows if row.admission is None]
        # who gives way first is last in vLLM's list, and asks for all it has left where it is reached
        idle = self._without_row(rows)
        last = [(request, self._known_tokens(request)) for request in (*idle, *reversed(step.preempt))]
        gave_way = tuple(blocks.schedule([*running, *last]))
        if gave_way != step.preempt:
            why = "run out" if gave_way else "are enough"
            raise CaseError(
                f"steps[{index}].preempt: must be {list(gave_way)}, because {self.case.cache.num_blocks} blocks {why} "
                f"in this step, not {list(step.preempt)}"
            )
        if idle:
            must = "where blocks are few it gets one or gives way"
            raise CaseError(f"steps[{index}].rows: request {idle[0]} runs and has no row; {must}")
        for item, row in enumerate(rows):
            if row.admission is None:
                continue
            path = f"steps[{index}].rows[{item}]: request {row.request}"
            if gave_way:
                raise CaseError(f"{path} is not admitted in a step in which one gives way")
            if not blocks.admit(row.request, row.prefill_len, row.num_computed + row.num_tokens):
                raise CaseError(
                    f"{path} needs {blocks.needed(row.prefill_len)} blocks to be admitted, {blocks.free} are free"
                )

    def _without_row(self, rows: list[Row]) -> list[int]:
        having = {row.request for row in rows}
        return [request for request, live in enumerate(self.live) if live.status == "running" and request not in having]

    def _known_tokens(self, request: int) -> int:
        return self.case.requests[request].prompt_len + self.live[request].generated

    def check_end(self) -> None:
        for request, live in enumerate(self.live):
            if live.status == "new":
                raise CaseError(f"requests[{request}]: never gets a row; give it one or leave it out")
            if live.status in ("finished", "aborted"):
                continue
            known = self.case.requests[request].prompt_len + live.generated
            raise CaseError(
                f"steps: end while request {request} is {live.status} with {live.computed} of {known} known tokens "
                f"computed and {live.generated} of {self.case.requests[request].output_len} sampled; "
                "a request decodes only after its whole prefill; add rows or abort it"
            )

    def _drop(self, path: str, request: int, name: str) -> None:
        live = self._known(path, request)
        allowed = ("running",) if name == "preempt" else ("running", "preempted")
        if live.status not in allowed:
            raise CaseError(f"{path}: request {request} is {live.status}, only {' or '.join(allowed)} ones can be")
        self._release(request)
        live.status = {"preempt": "preempted", "abort": "aborted"}[name]

    def _row(self, path: str, request: int, num_tokens: int) -> Row:
        live = self._known(path, request)
        if live.status in ("finished", "aborted"):
            raise CaseError(f"{path}: request {request} is {live.status} and cannot run again")
        known = self.case.requests[request].prompt_len + live.generated
        admission, copy_from = None, None
        if live.status != "running":
            admission = "first" if live.status == "new" else "resume"
            live.computed, copy_from = self._hit(request, known)
            live.prefill_len, live.status = known, "running"
            live.slot = self.slots.take()
        elif self._starts_block(live.computed):
            # the state at the boundary stays behind as the cached one
            copy_from, live.slot = live.slot, self.slots.take()
        self._check_tokens(path, request, num_tokens, known)
        row = Row(
            request,
            num_tokens,
            live.computed,
            live.prefill_len,
            _kind(live, num_tokens),
            live.slot,
            copy_from,
            admission,
            live.computed + num_tokens == known,
        )
        live.computed += num_tokens
        live.generated += row.samples
        return row

    def _check_tokens(self, path: str, request: int, num_tokens: int, known: int) -> None:
        live = self.live[request]
        left = known - live.computed
        if num_tokens > left:
            what = (
                "decodes before its prefill is done" if live.computed < live.prefill_len else "runs ahead of its decode"
            )
            raise CaseError(
                f"{path}: request {request} {what}: it has {left} known tokens to compute, not {num_tokens}"
            )
        if self.case.cache.mode != "align":
            return
        block = self.case.cache.block_size
        end = live.computed + num_tokens
        if not may_end(live.computed, end, known, block):
            raise CaseError(
                f"{path}: in align mode a chunk ends on a block boundary (a multiple of {block}) or lies in the block "
                f"of the last known token; this one covers tokens {live.computed} to {end - 1} of {known}"
            )

    def _hit(self, request: int, known: int) -> tuple[int, int | None]:
        """Longest cached boundary below the known tokens: (tokens, slot to copy from)."""
        if self.case.cache.mode != "align":
            return 0, None
        block = self.case.cache.block_size
        for length in range((known - 1) // block * block, 0, -block):
            slot = self.cached.get(prefix_root(self.case, request, length))
            if slot is not None:
                return length, slot
        return 0, None

    def _starts_block(self, computed: int) -> bool:
        return self.case.cache.mode == "align" and computed % self.case.cache.block_size == 0

    def _finish(self, row: Row) -> bool:
        live = self.live[row.request]
        if self._starts_block(live.computed):
            self.cached.setdefault(prefix_root(self.case, row.request, live.computed), live.slot)
        if live.generated < self.case.requests[row.request].output_len:
            return False
        self._release(row.request)
        if self.blocks is not None:
            self.blocks.release(row.request)
        live.status = "finished"
        return True

    def _release(self, request: int) -> None:
        live = self.live[request]
        if live.slot and live.slot not in self.cached.values():
            self.slots.give_back(live.slot)
        live.slot, live.computed = 0, 0

    def _padding(self, rows: list[Row]) -> int | None:
        if self.case.graphs is None or not all(row.runs_as_decode for row in rows):
            return None
        return next((size for size in self.case.graphs.capture_sizes if size >= len(rows)), None)

    def _known(self, path: str, request: int) -> _Live:
        if request >= len(self.live):
            raise CaseError(f"{path}: there is no request {request}, requests has {len(self.live)}")
        return self.live[request]


def _kind(live: _Live, num_tokens: int) -> str:
    if live.computed == 0:
        return FIRST_CHUNK
    if num_tokens > 1:
        return PREFILL
    return LEFTOVER if live.computed < live.prefill_len else DECODE


def _check_prefixes(case: Case) -> None:
    for index, request in enumerate(case.requests):
        other = request.shared_prefix_of
        if other is None:
            continue
        if other >= index:
            raise CaseError(f"requests[{index}].shared_prefix_of: must name an earlier request, not {other}")
        if request.shared_prefix_len > case.requests[other].prompt_len:
            raise CaseError(
                f"requests[{index}].shared_prefix_len: is longer than the prompt of request {other} "
                f"({case.requests[other].prompt_len} tokens)"
            )
