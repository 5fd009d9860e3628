"""Named cases of whole models: layer scenarios in the engine's blocks, a trained checkpoint, and serving loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .case import Cache, Case, Graphs, Inputs, Replay, Request, Step
from .geometry import ENGINE, ENGINE_BLOCK
from .scenarios import Scenario, scenarios

# scenarios that the trained checkpoint plays too: a wrong state shows in its text
TRAINED = ("resume-at-phase-2", "one-token-tail", "mixed-prefill-and-decode")
MOST_ROWS = 8
JOINING = 2


def engine_scenarios() -> dict[str, Scenario]:
    """All named cases of the engine level by name, in a fixed order."""
    named = scenarios(ENGINE)
    return named | {s.case.id: Scenario(replace(s.case, guards=s.guards), s.guards) for s in _more(named)}


def _more(named: dict[str, Scenario]) -> Iterator[Scenario]:
    yield from _in_blocks()
    for name in TRAINED:
        case = named[name].case
        trained = replace(case, id=f"trained-{name}", inputs=Inputs("trained", case.inputs.seed))
        yield Scenario(trained, f"{named[name].guards}; with a trained model's gates and peaked logits")
    yield Scenario(
        _load("two-prompts-32-tokens", [(13, 32), (9, 32)], graphs=Graphs((4,))),
        "the original work's own check: two prompts, 32 tokens each, L 16, graphs of 4 rows",
    )
    yield Scenario(_load("generation-c1", [(24, 40)]), "one client: a prompt, then two ring cycles and a half")
    yield Scenario(
        _load("generation-c8", [(8 + 3 * client, 20) for client in range(8)]),
        "eight clients: unlike prompts side by side, each with a ring position of its own",
    )
    mixed = [(1 + 7 * number % 24, 2 + number % 5) for number in range(32)]
    yield Scenario(
        _load("mixed-32-requests", mixed, buffer_len=4),
        "32 requests of unlike lengths through 8 places: newcomers prefill beside decodes, slots change hands",
    )


def _aligned(name: str, requests: tuple[Request, ...], steps: tuple[Step, ...]) -> Case:
    cache, inputs = Cache("align", ENGINE_BLOCK), Inputs("model_like", sum(map(ord, name)))
    return Case(name, ENGINE, Replay(4), cache, None, inputs, requests, steps)


def _in_blocks() -> Iterator[Scenario]:
    one, both = Step(((0, 1),)), Step(((0, 1), (1, 1)))
    steps = (Step(((0, 32),)), Step(((0, 30),)), *[one] * 6)
    yield Scenario(
        _aligned("align-decode-ends-block-of-32", (Request(62, 7),), steps),
        "a decode ends the second block of 32 and folds half a ring; the next one starts an empty ring in the third",
    )
    steps = (Step(((0, 32),)), *[one] * 2, Step(((0, 1), (1, 8))), *[both] * 3, one)
    yield Scenario(
        _aligned("align-prefix-hit-of-32", (Request(33, 7), Request(40, 4, 0, 33)), steps),
        "a newcomer starts from the cached state of the block of 32 that it shares with another prompt",
    )
    steps = (Step(((0, 30),)), *[one] * 4, Step(((1, 5),), preempt=(0,)), Step(((1, 1), (0, 3))), *[both] * 5)
    yield Scenario(
        _aligned("align-hit-on-decoded-block-of-32", (Request(30, 11), Request(5, 7)), steps),
        "a resume from the state that decodes, not a prefill, left at the end of a block of 32",
    )


def _load(name: str, requests: list[tuple[int, int]], *, buffer_len: int = 16, graphs: Graphs | None = None) -> Case:
    """Requests (prompt_len, output_len) served in order, at most 8 at a time, two of them admitted in a step."""
    waiting, running = list(range(len(requests))), dict[int, int]()
    steps = []
    while waiting or running:
        decodes = [(request, 1) for request in running]
        joining = waiting[: min(JOINING, MOST_ROWS - len(running))]
        del waiting[: len(joining)]
        # Model Runner V2 puts the shorter chunk first
        prefills = sorted(((request, requests[request][0]) for request in joining), key=lambda row: row[1])
        steps.append(Step((*decodes, *prefills)))
        running = {request: left - 1 for request, left in running.items() if left > 1}
        # the prefill samples the first token, the last one is never computed
        running |= {request: requests[request][1] - 1 for request, _ in prefills if requests[request][1] > 1}
    return Case(
        id=name,
        geometry=ENGINE,
        replay=Replay(buffer_len),
        cache=Cache(),
        graphs=graphs,
        inputs=Inputs("trained", sum(map(ord, name))),
        requests=tuple(Request(*request) for request in requests),
        steps=tuple(steps),
    )
