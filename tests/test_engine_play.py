"""The real engine plays Cases as written: one engine in a child process, shared by this file.

Each test writes a small timeline, plays it, and compares the rows that the scheduler and the plugin's metadata report
with what the Case says, and log-probabilities with the sequential oracle. Then the engine is made to fail: a Case that
cannot be played, a time limit it cannot keep, a kill in the middle of a Case. Each must come back as a failure, and
the Case after it must give the very same bits as before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_parity.cases.case import Cache, Case, Inputs, Replay, Request, Step
from replay_parity.cases.geometry import ENGINE
from replay_parity.harness.checkpoint import VOCAB_SIZE, tiny_checkpoint
from replay_parity.harness.engine_process import EngineFailure, EngineProcess
from replay_parity.harness.engine_trace import EngineConfig, EngineTrace
from replay_parity.oracles.qwen3_5 import Qwen3_5Oracle

pytestmark = pytest.mark.engine

BUFFER_LEN = 4
NO_CACHE, ALIGN = Cache(), Cache("align", 32)
# float32 engine against float32 oracle, 58 distributions of the five cases: at most 1.3e-5; a lost state costs nats
LOG_PROB_LIMIT = 1e-4


def _step(*rows: tuple[int, int], preempt: tuple[int, ...] = (), abort: tuple[int, ...] = ()) -> Step:
    return Step(rows, preempt, abort)


def _case(name: str, requests: list[tuple[int, ...]], *steps: Step, cache: Cache = NO_CACHE) -> Case:
    asked = tuple(Request(*request) for request in requests)
    return Case(name, ENGINE, Replay(BUFFER_LEN), cache, None, Inputs(), asked, steps)


def _tokens(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    draws = np.random.default_rng(len(case.id))
    lists = [draws.integers(0, VOCAB_SIZE, (r.prompt_len + r.output_len,)).tolist() for r in case.requests]
    for tokens, request in zip(lists, case.requests, strict=True):
        if request.shared_prefix_of is not None:
            tokens[: request.shared_prefix_len] = lists[request.shared_prefix_of][: request.shared_prefix_len]
    lengths = [request.prompt_len for request in case.requests]
    return (
        [tokens[:n] for tokens, n in zip(lists, lengths, strict=True)],
        [tokens[n:] for tokens, n in zip(lists, lengths, strict=True)],
    )


# a one-token tail (tokens 0 to 7, then 8), then a flush after four decodes
TAIL = _case("tail", [(9, 6)], _step((0, 8)), *[_step((0, 1))] * 6)
# both are decoding when request 0 leaves, and request 1 goes on alone for two steps
PREEMPTION = _case(
    "preemption",
    [(5, 7), (6, 8)],
    _step((0, 5), (1, 6)),
    *[_step((0, 1), (1, 1))] * 2,
    _step((1, 1), preempt=(0,)),
    _step((1, 1)),
    # 5 prompt tokens and the 3 generated ones, in two chunks
    _step((1, 1), (0, 6)),
    _step((0, 2), (1, 1)),
    _step((0, 1), (1, 1)),
    *[_step((0, 1))] * 2,
)
# request 1 stops with a half-full ring; request 2 comes after it
ABORT = _case(
    "abort",
    [(4, 6), (5, 6), (7, 3)],
    _step((0, 4), (1, 5)),
    *[_step((0, 1), (1, 1))] * 2,
    _step((0, 1), (2, 7), abort=(1,)),
    *[_step((0, 1), (2, 1))] * 2,
)
SKIP = _case(
    "skip",
    [(4, 5), (4, 5)],
    _step((0, 4), (1, 4)),
    _step((0, 1)),
    _step((0, 1)),
    _step((1, 1)),
    *[_step((0, 1), (1, 1))] * 2,
    _step((1, 1)),
)
FLIP = _case(
    "flip",
    [(4, 5), (4, 5), (4, 5)],
    _step((2, 4), (0, 4), (1, 4)),
    _step((0, 1), (1, 1), (2, 1)),
    _step((2, 1), (1, 1), (0, 1)),
    _step((1, 1), (2, 1), (0, 1)),
    _step((0, 1), (2, 1), (1, 1)),
)
# request 0 fills two blocks of 32; request 1 shares 70 of its tokens and finds the first 64 computed; request 0 leaves
# and comes back to the 64, then crosses a third boundary while it decodes
PREFIX = _case(
    "prefix",
    [(90, 10), (72, 3, 0, 70)],
    _step((0, 64)),
    _step((0, 26)),
    *[_step((0, 1))] * 2,
    _step((0, 1), (1, 8)),
    _step((1, 1), (0, 29), preempt=(0,)),
    _step((0, 1), (1, 1)),
    *[_step((0, 1))] * 4,
    cache=ALIGN,
)
# the last prompt token alone in the second block
ALIGNED_TAIL = _case("aligned-tail", [(33, 6)], _step((0, 32)), *[_step((0, 1))] * 6, cache=ALIGN)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """One engine for the file; failures that need a fresh child open it again."""
    config = EngineConfig(tiny_checkpoint(ENGINE), buffer_len=BUFFER_LEN, max_num_batched_tokens=64)
    with EngineProcess(config, start_timeout=300, case_timeout=120) as process:
        yield process


@pytest.fixture(scope="module")
def oracle() -> Qwen3_5Oracle:
    return Qwen3_5Oracle.load(tiny_checkpoint(ENGINE))


def _play(engine: EngineProcess, case: Case) -> EngineTrace:
    played = engine.play(case, *_tokens(case))
    assert isinstance(played, EngineTrace), f"{played}"
    return played


def _rows(trace: EngineTrace, step: int) -> list[tuple[int, int]]:
    return [
        (int(request), int(tokens))
        for at, request, tokens in zip(trace.rows.step, trace.rows.request, trace.rows.num_tokens, strict=True)
        if at == step
    ]


@pytest.mark.parametrize("case", [TAIL, PREEMPTION, ABORT, SKIP, FLIP], ids=lambda case: case.id)
def test_plays_as_written_and_agrees_with_the_oracle(engine: EngineProcess, oracle: Qwen3_5Oracle, case: Case) -> None:
    _check(_play(engine, case), case, oracle)


def _check(trace: EngineTrace, case: Case, oracle: Qwen3_5Oracle) -> None:
    prompts, forced = _tokens(case)
    for index, step in enumerate(case.steps):
        # V2 puts shorter rows first; among equals the Case's order stands
        assert _rows(trace, index) == sorted(step.rows, key=lambda row: row[1])
    assert trace.counts["replay_rows"] > 0
    for request in range(len(case.requests)):
        mine = trace.request == request
        known = prompts[request] + forced[request]
        assert trace.token[mine].tolist() == forced[request][: mine.sum()]
        assert trace.position[mine].tolist() == [len(prompts[request]) - 1 + i for i in range(mine.sum())]
        right = oracle.log_probs(known[:-1])[trace.position[mine]].numpy()
        assert np.abs(trace.log_probs[mine] - right).max() <= LOG_PROB_LIMIT
        assert (trace.argmax[mine] == right.argmax(-1)).all()


def test_one_token_tail_is_a_leftover(engine: EngineProcess) -> None:
    rows = _play(engine, TAIL).rows
    assert rows.num_computed.tolist() == [0, 8, 9, 10, 11, 12, 13]
    assert set(rows.prefill_len.tolist()) == set(rows.decode_base.tolist()) == {9}
    assert rows.ran_as_decode.tolist() == [0, 1, 1, 1, 1, 1, 1]
    # the tail flushes at once; the four decodes after it fill the ring
    assert rows.write_pos.tolist()[1:] == [0, 0, 1, 2, 3, 0]
    assert rows.is_flush.tolist()[1:] == [1, 0, 0, 0, 1, 0]


def test_resume_hands_generated_tokens_to_prefill(engine: EngineProcess) -> None:
    rows = _play(engine, PREEMPTION).rows
    mine = rows.request == 0
    assert rows.step[mine].tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert rows.num_computed[mine].tolist() == [0, 5, 6, 0, 6, 8, 9, 10]
    assert rows.prefill_len[mine].tolist() == [5, 5, 5, 8, 8, 8, 8, 8]
    assert rows.decode_base[mine].tolist() == [5, 5, 5, 8, 8, 8, 8, 8]
    # the other one is not disturbed
    assert rows.num_computed[~mine].tolist() == [0, 6, 7, 8, 9, 10, 11, 12]


def test_an_aborted_request_samples_no_more(engine: EngineProcess) -> None:
    trace = _play(engine, ABORT)
    assert trace.step[trace.request == 1].tolist() == [0, 1, 2]
    assert trace.step[trace.request == 2].tolist() == [3, 4, 5]


def test_a_case_does_not_depend_on_earlier_ones(engine: EngineProcess) -> None:
    first = _play(engine, PREEMPTION)
    for case in (ABORT, TAIL):
        _play(engine, case)
    again = _play(engine, PREEMPTION)
    assert np.array_equal(first.log_probs, again.log_probs)
    for column in ("step", "request", "num_tokens", "num_computed", "write_pos", "is_flush"):
        assert np.array_equal(getattr(first.rows, column), getattr(again.rows, column))
    assert first.counts == again.counts


def test_align_mode_continues_from_cached_blocks(engine: EngineProcess, oracle: Qwen3_5Oracle) -> None:
    config = replace(engine.config, cache_mode="align", block_size=32)
    with EngineProcess(config, start_timeout=300, case_timeout=120) as aligned:
        first = _play(aligned, PREFIX)
        _check(first, PREFIX, oracle)
        zero = first.rows.request == 0
        assert first.rows.num_computed[zero].tolist() == [0, 64, 90, 91, 92, 64, 93, 94, 95, 96, 97]
        assert first.rows.num_computed[~zero].tolist() == [64, 72, 73]
        tail = _play(aligned, ALIGNED_TAIL)
        _check(tail, ALIGNED_TAIL, oracle)
        assert tail.rows.is_flush.tolist()[:2] == [0, 1]
        # nothing of the first time is found in the cache
        again = _play(aligned, ALIGNED_TAIL)
        assert np.array_equal(tail.rows.num_computed, again.rows.num_computed)
        assert np.array_equal(tail.log_probs, again.log_probs)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (_case("too-much", [(4, 2)], _step((0, 5))), "step 0, request 0: wanted 5 tokens, got 4"),
        (
            _case("too-many", [(80, 1)], _step((0, 70)), _step((0, 10))),
            "step 0, request 0: wanted 70 tokens, got 64",
        ),
        (
            _case("not-running", [(4, 2), (4, 2)], _step((0, 4)), _step((0, 1), preempt=(1,))),
            "step 1, request 1: wanted a running request to preempt",
        ),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else "",
)
def test_what_cannot_be_played_is_refused(engine: EngineProcess, case: Case, why: str) -> None:
    before = engine.pid
    failure = engine.play(case, *_tokens(case))
    assert isinstance(failure, EngineFailure)
    assert (failure.symptom, failure.stage) == ("exception", "play")
    assert failure.message.startswith(f"DirectionError: {why}")
    # the engine stays open and is clean
    _play(engine, TAIL)
    assert before is None or engine.pid == before


def test_tokens_that_do_not_fit_are_refused(engine: EngineProcess) -> None:
    prompts, forced = _tokens(TAIL)
    failure = engine.play(TAIL, [prompts[0][:-1]], forced)
    assert isinstance(failure, EngineFailure)
    assert failure.message == "TokensError: prompts[0]: must hold prompt_len = 9 tokens, not 8"


def test_a_hang_and_a_crash_come_back_and_the_next_case_works(engine: EngineProcess) -> None:
    before = _play(engine, TAIL)
    engine.case_timeout = 0.01
    failure = engine.play(TAIL, *_tokens(TAIL))
    engine.case_timeout = 120
    assert isinstance(failure, EngineFailure)
    assert (failure.symptom, failure.stage) == ("timeout", "play")
    assert engine.pid is None

    # a fresh child, killed while it plays
    assert engine.start() is None
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    failure = engine.play(TAIL, *_tokens(TAIL))
    killer.join()
    assert isinstance(failure, EngineFailure)
    assert (failure.symptom, failure.stage) == ("crash", "play")
    assert "SIGKILL" in failure.message

    after = _play(engine, TAIL)
    assert np.array_equal(before.log_probs, after.log_probs)


def test_a_start_that_fails_is_told(engine: EngineProcess) -> None:
    with EngineProcess(engine.config, start_timeout=0.01) as process:
        failure = process.start()
        assert failure is not None
        assert (failure.symptom, failure.stage) == ("timeout", "start")
    with EngineProcess(engine.config, fault="no.such") as process:
        failure = process.start()
        assert failure is not None
        assert (failure.symptom, failure.stage) == ("exception", "start")
        assert "no.such" in failure.message and "FaultError" in failure.log
    missing = replace(engine.config, checkpoint=Path("nowhere"))
    with EngineProcess(missing) as process:
        failure = process.start()
        assert failure is not None
        assert (failure.symptom, failure.stage) == ("exception", "start")
        assert "nowhere" in failure.message
