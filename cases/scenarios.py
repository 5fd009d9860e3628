"""Named cases, each with the sentence that says what it guards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .case import Cache, Case, Graphs, Inputs, Replay, Request, Step
from .geometry import ENGINE_BLOCK, TINY, Geometry


@dataclass(frozen=True)
class Scenario:
    """A named case and what it guards."""

    case: Case
    guards: str


def scenarios(geometry: Geometry = TINY) -> dict[str, Scenario]:
    """All named scenarios by name, in a fixed order, with the layer shapes of ``geometry``."""
    made = (scenario for make in _MAKERS for scenario in make(geometry))
    return {s.case.id: Scenario(replace(s.case, guards=s.guards), s.guards) for s in made}


def _build(
    name: str,
    geometry: Geometry,
    requests: list[tuple[int, ...]],
    steps: list[Step],
    *,
    buffer_len: int = 4,
    block: int | None = None,
    graphs: Graphs | None = None,
) -> Case:
    return Case(
        id=name,
        geometry=geometry,
        replay=Replay(buffer_len),
        cache=Cache() if block is None else Cache("align", block),
        graphs=graphs,
        inputs=Inputs("model_like", sum(map(ord, name))),
        requests=tuple(Request(*request) for request in requests),
        steps=tuple(steps),
    )


def _step(*rows: tuple[int, int], preempt: tuple[int, ...] = (), abort: tuple[int, ...] = ()) -> Step:
    return Step(rows, preempt, abort)


def _decodes(count: int, *requests: int) -> list[Step]:
    return [_step(*((request, 1) for request in requests)) for _ in range(count)]


def _flushes(geometry: Geometry) -> Iterator[Scenario]:
    yield Scenario(
        _build("plain-flush", geometry, [(6, 6)], [_step((0, 6)), *_decodes(5, 0)]),
        "L + 1 decodes: the ring fills, is folded into the checkpoint, and the next token starts an empty ring",
    )
    yield Scenario(
        _build("two-flushes", geometry, [(5, 11)], [_step((0, 5)), *_decodes(10, 0)]),
        "two ring cycles: the second flush folds the second cycle's entries, not the first one's",
    )
    yield Scenario(
        _build("four-ring-cycles", geometry, [(5, 15)], [_step((0, 5)), *_decodes(14, 0)], buffer_len=3),
        "four flushes and the start of a fifth cycle: what one fold gets slightly wrong adds up",
    )
    yield Scenario(
        _build("buffer-len-one", geometry, [(5, 6)], [_step((0, 5)), *_decodes(5, 0)], buffer_len=1),
        "L = 1 flushes at each step and equals packed decode",
    )
    yield Scenario(
        _build("buffer-len-sixteen", geometry, [(7, 19)], [_step((0, 7)), *_decodes(18, 0)], buffer_len=16),
        "the production ring length: sixteen entries, a flush, and the start of the next cycle",
    )


def _tails(geometry: Geometry) -> Iterator[Scenario]:
    yield Scenario(
        _build("one-token-tail", geometry, [(9, 6)], [_step((0, 8)), _step((0, 1)), *_decodes(5, 0)]),
        "the last prompt token alone runs as decode: it must be folded at once, not appended to the ring",
    )
    yield Scenario(
        _build("one-token-middle", geometry, [(7, 4)], [_step((0, 3)), _step((0, 1)), _step((0, 3)), *_decodes(3, 0)]),
        "a one-token chunk between two longer ones leaves an exact state for the prefill that follows",
    )
    steps = [_step((0, 5)), *_decodes(2, 0), _step((1, 1)), *_decodes(5, 1)]
    yield Scenario(
        _build("first-chunk-on-recycled-slot", geometry, [(5, 3), (1, 6)], steps),
        "a prompt of one token has no prior state, whatever its recycled slot still holds",
    )
    steps = [_step((0, 6)), *_decodes(2, 0), _step((0, 1), (1, 1)), *_decodes(4, 0, 1), *_decodes(2, 1)]
    yield Scenario(
        _build("first-token-joins-decodes", geometry, [(6, 8), (1, 7)], steps),
        "a one-token prompt that joins decoding rows stays a prefill",
    )
    steps = [_step((0, 5)), *_decodes(2, 0), _step((0, 1), (1, 8)), *_decodes(6, 0, 1)]
    yield Scenario(
        _build("tail-beside-decodes", geometry, [(5, 10), (9, 6)], steps),
        "one request's one-token tail flushes while its neighbour in the batch appends",
    )


def _resumes(geometry: Geometry) -> Iterator[Scenario]:
    buffer_len = 4
    for phase in range(buffer_len):
        decodes = buffer_len + phase
        known = 6 + decodes + 1
        steps = [_step((0, 6)), *_decodes(decodes, 0), _step((0, known), preempt=(0,)), *_decodes(buffer_len + 1, 0)]
        yield Scenario(
            _build(f"resume-at-phase-{phase}", geometry, [(6, known - 6 + buffer_len + 2)], steps),
            f"preempted with {phase} pending ring entries: after the resume the ring starts empty at the new base",
        )
    steps = [
        _step((0, 6)),
        *_decodes(3, 0),
        _step((1, 4), preempt=(0,)),
        *_decodes(2, 1),
        _step((1, 1), (0, 7)),
        _step((1, 1), (0, 3)),
        *_decodes(3, 0, 1),
        *_decodes(2, 0),
    ]
    yield Scenario(
        _build("resume-into-another-slot", geometry, [(6, 10), (4, 8)], steps),
        "the resumed request finds its slot taken and goes on in another one, prefilled in two chunks",
    )
    steps = [
        _step((0, 6)),
        *_decodes(3, 0),
        _step((0, 9), preempt=(0,)),
        _step((0, 1)),
        *_decodes(5, 0),
    ]
    yield Scenario(
        _build("resume-with-one-token-tail", geometry, [(6, 10)], steps),
        "a resumed prefill whose last chunk is one token: base counts prompt and generated tokens",
    )


def _batches(geometry: Geometry) -> Iterator[Scenario]:
    steps = [_step((0, 3)), _step((0, 1), (1, 9))]
    steps += [_step(*([(0, 1), (1, 1)] if turn % 2 else [(1, 1), (0, 1)])) for turn in range(7)]
    yield Scenario(
        _build("batch-order-flips", geometry, [(3, 9), (9, 8)], steps),
        "two prompts of unlike length swap rows: each row's base is taken in batch order",
    )
    steps = [_step((0, 5)), *_decodes(2, 0), _step((1, 4)), *_decodes(6, 1)]
    yield Scenario(
        _build("slot-reuse-mid-ring", geometry, [(5, 3), (4, 7)], steps),
        "a request ends with entries pending; the next tenant of its slot starts an empty ring",
    )
    steps = [_step((0, 5)), *_decodes(3, 0), _step((0, 1), (1, 4)), _step((0, 1), (1, 4)), *_decodes(4, 0, 1)]
    yield Scenario(
        _build("mixed-prefill-and-decode", geometry, [(5, 10), (8, 5)], steps),
        "decode rows keep their ring position while another request prefills in the same step",
    )
    steps = [_step((0, 4), (1, 6)), *_decodes(3, 0, 1), _step((0, 1), (2, 3), abort=(1,)), *_decodes(4, 0, 2)]
    yield Scenario(
        _build("abort-mid-ring", geometry, [(4, 9), (6, 9), (3, 5)], steps),
        "an aborted request leaves pending entries behind; the newcomer in its slot must not see them",
    )


def _paddings(geometry: Geometry) -> Iterator[Scenario]:
    steps = [_step((0, 4), (1, 5), (2, 3)), *_decodes(6, 0, 1, 2)]
    yield Scenario(
        _build("padded-step", geometry, [(4, 7), (5, 7), (3, 7)], steps, graphs=Graphs((1, 2, 4))),
        "three rows in a graph of four: the padded row writes nothing and gives zeros",
    )


def _dtypes(geometry: Geometry) -> Iterator[Scenario]:
    steps = [_step((0, 5)), *_decodes(18, 0)]
    plain = _build("float16-ring", geometry, [(5, 19)], steps, buffer_len=8)
    yield Scenario(
        replace(plain, replay=Replay(8, ring_dtype="float16")),
        "a float16 ring under float32: only what is stored is rounded, the token at hand is used as it is",
    )
    plain = _build("production-dtypes", geometry, [(5, 19)], steps, buffer_len=16)
    yield Scenario(
        replace(plain, replay=Replay(16, ring_dtype="float16", activation_dtype="bfloat16")),
        "bfloat16 activations over a float16 ring and a float32 state: what serves in production",
    )


def _waits(geometry: Geometry) -> Iterator[Scenario]:
    steps = [_step((0, 4)), *_decodes(2, 0), _step((0, 7), preempt=(0,)), _step((0, 1)), _step((0, 9), preempt=(0,))]
    yield Scenario(
        _build("preempted-twice", geometry, [(4, 9)], [*steps, *_decodes(3, 0)]),
        "the decode base moves with each resume, not with the first one only",
    )
    steps = [_step((0, 4), (1, 5)), *_decodes(2, 0, 1), _step((1, 1), preempt=(0,)), _step((1, 1), (2, 3), abort=(0,))]
    steps += [*_decodes(2, 1, 2), *_decodes(1, 2)]
    yield Scenario(
        _build("abort-while-waiting", geometry, [(4, 9), (5, 7), (3, 4)], steps),
        "a preempted request is aborted before it resumes; its slot goes to a newcomer",
    )
    steps = [_step((0, 4), (1, 5)), *_decodes(1, 0, 1), *_decodes(2, 0), *_decodes(1, 1), *_decodes(3, 0, 1)]
    yield Scenario(
        _build("request-without-a-row", geometry, [(4, 7), (5, 6)], steps),
        "a running request gets no row for some steps: its ring stands still while others move on",
    )


def _shortages(geometry: Geometry) -> Iterator[Scenario]:
    few = Cache("none", ENGINE_BLOCK, 10)
    steps = [_step((1, 30), (0, 31)), *_decodes(2, 0, 1), _step((0, 1), preempt=(1,)), *_decodes(4, 0)]
    case = _build("blocks-run-out", geometry, [(31, 8), (30, 8)], [*steps, _step((1, 33)), *_decodes(4, 1)])
    yield Scenario(
        replace(case, cache=few),
        "a request that outgrows its block finds none free and is preempted; it waits until the other has ended",
    )
    steps = [_step((1, 30), (0, 31)), *_decodes(2, 1, 0), _step((1, 1), preempt=(0,)), *_decodes(4, 1)]
    case = _build("blocks-run-out-for-another", geometry, [(31, 8), (30, 8)], [*steps, _step((0, 34)), *_decodes(4, 0)])
    yield Scenario(
        replace(case, cache=few),
        "a request that outgrows its block takes those of the last one in the batch, which is preempted mid-ring",
    )


def _graphs(geometry: Geometry) -> Iterator[Scenario]:
    steps = [_step((0, 4), (1, 5), (2, 3)), *_decodes(2, 0, 1, 2), _step((0, 1), (1, 1), (2, 1), (3, 6))]
    steps += [*_decodes(3, 0, 1, 2, 3), *_decodes(2, 1, 2, 3)]
    yield Scenario(
        _build("padding-comes-and-goes", geometry, [(4, 7), (5, 9), (3, 9), (6, 6)], steps, graphs=Graphs((1, 2, 4))),
        "3 of 4 rows, then 4 of 4, then 3 again: the padded row forgets what it held when it was live",
    )
    steps = [_step((0, 4), (1, 5)), *_decodes(3, 0, 1), _step((0, 1), (1, 1), (2, 3)), *_decodes(4, 1, 2)]
    yield Scenario(
        _build("same-count-other-slots", geometry, [(4, 5), (5, 9), (3, 5)], steps, graphs=Graphs((1, 2, 4))),
        "one request ends as another joins: as many decode rows as before, in other slots",
    )
    steps = [_step((0, 5)), *_decodes(2, 0), _step((0, 1), (1, 8)), *_decodes(3, 0, 1)]
    steps += [_step((0, 1), (1, 11), preempt=(1,)), *_decodes(5, 0, 1)]
    yield Scenario(
        _build("tail-and-resume-in-graphs", geometry, [(5, 13), (9, 8)], steps, graphs=Graphs((1, 2, 4))),
        "one-token tails, of a prompt and of a resume, flush inside a graph beside a row that appends",
    )


def _aligns(geometry: Geometry) -> Iterator[Scenario]:
    yield Scenario(
        _build(
            "align-forced-flush", geometry, [(6, 9)], [_step((0, 4)), _step((0, 2)), *_decodes(8, 0)],
            buffer_len=16, block=4,
        ),
        "each block boundary folds a ring that is not full: only the entries that are there",
    )  # fmt: skip
    yield Scenario(
        _build(
            "align-prefill-ends-mid-block", geometry, [(6, 8)], [_step((0, 4)), _step((0, 2)), *_decodes(7, 0)],
            buffer_len=3, block=4,
        ),
        "the ring starts where the prefill ended, not at the start of its block",
    )  # fmt: skip
    yield Scenario(
        _build("align-block-no-multiple", geometry, [(6, 15)], [_step((0, 6)), *_decodes(14, 0)], block=6),
        "blocks of 6 over a ring of 4: the ring is full inside a block and cut short at its end",
    )
    steps = [_step((0, 8)), _step((0, 1)), *_decodes(2, 0), _step((0, 1), (1, 2)), *_decodes(5, 0, 1)]
    yield Scenario(
        _build("align-prefix-hit", geometry, [(9, 9), (10, 6, 0, 9)], steps, block=4),
        "a newcomer starts from the cached state of two blocks that it shares with another prompt",
    )
    steps = [_step((0, 8)), _step((0, 1)), *_decodes(2, 0), _step((0, 1), (1, 1)), *_decodes(5, 0, 1)]
    yield Scenario(
        _build("align-hit-leaves-one-token", geometry, [(9, 9), (9, 6, 0, 8)], steps, block=4),
        "after a prefix hit one prompt token is left: it runs as decode and is folded at once",
    )
    steps = [_step((0, 3)), *_decodes(6, 0), _step((1, 2), preempt=(0,)), _step((1, 1), (0, 2)), *_decodes(6, 0, 1)]
    yield Scenario(
        _build("align-hit-on-decoded-block", geometry, [(3, 14), (2, 8)], steps, block=4),
        "decode across two boundaries, then a resume from the second: the state kept there must hold the whole block",
    )
    steps = [_step((0, 8)), *_decodes(2, 0), _step((1, 8)), _step((1, 1)), *_decodes(4, 1)]
    yield Scenario(
        _build("align-leaves-cached-state-alone", geometry, [(8, 3), (9, 5, 0, 7)], steps, buffer_len=3, block=8),
        "a prompt that shares less than a block gets no hit, and the cached slot of another stays out of use",
    )


_MAKERS: tuple[Callable[[Geometry], Iterator[Scenario]], ...] = (
    _flushes, _tails, _resumes, _batches, _paddings, _dtypes, _waits, _shortages, _graphs, _aligns,
)  # fmt: skip
