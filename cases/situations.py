"""Labels what a timeline contains: the account of what was exercised and what was not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, pairwise

from .case import Case
from .history import Departure, History, SeenRow, history
from .timeline import DECODE, FIRST_CHUNK, LEFTOVER, PREFILL, Timeline, TimelineStep


def situations(case: Case, timeline: Timeline) -> dict[str, int]:
    """How often each situation occurs in a timeline, every name present, in a fixed order."""
    seen = history(case, timeline)
    return {name: sum(1 for _ in find(case, timeline, seen)) for name, find in _FINDERS.items()}


def names() -> tuple[str, ...]:
    """All situation names, in the order of reports."""
    return tuple(_FINDERS)


def legal_pairs() -> tuple[tuple[str, str], ...]:
    """Pairs of situations, in the order of ``names``, that one Case can show.

    Two situations that ask nothing contrary of a Case's settings can always be had together: play a timeline of the
    first, then one of the second with requests of its own. Nothing is lost, as the second gets other slots but in the
    same order; "slots_unlike_rows" alone looks at slot numbers, so play that one first. Only settings exclude: see
    ``NEEDS_LONGER_RING``.
    """
    return tuple(pair for pair in combinations(names(), 2) if not excluded(*pair))


def excluded(first: str, second: str) -> str | None:
    """Why no Case shows both, in one line; None where some Case does."""
    for one, other in ((first, second), (second, first)):
        if one == ONE_ENTRY_RING and other in NEEDS_LONGER_RING:
            return f"{ONE_ENTRY_RING}: buffer_len is 1; {other}: {NEEDS_LONGER_RING[other]}"
        if one == NATURAL_PREEMPT and other in NEEDS_FREE_HAND:
            return f"{NATURAL_PREEMPT}: blocks are few; {other}: {NEEDS_FREE_HAND[other]}"
    return None


ONE_ENTRY_RING = "one_entry_ring"
# what cannot be where buffer_len is 1: each decode row flushes, so nothing is ever pending
NEEDS_LONGER_RING = {
    "append": "a row appends, so the ring holds more than the row itself",
    "forced_flush": "a row folds a ring that is not full; a ring of one entry is full with each row",
    "preempt_mid_ring": "entries are pending",
    "preempt_full_ring": "all entries but the current one are pending, and there is one at least",
    "resume_off_phase": "the new decode base is no multiple of buffer_len away from the prompt",
    "abort_mid_ring": "entries are pending",
    "finish_mid_ring": "entries are pending",
    "unlike_ring_phases": "entries are pending in one row at least",
}

NATURAL_PREEMPT = "natural_preempt"
_ALIGNED = 'cache.mode is "align"'
# what cannot be where vLLM preempts by itself, for want of blocks
NEEDS_FREE_HAND = {
    "resume_same_step": "vLLM admits nobody in a step in which it preempts",
    "skipped_request": "whoever runs gets a row or gives way",
    "block_crossing": _ALIGNED,
    "decode_block_crossing": _ALIGNED,
    "prefill_ends_mid_block": _ALIGNED,
    "prefix_hit": _ALIGNED,
    "resume_hit": _ALIGNED,
    "hit_on_decoded_block": _ALIGNED,
}

_Finder = Callable[[Case, Timeline, History], Iterable[object]]


def _rows(accepts: Callable[[SeenRow], object]) -> _Finder:
    """Every row of which ``accepts`` is true."""
    return lambda case, timeline, seen: (row for row in seen.rows if accepts(row))


def _left(how: str, accepts: Callable[[Case, Departure], object] = lambda case, gone: True) -> _Finder:
    """Every departure of that kind of which ``accepts`` is true."""
    return lambda case, timeline, seen: (gone for gone in seen.departures if gone.how == how and accepts(case, gone))


def _steps(accepts: Callable[[TimelineStep], object]) -> _Finder:
    """Every step of which ``accepts`` is true."""
    return lambda case, timeline, seen: (step for step in timeline.steps if accepts(step))


def _decodes(seen: SeenRow) -> bool:
    return seen.row.kind == DECODE


def _resumes(seen: SeenRow) -> bool:
    return seen.row.admission == "resume"


def _one_token_prompt(seen: SeenRow) -> bool:
    return seen.row.kind == FIRST_CHUNK and seen.row.num_tokens == 1


def _recycles(seen: SeenRow) -> bool:
    return seen.row.admission is not None and seen.tenant is not None


def _resume_off_phase(case: Case, timeline: Timeline, seen: History) -> Iterator[object]:
    """Decode rows whose ring position a count from the prompt would get wrong."""
    for row in seen.rows:
        moved = row.row.prefill_len - case.requests[row.row.request].prompt_len
        if _decodes(row) and moved % case.replay.buffer_len:
            yield row


def _slot_reuse_same_step(case: Case, timeline: Timeline, seen: History) -> Iterator[object]:
    """Admissions into a slot that another request gave up at the start of this very step."""
    freed = {(gone.step, gone.slot): gone.request for gone in seen.departures if gone.how != "finish"}
    for row in seen.rows:
        giver = freed.get((row.step, row.row.slot))
        if row.row.admission is not None and giver is not None and giver != row.row.request:
            yield row


def _skipped(case: Case, timeline: Timeline, seen: History) -> Iterator[object]:
    """(step, request) of running requests that get no row."""
    running: set[int] = set()
    for index, step in enumerate(timeline.steps):
        rows = {row.request for row in step.rows}
        yield from ((index, request) for request in running - {*step.preempt, *step.abort} - rows)
        running = (running - {*step.preempt, *step.abort} | rows) - set(step.finished)


def _order_flips(case: Case, timeline: Timeline, seen: History) -> Iterator[object]:
    before: set[tuple[int, int]] = set()
    for step in timeline.steps:
        order = [row.request for row in step.rows if row.runs_as_decode]
        pairs = set(combinations(order, 2))
        if any((second, first) in before for first, second in pairs):
            yield step
        before |= pairs


def _unlike_phases(case: Case, timeline: Timeline, seen: History) -> Iterator[object]:
    return (step for step in seen.steps if len({row.pending for row in step if row.row.runs_as_decode}) > 1)


def _slots_unlike_rows(step: TimelineStep) -> bool:
    """True where counting rows, from either end or any start, does not lead to the decode rows' slots."""
    slots = [row.slot for row in step.rows if row.runs_as_decode]
    return any(second - first != 1 for first, second in pairwise(slots))


def _ends_prefill_inside(case: Case, timeline: Timeline, seen: History) -> Iterator[object]:
    if case.cache.mode != "align":
        return iter(())
    ends = (row.row for row in seen.rows if row.row.samples and not _decodes(row))
    return (row for row in ends if (row.position + 1) % case.cache.block_size)


def _graph_steps(timeline: Timeline) -> Iterator[tuple[TimelineStep, TimelineStep]]:
    """Each step in a FULL graph with the latest one before it in the graph of the same size."""
    latest: dict[int, TimelineStep] = {}
    for step in timeline.steps:
        if step.padded_to is None:
            continue
        if step.padded_to in latest:
            yield latest[step.padded_to], step
        latest[step.padded_to] = step


def _graph_change(accepts: Callable[[TimelineStep, TimelineStep], object]) -> _Finder:
    return lambda case, timeline, seen: (pair for pair in _graph_steps(timeline) if accepts(*pair))


def _other_slots(before: TimelineStep, step: TimelineStep) -> bool:
    """As many rows as in the graph's last step, in other slots: what is staged on a change of the count is stale."""
    return len(before.rows) == len(step.rows) and [row.slot for row in before.rows] != [row.slot for row in step.rows]


_FINDERS: dict[str, _Finder] = {
    "append": _rows(lambda seen: _decodes(seen) and not seen.folds),
    "flush": _rows(lambda seen: _decodes(seen) and seen.folds),
    "forced_flush": _rows(lambda seen: _decodes(seen) and seen.folds and not seen.fills),
    "two_cycles": _rows(lambda seen: seen.fills and seen.cycles),
    "four_cycles": _rows(lambda seen: seen.fills and seen.cycles >= 3),
    ONE_ENTRY_RING: lambda case, timeline, seen: (
        row for row in seen.rows if _decodes(row) and case.replay.buffer_len == 1
    ),
    "one_token_tail": _rows(lambda seen: seen.row.kind == LEFTOVER),
    "one_token_prompt": _rows(_one_token_prompt),
    "chunked_prefill": _rows(lambda seen: seen.row.kind == PREFILL),
    "preempt": _left("preempt"),
    NATURAL_PREEMPT: _left("preempt", lambda case, gone: case.cache.num_blocks is not None),
    "preempt_mid_ring": _left("preempt", lambda case, gone: gone.pending),
    "preempt_full_ring": _left("preempt", lambda case, gone: 0 < gone.pending == case.replay.buffer_len - 1),
    "preempt_empty_ring": _left("preempt", lambda case, gone: gone.decoded and not gone.pending),
    "preempt_again": _left("preempt", lambda case, gone: gone.before),
    "resume": _rows(_resumes),
    "resume_same_step": _rows(lambda seen: _resumes(seen) and seen.preempted_in == seen.step),
    "resume_later": _rows(lambda seen: _resumes(seen) and seen.preempted_in != seen.step),
    "resume_same_slot": _rows(lambda seen: _resumes(seen) and seen.last_slot == seen.row.slot),
    "resume_other_slot": _rows(lambda seen: _resumes(seen) and seen.last_slot != seen.row.slot),
    "resume_chunked": _rows(
        lambda seen: seen.resumed and seen.row.admission is None and seen.row.kind in (PREFILL, LEFTOVER)
    ),
    "resume_one_token_tail": _rows(lambda seen: seen.resumed and seen.row.kind == LEFTOVER),
    "resume_off_phase": _resume_off_phase,
    "abort": _left("abort"),
    "abort_mid_ring": _left("abort", lambda case, gone: gone.pending),
    "abort_preempted": _left("abort", lambda case, gone: not gone.slot),
    "finish_mid_ring": _left("finish", lambda case, gone: gone.pending),
    "recycled_slot": _rows(_recycles),
    "slot_reuse_same_step": _slot_reuse_same_step,
    "one_token_prompt_on_recycled_slot": _rows(lambda seen: _one_token_prompt(seen) and _recycles(seen)),
    "mixed_step": _steps(lambda step: len({row.runs_as_decode for row in step.rows}) == 2),
    "tail_beside_decode": _steps(lambda step: {row.kind for row in step.rows} >= {LEFTOVER, DECODE}),
    "skipped_request": _skipped,
    "unlike_ring_phases": _unlike_phases,
    "slots_unlike_rows": _steps(_slots_unlike_rows),
    "batch_order_flip": _order_flips,
    "full_graph_step": _steps(lambda step: step.padded_to is not None),
    "padded_step": _steps(lambda step: step.padded_to is not None and step.padded_to > len(step.rows)),
    "padding_filled": _graph_change(lambda before, step: len(before.rows) < len(step.rows)),
    "row_becomes_padding": _graph_change(lambda before, step: len(before.rows) > len(step.rows)),
    "same_count_other_slots": _graph_change(_other_slots),
    "block_crossing": _rows(lambda seen: seen.row.copy_from is not None and seen.row.admission is None),
    "decode_block_crossing": _rows(
        lambda seen: _decodes(seen) and seen.row.copy_from is not None and seen.row.admission is None
    ),
    "prefill_ends_mid_block": _ends_prefill_inside,
    "prefix_hit": _rows(lambda seen: seen.row.admission == "first" and seen.row.num_computed),
    "resume_hit": _rows(lambda seen: _resumes(seen) and seen.row.num_computed),
    "hit_on_decoded_block": _rows(lambda seen: seen.decoded_hit),
}
