"""How this tests, in plain words: the watch over a real engine's steps, from the worker down to the last operator.

On a clean path nothing of ours reads a device value on the host, in prefill, decode and mixed steps. That the watch
sees is tested beside it: each planted read, in the metadata builder and in the layer's forward, fails the Case with its
line although every log-probability is right. With CUDA vLLM's own check does the work.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.engine_sync import CUDA_CHECK_WORDS
from replay_parity.harness.fault_catalogue import FAULTS
from replay_parity.harness.judge_case import judge_case

pytestmark = pytest.mark.engine

CASES = {name: scenario.case for name, scenario in engine_scenarios().items()}
SYNCS = [name for name in FAULTS if name.startswith("sync.")]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def clean() -> Iterator[EnginePath]:
    """A path without a fault, whose baseline serves the faulty ones."""
    path = EnginePath()
    yield path
    path.close()


@pytest.mark.parametrize("name", ["one-token-tail", "mixed-prefill-and-decode"])
def test_the_clean_path_reads_nothing(clean: EnginePath, name: str) -> None:
    legs = clean.run(CASES[name])
    assert legs.failure is None and legs.subject is not None
    assert legs.subject.events == ()
    assert all(read.startswith("vllm/") for read in legs.subject.stock_reads)


@pytest.mark.parametrize("fault", SYNCS)
def test_a_planted_read_fails_with_its_line(clean: EnginePath, fault: str) -> None:
    path = EnginePath(fault)
    path.baselines = clean.baselines
    try:
        record = judge_case(path, CASES["one-token-tail"]).record
    finally:
        path.subjects.close()
    assert (record["verdict"], record["symptom"], record["stage"]) == ("fail", "host_sync", "judge")
    # the prompt's one-token tail is the first row that the layer decodes
    step = 1 if fault == "sync.tolist" else 0
    assert record["reason"].startswith(f"step {step}: {_place(fault)}: ")
    assert record["reason"].endswith(" waits for the device")


def _place(fault: str) -> str:
    (edit,) = FAULTS[fault].edits["engine"]
    file = edit.where.partition(":")[0].replace(".", "/") + ".py"
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    (line,) = [number for number, text in enumerate(lines, 1) if edit.old in text]
    return f"{file}:{line}"


def test_vllm_still_uses_the_words_that_its_check_is_known_by() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations
    source = Path(found.submodule_search_locations[0], "utils", "gpu_sync_debug.py").read_text(encoding="utf-8")
    assert source.count(CUDA_CHECK_WORDS) == 2


@pytest.mark.gpu
def test_with_cuda_vllms_check_is_armed_before_vllm_is_imported() -> None:
    from replay_parity.harness import cpu_platform

    cpu_platform.prepare()
    from vllm.utils import gpu_sync_debug

    assert os.environ["VLLM_GPU_SYNC_CHECK"] == "error"
    assert gpu_sync_debug._SYNC_CHECK_MODE == "error"
