"""How this tests, in plain words: who gets KV cache blocks, who gives way, and where a prefill chunk may end.

Blocks are first counted by hand: two requests that grow past a block where one block is left. Then random schedules are
written with few blocks, and the timeline, which counts for itself, must take each and refuse it as soon as one
preemption is dropped, added or comes a step early. Chunk ends are held against the installed vLLM's own scheduler, for
every chunk over every prefix of many requests; the engine's refusal of preemptions that do not come is in
tests/test_engine_blocks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from replay_parity.cases.blocks import Blocks
from replay_parity.cases.case import Cache, Case, CaseError, Step
from replay_parity.cases.scenarios import scenarios
from replay_parity.cases.split import may_end, next_split, split_as_vllm, split_in_last_block
from replay_parity.cases.timeline import play
from replay_parity.harness.explore import drawn_cases

BLOCK = 32


def test_blocks_by_hand() -> None:
    # nine beside the NULL block; three of state and one of attention each
    blocks = Blocks(10, BLOCK)
    assert blocks.admit(0, 31, 31) and blocks.admit(1, 30, 30) and blocks.free == 1
    assert not blocks.admit(2, 1, 1)
    assert blocks.schedule([(0, 32), (1, 31)]) == [] and blocks.free == 1
    assert blocks.schedule([(0, 33), (1, 32)]) == [] and blocks.free == 0
    # the last one asks itself, and gives way
    assert blocks.schedule([(0, 34), (1, 33)]) == [1] and blocks.free == 4
    blocks.release(0)
    assert blocks.free == 9


def test_the_last_one_gives_way_for_another() -> None:
    blocks = Blocks(10, BLOCK)
    assert blocks.admit(0, 32, 32) and blocks.admit(1, 32, 32)
    assert blocks.schedule([(1, 64), (0, 33)]) == [0]
    assert blocks.held == {1: 5} and blocks.free == 4


def test_all_known_tokens_must_fit_before_anybody_is_admitted() -> None:
    blocks = Blocks(10, BLOCK)
    assert not blocks.admit(0, 7 * BLOCK, BLOCK) and blocks.free == 9
    assert blocks.admit(0, 6 * BLOCK, BLOCK) and blocks.free == 5


def with_few_blocks() -> Iterator[Case]:
    for case in drawn_cases("schedule", ("model_like",), 11, 300):
        if case.cache.num_blocks is not None and any(step.preempt for step in case.steps):
            yield case


def test_a_timeline_takes_the_preemptions_that_blocks_ask_for_and_no_other() -> None:
    """Each step's preemptions are left out in turn: the step is refused by its path, whatever follows."""
    tried = 0
    for case in with_few_blocks():
        play(case)
        index = next(index for index, step in enumerate(case.steps) if step.preempt)
        step = case.steps[index]
        dropped = (*case.steps[:index], Step(step.rows), *case.steps[index + 1 :])
        with pytest.raises(CaseError) as refused:
            play(replace(case, steps=dropped))
        must = f"steps[{index}].preempt: must be {list(step.preempt)}, because {case.cache.num_blocks} blocks run out"
        assert str(refused.value).startswith(must)
        tried += 1
    assert tried > 6


@pytest.mark.parametrize(
    ("index", "step", "message"),
    [
        (2, Step(((0, 1),), (1,)), "steps[2].preempt: must be [], because 10 blocks are enough in this step, not [1]"),
        (3, Step(((0, 1), (1, 1))), "steps[3].preempt: must be [1], because 10 blocks run out in this step, not []"),
        (4, Step(((0, 1), (1, 33))), "steps[4].rows[1]: request 1 needs 5 blocks to be admitted, 4 are free"),
        (
            2,
            Step(((0, 1),)),
            "steps[2].rows: request 1 runs and has no row; where blocks are few it gets one or gives way",
        ),
        (
            3,
            Step(((0, 1), (1, 33)), (1,)),
            "steps[3].rows[1]: request 1 is not admitted in a step in which one gives way",
        ),
    ],
)
def test_steps_that_blocks_do_not_allow_are_named(index: int, step: Step, message: str) -> None:
    case = scenarios()["blocks-run-out"].case
    steps = (*case.steps[:index], step, *case.steps[index + 1 :])
    with pytest.raises(CaseError) as refused:
        play(replace(case, steps=steps))
    assert str(refused.value) == message


def test_with_blocks_enough_the_same_steps_are_forced_preemptions() -> None:
    case = scenarios()["blocks-run-out"].case
    play(replace(case, cache=Cache()))


@pytest.mark.parametrize("split", [split_as_vllm, split_in_last_block])
def test_what_a_split_grants_it_grants_again(split: object) -> None:
    """A chunk of a granted size is granted whole, some tokens always are, and chunks reach the end."""
    assert split in (split_as_vllm, split_in_last_block)
    chosen = split_as_vllm if split is split_as_vllm else split_in_last_block
    for block in (1, 2, 3, 5, 8):
        for known in range(1, 3 * block + 3):
            for prompt_len in {known, max(known - 1, 1), max(known - 3, 1)}:
                for asked in range(1, known + 1):
                    start = 0
                    while start < known:
                        granted = next_split(chosen, start, min(asked, known - start), prompt_len, known, block)
                        assert 0 < granted <= known - start
                        assert chosen(start, granted, prompt_len, known, block) == granted
                        assert may_end(start, start + granted, known, block)
                        start += granted


@pytest.mark.engine
def test_the_split_is_vllms() -> None:
    """Every chunk over every prefix, of prompts and of resumed requests, in blocks of several sizes."""
    from replay_parity.harness.cpu_platform import prepare

    prepare()
    from vllm.v1.core.sched.scheduler import Scheduler

    compared = cut = 0
    for block in (1, 4, 7, 32):
        scheduler = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=block),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=block,
            hash_block_size=block,
            max_num_scheduled_tokens=512,
            mamba_partial_cache_hit=False,
            mamba_shared_prefix_checkpoint=False,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            use_eagle_block_drop=False,
        )
        for known in range(1, 2 * block + 5):
            for prompt_len in {known, max(known - 1, 1), max(known - block - 1, 1)}:
                for start in range(known):
                    request = SimpleNamespace(
                        num_computed_tokens=start,
                        num_prompt_tokens=prompt_len,
                        num_tokens=known,
                        shared_prefix_boundary=0,
                    )
                    for asked in range(1, known - start + 1):
                        wanted = Scheduler._mamba_block_aligned_split(scheduler, request, asked)
                        assert split_as_vllm(start, asked, prompt_len, known, block) == wanted
                        compared += 1
                        cut += wanted != asked
    assert compared > 5000 and cut > 1000
