"""Hypothesis strategies: every drawn Case is legal, nothing is filtered, and a failure shrinks to a short timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.strategies import DrawFn, SearchStrategy

from .blocks import STATE_BLOCKS
from .case import DTYPES, REGIMES, Cache, Case, Graphs, Inputs, Replay, Request
from .geometry import ENGINE, ENGINE_BLOCK, Geometry
from .script import CUTS, EVENTS, JOINS, Turn, write_steps
from .split import Split, split_as_vllm, split_in_last_block

T = TypeVar("T")

# for hypothesis.settings(backend=...): see FreshDraws
BACKEND = "replay_parity_fresh"

LEVELS = ("kernel", "schedule", "engine")

# in each list the plainest value comes first, because shrinking goes there; one that stands twice is drawn twice as
# often
BUFFER_LENS = {
    # each length is an engine of its own
    "engine": (2, 3, 4, 16, 3, 4, 16, 1),
    "layer": (1, 2, 3, 4, 5, 8, 16, 32, 2, 3, 3, 4, 4, 4, 5, 8, 8, 16),
}
BLOCK_SIZES = (2, 3, 4, 5, 6, 8)
CAPTURE_SIZES = ((1, 2, 4), (2,), (3,), (4,), (2, 4), (1, 2, 4, 8), (4, 8))
# each set is an engine of its own; here one row, three and five to seven get padded ones
ENGINE_CAPTURE_SIZES = (2, 4, 8)
# of 10 blocks two requests that grow past one get too few
ENGINE_CACHES = (Cache(), Cache(), Cache("align", ENGINE_BLOCK), Cache("none", ENGINE_BLOCK, 10))
FEW_BLOCK_SIZES = (4, 8)
# preemptions are frequent: most faults of a cursor or a slot need one, at a ring phase of their own
FREQUENT_EVENTS = (*EVENTS, "none", "readmit", "readmit", "preempt", "preempt", "finish")
FREQUENT_JOINS = (*JOINS, "none", "new", "new", "resume")
ORDERS = (0, 1, 2, 3, 0, 0)
NUM_REQUESTS = {"engine": (1, 2, 3, 4, 2, 3, 4, 6, 8), "layer": (1, 2, 3, 4, 2, 3, 3, 4, 5, 6, 8)}
LONGEST_PROMPT = {"engine": 24, "layer": 12}
MOST_TURNS = 10
# of steps that turns may take; a timeline has one or two more at its end
MOST_STEPS = 25
# a ring of 32 entries is full after as many decodes
MOST_STEPS_LONG_RING = 36
# decode steps of a long run, with the prefill in front of them
LONG_RUN = (260, 300)
# one engine case in so many has a run of four ring cycles
CYCLES, CYCLES_SHARE = 4, 8

FLOAT32 = ("float32", "float32", "float32")


def cases(level: str = "schedule", regimes: Sequence[str] = ("model_like",)) -> SearchStrategy[Case]:
    """Cases that a level can play, about 10 to 30 steps long, in one of ``regimes``. Raises ValueError for a level."""
    _check_level(level)
    return _cases(level, tuple(regimes))


def long_cases(level: str = "schedule", regimes: Sequence[str] = ("model_like",)) -> SearchStrategy[Case]:
    """Cases of one or two requests, one of which decodes at least 256 tokens on end: what drifts shows there."""
    _check_level(level)
    return _long_cases(level, tuple(regimes))


def allowed_dtypes(regime: str) -> tuple[tuple[str, str, str], ...]:
    """(ring, state, activation) dtypes that a regime can be judged in, float32 alone first: all of them in each."""
    if regime not in REGIMES:
        raise ValueError(f"regime: must be one of {', '.join(REGIMES)}, not {regime!r}")
    return tuple((ring, state, activation) for ring in DTYPES for state in DTYPES for activation in DTYPES)


# strategies are built once, not once a draw: that would cost more than the draw
@cache
def geometries(level: str, regime: str) -> SearchStrategy[Geometry]:
    """Layer shapes. The exact regime has exact output bits where K is a power of four, integers elsewhere."""
    if level == "engine":
        return st.just(ENGINE)
    key_dims = (4, 16, 64, 16, 16, 12) if regime == "exact" else (4, 16, 8, 12, 20, 64, 16)
    return st.builds(
        lambda key_heads, group, key_dim, value_dim: Geometry(key_heads, key_heads * group, key_dim, value_dim, 4),
        st.sampled_from((1, 2, 3)),
        st.sampled_from((1, 2, 3)),
        st.sampled_from(key_dims),
        st.sampled_from((4, 16, 8, 5, 20)),
    )


@cache
def replays(level: str, regime: str) -> SearchStrategy[Replay]:
    """Ring length and dtypes, float32 in every second Case at least."""
    dtypes = (FLOAT32,) if level == "engine" else allowed_dtypes(regime)
    return st.builds(
        lambda buffer_len, kinds: Replay(buffer_len, *kinds),
        st.sampled_from(BUFFER_LENS[_kind(level)]),
        st.sampled_from(dtypes + (FLOAT32,) * (len(dtypes) - 2)),
    )


@cache
def caches(level: str) -> SearchStrategy[Cache]:
    """No prefix caching, "align" with small blocks in a third of the Cases, few blocks in a sixth."""
    if level == "engine":
        return st.sampled_from(ENGINE_CACHES)
    plain = st.just(Cache())
    aligned = st.builds(Cache, st.just("align"), st.sampled_from(BLOCK_SIZES))
    few = st.builds(_few_blocks, st.sampled_from(FEW_BLOCK_SIZES))
    return _evenly(plain, aligned, plain, aligned, plain, few)


@cache
def graph_sizes(level: str) -> SearchStrategy[Graphs | None]:
    """FULL graphs of some sizes, or none."""
    if level == "engine":
        return st.sampled_from((None, Graphs(ENGINE_CAPTURE_SIZES)))
    return st.one_of(st.none(), st.builds(Graphs, st.sampled_from(CAPTURE_SIZES)))


@cache
def regime_inputs(regimes: tuple[str, ...]) -> SearchStrategy[Inputs]:
    """A regime and a seed; even seeds poison with NaN, odd ones leave stale data."""
    return st.builds(Inputs, st.sampled_from(regimes), st.integers(0, 2**16))


@cache
@st.composite
def request_sets(draw: DrawFn, level: str, cache: Cache) -> tuple[Request, ...]:
    """Requests, with prompts around block boundaries where they matter; in "align" mode most share a prefix."""
    count = draw(_REQUEST_COUNTS[_kind(level)])
    if cache.num_blocks is not None and level == "engine":
        return tuple(Request(draw(_nearly_full(cache.block_size)), 1) for _ in range(count))
    if cache.mode == "none":
        lengths = _PROMPT_LENS[_kind(level)]
        return tuple(Request(draw(lengths), 1) for _ in range(count))
    requests: list[Request] = []
    for _ in range(count):
        prompt_len = draw(_block_lengths(cache.block_size))
        requests.append(_sharing(draw, Request(prompt_len, 1), requests, cache.block_size))
    return tuple(requests)


@cache
def plans(buffer_len: int) -> SearchStrategy[tuple[Turn, ...]]:
    """Turns for script.write_steps. Their number is drawn first: a list that may stop at each turn is mostly short.

    Every turn takes the same number of choices: taking one away, or a request, leaves all others as they are, and that
    is what shrinking tries.
    """
    around_flush = {max(buffer_len - 1, 1), buffer_len, buffer_len + 1}
    turn = st.builds(
        Turn,
        event=st.sampled_from(FREQUENT_EVENTS),
        who=st.integers(0, 3),
        join=st.sampled_from(FREQUENT_JOINS),
        cut=st.sampled_from(CUTS),
        order=st.sampled_from(ORDERS),
        steps=st.sampled_from((*sorted({1, 2, 3} | around_flush), 1, 1, 2)),
    )
    lengths = [st.tuples(*[turn] * count) for count in range(MOST_TURNS + 1)]
    return st.integers(1, MOST_TURNS).flatmap(lengths.__getitem__)


def _evenly(*sources: SearchStrategy[T]) -> SearchStrategy[T]:
    """One of ``sources``, of which one that stands twice is drawn twice as often; st.one_of would count it once."""
    return st.sampled_from(range(len(sources))).flatmap(sources.__getitem__)


_REQUEST_COUNTS = {kind: st.sampled_from(counts) for kind, counts in NUM_REQUESTS.items()}
_PROMPT_LENS = {kind: st.integers(1, longest) for kind, longest in LONGEST_PROMPT.items()}
# over several blocks of attention, in one prompt of three
_PROMPT_LENS["engine"] = _evenly(*[_PROMPT_LENS["engine"]] * 2, st.sampled_from((31, 32, 33, 63, 64, 65, 97)))


@st.composite
def _cases(draw: DrawFn, level: str, regimes: tuple[str, ...]) -> Case:
    template = draw(_templates(level, regimes))
    plan = draw(plans(template.replay.buffer_len))
    if level == "engine" and draw(st.integers(1, CYCLES_SHARE)) == CYCLES_SHARE:
        run = Turn(steps=CYCLES * template.replay.buffer_len + 1)
        return _with_run(template, plan, run, draw(st.integers(0, 2)), level)
    return write_steps(template, plan, _most_steps(template), _split(level))


@st.composite
def _long_cases(draw: DrawFn, level: str, regimes: tuple[str, ...]) -> Case:
    template = draw(_templates(level, regimes))
    template = replace(template, requests=template.requests[:2])
    if template.cache.num_blocks is not None:
        # a long run would outgrow them
        template = replace(template, cache=Cache())
    plan = draw(plans(template.replay.buffer_len))
    return _with_run(template, plan, Turn(steps=draw(st.integers(*LONG_RUN))), draw(st.integers(0, 2)), level)


def _with_run(template: Case, plan: tuple[Turn, ...], run: Turn, place: int, level: str) -> Case:
    """The plan with a run of plain steps behind its first ``place`` turns, none of which ends a request."""
    before = tuple(replace(turn, event="none") if turn.event in ("finish", "abort") else turn for turn in plan[:place])
    most_steps = sum(turn.steps for turn in before) + run.steps + MOST_STEPS
    return write_steps(template, (*before, run, *plan[place:]), most_steps, _split(level))


def _split(level: str) -> Split:
    return split_as_vllm if level == "engine" else split_in_last_block


@st.composite
def _templates(draw: DrawFn, level: str, regimes: tuple[str, ...]) -> Case:
    """Everything but the schedule."""
    inputs = draw(regime_inputs(regimes))
    cache = draw(caches(level))
    return Case(
        id="generated",
        geometry=draw(geometries(level, inputs.regime)),
        replay=draw(replays(level, inputs.regime)),
        cache=cache,
        graphs=draw(graph_sizes(level)),
        inputs=inputs,
        requests=draw(request_sets(level, cache)),
        steps=(),
    )


def _kind(level: str) -> str:
    return "engine" if level == "engine" else "layer"


def _check_level(level: str) -> None:
    if level not in LEVELS:
        raise ValueError(f"level: must be one of {', '.join(LEVELS)}, not {level!r}")


def _most_steps(case: Case) -> int:
    return MOST_STEPS if case.replay.buffer_len < MOST_STEPS else MOST_STEPS_LONG_RING


def _few_blocks(block_size: int) -> Cache:
    """As many blocks as one request of the layer levels may come to need: several have to share them."""
    longest = LONGEST_PROMPT["layer"] + MOST_STEPS_LONG_RING + 2
    return Cache("none", block_size, 1 + STATE_BLOCKS - (-longest // block_size))


@cache
def _nearly_full(block: int) -> SearchStrategy[int]:
    """Prompt lengths that soon need another block."""
    return st.sampled_from((block - 1, block, block - 2, block - 3, block - 1, block - 2, block - 5, 1, 2 * block - 2))


@cache
def _block_lengths(block: int) -> SearchStrategy[int]:
    """Prompt lengths around block boundaries."""
    return st.sampled_from((1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1, 3 * block + 1))


def _sharing(draw: DrawFn, request: Request, earlier: list[Request], block: int) -> Request:
    """The request, its first tokens those of an earlier one in most draws: all it can share, or one or a block less."""
    if not earlier:
        return request
    other = draw(st.sampled_from((None, *range(len(earlier)), len(earlier) - 1)))
    if other is None:
        return request
    longest = min(request.prompt_len, earlier[other].prompt_len)
    less = draw(st.sampled_from((0, 1, block)))
    return replace(request, shared_prefix_of=other, shared_prefix_len=longest - less if longest > less else longest)


class FreshDraws(HypothesisProvider):
    """Every choice is uniform and every Case is drawn anew; a failure is shrunk as ever.

    Hypothesis itself draws one Case in six and makes the others from it, by copying parts of it into each other. Of 300
    such Cases 177 to 200 were distinct and showed 93 to 98 % of the pairs of situations (seeds 0 to 9); of 300 fresh
    ones all, and 98.9 to 100 %. What is lost is ``hypothesis.target``, which works on Hypothesis' own draws only.
    """

    def draw_integer(
        self,
        min_value: int | None = None,
        max_value: int | None = None,
        *,
        weights: dict[int, float] | None = None,
        shrink_towards: int = 0,
    ) -> int:
        """Uniform between the bounds, whatever ``weights`` favour; without bounds as Hypothesis draws."""
        if min_value is None or max_value is None or self._random is None:
            return super().draw_integer(min_value, max_value, weights=weights, shrink_towards=shrink_towards)
        return self._random.randint(min_value, max_value)


AVAILABLE_PROVIDERS[BACKEND] = f"{FreshDraws.__module__}.{FreshDraws.__qualname__}"
