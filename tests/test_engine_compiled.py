"""How this tests, in plain words: real engines whose model vLLM compiles, judged like any other.

The original work's own check ran compiled, in graphs of 4 rows; so do all Cases here, in one engine and its baseline,
which is eager. That they pass is half of it: a planted fault must fail the same Case, and nothing that one engine
compiles may reach another one or stay behind. So the engines here come from a nursery whose environment names caches of
this test, and those must stay empty.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from replay_parity.cases.case import Case, Graphs, Replay
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.harness import engine_pool
from replay_parity.harness.cpu_platform import has_cuda
from replay_parity.harness.engine_children import ForkedChild, Nursery, SpawnedChild
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.engine_process import EngineProcess
from replay_parity.harness.engine_trace import EngineConfig
from replay_parity.harness.execution import why_not_compiled
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.paths import open_path
from replay_parity.harness.record import Record
from replay_parity.harness.trained import trained_checkpoint

COMPILES = why_not_compiled()
pytestmark = [pytest.mark.engine, pytest.mark.skipif(COMPILES is not None, reason=str(COMPILES))]

# float32 engine against float64 oracle, as in tests/test_engine_path.py
LOG_PROB_LIMIT = 1e-4
CASES = {name: scenario.case for name, scenario in engine_scenarios().items()}
GRAPHS = Graphs((4,))
# vLLM makes DYNAMO_TRACE_ONCE of mode 3 on a CPU
MODE = "VLLM_COMPILE" if has_cuda() else "DYNAMO_TRACE_ONCE"


def _resumed() -> Case:
    """A preempted request that comes back, in the engine of the original check."""
    return replace(CASES["trained-resume-at-phase-2"], replay=Replay(16), graphs=GRAPHS)


PLAYED = {
    "two-prompts-32-tokens": CASES["two-prompts-32-tokens"],
    "generation-c1": replace(CASES["generation-c1"], graphs=GRAPHS),
    "resumed": _resumed(),
}


@pytest.fixture(scope="module")
def users_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Caches by the environment variable that names them to every engine opened here."""
    caches = {name: tmp_path_factory.mktemp(name.lower()) for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in caches.items():
            patch.setenv(name, str(folder))
        nursery = None if has_cuda() else Nursery()
        child = SpawnedChild if nursery is None else functools.partial(ForkedChild, nursery)
        patch.setattr(engine_pool, "EngineProcess", functools.partial(EngineProcess, child=child))
        yield caches
        if nursery is not None:
            nursery.end()


@pytest.fixture(scope="module")
def clean(users_caches: dict[str, Path]) -> Iterator[EnginePath]:
    """A path without a fault, its subject compiled."""
    path = open_path("engine", None, "plugin-compiled")
    assert isinstance(path, EnginePath)
    yield path
    path.close()


@pytest.fixture(scope="module")
def passes(clean: EnginePath) -> dict[str, Record]:
    """Records of the Cases in the clean path."""
    return {name: judge_case(clean, case).record for name, case in PLAYED.items()}


@pytest.mark.parametrize("name", PLAYED)
def test_compiled_cases_pass(passes: dict[str, Record], name: str) -> None:
    record = passes[name]
    assert record["verdict"] == "pass", record["reason"]
    assert record["distances"]["output_max_abs"] < LOG_PROB_LIMIT
    assert record["counts"]["replay_steps"] > record["counts"]["flushes"]
    # the resumed request ends before its ring is full
    assert record["counts"]["resumes"] if name == "resumed" else record["counts"]["flushes"]


def test_the_record_says_how_it_ran(passes: dict[str, Record], clean: EnginePath) -> None:
    for record in passes.values():
        assert record["target"] == "plugin-compiled"
        assert record["execution"] == {"mode": MODE, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert clean.baselines.latest.execution == {"mode": "NONE", "cudagraph_mode": "NONE"}
    # all in one engine: each costs a compilation
    assert len(clean.subjects.engines) == 1


def test_a_planted_fault_fails_and_stays_in_its_engine(
    passes: dict[str, Record], clean: EnginePath, users_caches: dict[str, Path]
) -> None:
    assert passes["resumed"]["verdict"] == "pass"
    compiled = [_own_caches(engine) for engine in clean.subjects.engines]
    faulty = open_path("engine", "cursor.prompt_base", "plugin-compiled")
    assert isinstance(faulty, EnginePath)
    faulty.baselines = clean.baselines
    try:
        record = judge_case(faulty, PLAYED["resumed"]).record
        compiled += [_own_caches(engine) for engine in faulty.subjects.engines]
        # compiled code is there, in each engine's own place
        assert len(set(compiled)) == 2 and all(any(folder.rglob("*.py")) for folder in compiled)
    finally:
        faulty.subjects.close()
    assert (record["verdict"], record["stage"]) == ("fail", "judge"), record["reason"]
    assert record["symptom"] in ("mismatch", "poison", "cursor")
    assert record["execution"] == passes["resumed"]["execution"]
    assert "--target plugin-compiled" in record["rerun"] and record["rerun"].endswith("--fault cursor.prompt_base")
    assert [folder.exists() for folder in compiled] == [True, False]
    assert [list(folder.iterdir()) for folder in users_caches.values()] == [[], []]
    # the clean engine beside it goes on as before
    again = judge_case(clean, PLAYED["resumed"]).record
    assert again == passes["resumed"]


def _own_caches(engine: EngineProcess) -> Path:
    caches = engine.caches
    assert caches is not None
    return caches


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "eager after all": (
        {"compilation_config": {"mode": 3}, "enforce_eager": True},
        "NotCompiled: compilation_config.mode: 3 was asked for, but vLLM runs the model eagerly; look for "
        "enforce_eager, TORCH_COMPILE_DISABLE or VLLM_USE_BREAKABLE_CUDAGRAPH",
    ),
    "a mode that compiles anew": (
        {"compilation_config": {"mode": 1}},
        "NotCompiled: compilation_config.mode: 1 (STOCK_TORCH_COMPILE) compiles anew under each watch of this harness; "
        "use 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("users_caches")
def test_what_would_not_run_compiled_is_refused_in_a_line(name: str) -> None:
    extra, message = REFUSED[name]
    if has_cuda() and "STOCK" in message:
        pytest.skip("on a CPU only: with CUDA no watch of ours stands in the way")
    engine = engine_pool.EnginePool().engine(EngineConfig(trained_checkpoint(), extra=tuple(extra.items())))
    with engine:
        failure = engine.start()
    assert failure is not None and failure.message == message
