"""Labels what a timeline contains: the account of what was exercised and what was not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .case import Case
from .timeline import DECODE, FIRST_CHUNK, LEFTOVER, PREFILL, Timeline, TimelineStep


def situations(case: Case, timeline: Timeline) -> dict[str, int]:
    """How often each situation occurs in a timeline, every name present, in a fixed order."""
    return {name: sum(1 for _ in find(case, timeline)) for name, find in _FINDERS.items()}


def names() -> tuple[str, ...]:
    """All situation names, in the order of reports."""
    return tuple(_FINDERS)


def pending_before(case: Case, timeline: Timeline) -> list[list[int]]:
    """Ring entries pending before each row, by step and row: a count that knows nothing of cursors."""
    pending = [0] * len(case.requests)
    counts = []
    for step in timeline.steps:
        for request in (*step.preempt, *step.abort):
            pending[request] = 0
        counts.append([pending[row.request] if row.runs_as_decode else 0 for row in step.rows])
        for row in step.rows:
            grows = row.kind == DECODE and not _folds(case, row.position + 1, pending[row.request])
            pending[row.request] = pending[row.request] + 1 if grows else 0
    return counts


def _folds(case: Case, tokens: int, pending: int) -> bool:
    boundary = case.cache.mode == "align" and tokens % case.cache.block_size == 0
    return boundary or pending + 1 == case.replay.buffer_len


def _rows(timeline: Timeline, kind: str) -> Iterator[object]:
    return (row for step in timeline.steps for row in step.rows if row.kind == kind)


def _decode_rows(case: Case, timeline: Timeline) -> Iterator[tuple[int, int]]:
    """(pending, tokens after the row) of each true decode row."""
    counts = pending_before(case, timeline)
    for step, pending in zip(timeline.steps, counts, strict=True):
        for row, count in zip(step.rows, pending, strict=True):
            if row.kind == DECODE:
                yield count, row.position + 1


def _flushes(case: Case, timeline: Timeline) -> Iterator[object]:
    return (count for count, tokens in _decode_rows(case, timeline) if _folds(case, tokens, count))


def _forced_flushes(case: Case, timeline: Timeline) -> Iterator[object]:
    full = case.replay.buffer_len - 1
    return (n for n, tokens in _decode_rows(case, timeline) if n != full and _folds(case, tokens, n))


def _appends(case: Case, timeline: Timeline) -> Iterator[object]:
    return (count for count, tokens in _decode_rows(case, timeline) if not _folds(case, tokens, count))


def _dropped_mid_ring(which: Callable[[TimelineStep], tuple[int, ...]]) -> Callable[[Case, Timeline], Iterator[object]]:
    def find(case: Case, timeline: Timeline) -> Iterator[object]:
        pending = [0] * len(case.requests)
        counts = pending_before(case, timeline)
        for step, before in zip(timeline.steps, counts, strict=True):
            yield from (request for request in which(step) if request not in step.finished and pending[request])
            for row, count in zip(step.rows, before, strict=True):
                grows = row.kind == DECODE and not _folds(case, row.position + 1, count)
                pending[row.request] = count + 1 if grows else 0
            yield from (request for request in which(step) if request in step.finished and pending[request])

    return find


def _admissions(timeline: Timeline, admission: str) -> Iterator[object]:
    return (row for step in timeline.steps for row in step.rows if row.admission == admission)


def _resume_same_step(case: Case, timeline: Timeline) -> Iterator[object]:
    del case
    return (row for step in timeline.steps for row in step.rows if row.admission and row.request in step.preempt)


def _resume_slots(case: Case, timeline: Timeline, same: int) -> Iterator[object]:
    last: dict[int, int] = {}
    for step in timeline.steps:
        for row in step.rows:
            if row.admission == "resume" and (last[row.request] == row.slot) == bool(same):
                yield row
            last[row.request] = row.slot


def _recycled(case: Case, timeline: Timeline) -> Iterator[object]:
    tenants: dict[int, int] = {}
    for step in timeline.steps:
        for row in step.rows:
            if row.admission and tenants.get(row.slot, row.request) != row.request:
                yield row
            tenants[row.slot] = row.request


def _recycled_one_token(case: Case, timeline: Timeline) -> Iterator[object]:
    tenants: dict[int, int] = {}
    for step in timeline.steps:
        for row in step.rows:
            one_token = row.kind == FIRST_CHUNK and row.num_tokens == 1
            if one_token and tenants.get(row.slot, row.request) != row.request:
                yield row
            tenants[row.slot] = row.request


def _mixed(case: Case, timeline: Timeline) -> Iterator[object]:
    return (step for step in timeline.steps if len({row.runs_as_decode for row in step.rows}) == 2)


def _order_flips(case: Case, timeline: Timeline) -> Iterator[object]:
    seen: set[tuple[int, int]] = set()
    for step in timeline.steps:
        order = [row.request for row in step.rows if row.runs_as_decode]
        pairs = {(a, b) for index, a in enumerate(order) for b in order[index + 1 :]}
        if any((b, a) in seen for a, b in pairs):
            yield step
        seen |= pairs


def _unlike_phases(case: Case, timeline: Timeline) -> Iterator[object]:
    counts = pending_before(case, timeline)
    for step, before in zip(timeline.steps, counts, strict=True):
        phases = {count for row, count in zip(step.rows, before, strict=True) if row.runs_as_decode}
        if len(phases) > 1:
            yield step


def _leftover_beside_decode(case: Case, timeline: Timeline) -> Iterator[object]:
    return (step for step in timeline.steps if {LEFTOVER, DECODE} <= {row.kind for row in step.rows})


def _prefix_hits(case: Case, timeline: Timeline) -> Iterator[object]:
    return (row for row in _admissions(timeline, "first") if getattr(row, "num_computed", 0))


def _block_crossings(case: Case, timeline: Timeline) -> Iterator[object]:
    rows = (row for step in timeline.steps for row in step.rows)
    return (row for row in rows if row.copy_from is not None and row.admission is None)


_FINDERS: dict[str, Callable[[Case, Timeline], Iterator[object]]] = {
    "append": _appends,
    "flush": _flushes,
    "forced_flush": _forced_flushes,
    "one_token_tail": lambda case, timeline: _rows(timeline, LEFTOVER),
    "one_token_prompt": lambda case, timeline: (
        row for step in timeline.steps for row in step.rows if row.kind == FIRST_CHUNK and row.num_tokens == 1
    ),
    "chunked_prefill": lambda case, timeline: _rows(timeline, PREFILL),
    "preempt": lambda case, timeline: (request for step in timeline.steps for request in step.preempt),
    "preempt_mid_ring": _dropped_mid_ring(lambda step: step.preempt),
    "resume": lambda case, timeline: _admissions(timeline, "resume"),
    "resume_same_step": _resume_same_step,
    "resume_same_slot": lambda case, timeline: _resume_slots(case, timeline, 1),
    "resume_other_slot": lambda case, timeline: _resume_slots(case, timeline, 0),
    "abort": lambda case, timeline: (request for step in timeline.steps for request in step.abort),
    "abort_mid_ring": _dropped_mid_ring(lambda step: step.abort),
    "finish_mid_ring": _dropped_mid_ring(lambda step: step.finished),
    "recycled_slot": _recycled,
    "one_token_prompt_on_recycled_slot": _recycled_one_token,
    "mixed_step": _mixed,
    "tail_beside_decode": _leftover_beside_decode,
    "unlike_ring_phases": _unlike_phases,
    "batch_order_flip": _order_flips,
    "padded_step": lambda case, timeline: (
        step for step in timeline.steps if step.padded_to is not None and step.padded_to > len(step.rows)
    ),
    "full_graph_step": lambda case, timeline: (step for step in timeline.steps if step.padded_to is not None),
    "block_crossing": _block_crossings,
    "prefix_hit": _prefix_hits,
}
