"""How engines end, and how they begin: processes that are killed, interrupted or must not be forked.

One program of its own holds a nursery and two engines that play; it is interrupted, it loses its nursery, it is killed.
Each time every process that has lost its purpose must be gone soon, and what was asked must come back as a value. Then
nurseries that cannot fork: one with a thread, one that cannot import vLLM. The engine spawned in the place of a fork
must give the very same bits as a forked one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replay_parity.cases.case import Case
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.cases.geometry import ENGINE
from replay_parity.cases.inputs import token_ids
from replay_parity.harness import cpu_platform, engine_children
from replay_parity.harness.checkpoint import VOCAB_SIZE, tiny_checkpoint
from replay_parity.harness.engine_children import ForkedChild, Nursery, SpawnedChild
from replay_parity.harness.engine_nursery import why_not_fork
from replay_parity.harness.engine_process import EngineFailure, EngineProcess
from replay_parity.harness.engine_trace import EngineConfig, EngineTrace

pytestmark = pytest.mark.engine

SOON_S = 10.0
# prints a JSON line at each stage; Ctrl-C ends the first play, then it goes on
_PARENT = """
import json, signal, sys, threading, time
from dataclasses import replace
from replay_parity.cases.case import Request, Step
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.harness.engine_children import nursery
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.judge_case import judge_case

signal.signal(signal.SIGINT, signal.default_int_handler)
short = engine_scenarios()["one-token-tail"].case
# a minute of steps
long = replace(short, requests=(Request(9, 600),), steps=(Step(((0, 9),)), *[Step(((0, 1),))] * 599))
path = EnginePath()

def tell(**what):
    print(json.dumps(what), flush=True)

def told_when_playing(case, path):
    def wait():
        while True:
            engines = [*path.subjects.engines, *path.baselines.engines]
            if sum(engine.block_size is not None and engine.pid is not None for engine in engines) == 2:
                break
            time.sleep(0.05)
        # well into the first steps
        time.sleep(0.5)
        tell(engines=[engine.pid for engine in engines], nursery=nursery().process.pid)
    threading.Thread(target=wait, daemon=True).start()
    return judge_case(path, case).record

tell(nursery=nursery().process.pid)
try:
    told_when_playing(long, path)
except KeyboardInterrupt:
    tell(interrupted=True)
path = EnginePath()
record = told_when_playing(long, path)
tell(**{name: record[name] for name in ("verdict", "symptom", "stage", "reason")})
sys.stdin.readline()
path = EnginePath()
told_when_playing(long, path)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    """The program above, killed at the end."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=-1, stdout=-1, text=True) as process:
        yield process
        process.kill()


def _told(parent: subprocess.Popen[str]) -> dict[str, Any]:
    assert parent.stdout is not None
    told: dict[str, Any] = json.loads(parent.stdout.readline())
    return told


@pytest.mark.skipif(cpu_platform.has_cuda(), reason="with CUDA there is no nursery")
def test_who_has_lost_its_purpose_is_gone_soon(parent: subprocess.Popen[str]) -> None:
    _told(parent)
    first = _told(parent)
    assert all(_alive(pid) for pid in (*first["engines"], first["nursery"]))

    # Ctrl-C to the parent alone
    started = time.monotonic()
    parent.send_signal(signal.SIGINT)
    assert _told(parent) == {"interrupted": True}
    assert time.monotonic() - started < SOON_S
    assert not any(_alive(pid) for pid in first["engines"])
    assert _alive(first["nursery"])

    # the nursery is killed in mid-play: both engines die with it
    second = _told(parent)
    assert second["nursery"] == first["nursery"]
    os.kill(second["nursery"], signal.SIGKILL)
    assert _told(parent) == {
        "verdict": "unknown",
        "symptom": "crash",
        "stage": "subject: play",
        "reason": "the engine nursery was killed (SIGKILL: out of memory, or by hand)",
    }
    assert _gone(*second["engines"])

    # the parent is killed in mid-play, with a new nursery
    assert parent.stdin is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    third = _told(parent)
    assert third["nursery"] != first["nursery"]
    parent.kill()
    assert _gone(*third["engines"], third["nursery"])


@pytest.mark.skipif(cpu_platform.has_cuda(), reason="with CUDA there is no nursery")
def test_a_nursery_that_still_imports_dies_with_its_parent(parent: subprocess.Popen[str]) -> None:
    nursery = _told(parent)["nursery"]
    # far enough to watch its parent
    _wait_for(lambda: _threads(nursery) > 1)
    parent.kill()
    assert _gone(nursery)


def test_a_spawned_child_dies_with_its_parent() -> None:
    code = (
        "import time; from replay_parity.harness.engine_children import SpawnedChild\n"
        "child = SpawnedChild(); print(child.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        # far enough to watch its parent
        _wait_for(lambda: _threads(child) > 1)
        parent.kill()
    assert _gone(child)


def test_threads_forbid_a_fork() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="somebody")
    thread.start()
    refusal = why_not_fork()
    done.set()
    thread.join()
    assert refusal is not None
    assert "somebody" in refusal.message


def test_where_no_fork_is_safe_a_spawned_child_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nursery = _nursery_with(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='stray', daemon=True).start()\n",
        tmp_path,
        monkeypatch,
    )
    # put back afterwards: the refusal holds for the whole process
    monkeypatch.setattr(engine_children, "_may_fork", True)
    config = EngineConfig(tiny_checkpoint(ENGINE), buffer_len=4)
    case = engine_scenarios()["one-token-tail"].case
    with (
        contextlib.closing(EngineProcess(config, child=lambda: ForkedChild(nursery))) as refused,
        contextlib.closing(EngineProcess(config)) as forked,
    ):
        spawned_trace = _play(refused, case)
        assert "1 threads beside the main one (stray) would not survive a fork" in caplog.text
        assert isinstance(engine_children.open_child(), SpawnedChild) or cpu_platform.has_cuda()
        monkeypatch.setattr(engine_children, "_may_fork", True)
        forked_trace = _play(forked, case)
    nursery.end()
    assert spawned_trace.log_probs.tobytes() == forked_trace.log_probs.tobytes()
    assert spawned_trace.counts == forked_trace.counts


def test_a_nursery_without_vllm_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = _nursery_with(
        "import sys, types\nsys.modules['vllm'] = types.ModuleType('vllm')\n", tmp_path, monkeypatch
    )
    config = EngineConfig(tiny_checkpoint(ENGINE))
    with EngineProcess(config, child=lambda: ForkedChild(nursery)) as process:
        failure = process.start()
    nursery.end()
    assert isinstance(failure, EngineFailure)
    assert (failure.symptom, failure.stage) == ("exception", "start")
    assert failure.message.startswith("EngineUnavailable: vllm was imported before cpu_platform.prepare()")
    assert "Traceback" in failure.log


def _nursery_with(startup: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Nursery:
    """A nursery whose Python runs ``startup`` first."""
    (folder / "sitecustomize.py").write_text(startup, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        return Nursery()


def _play(engine: EngineProcess, case: Case) -> EngineTrace:
    tokens = token_ids(case, VOCAB_SIZE)
    lengths = [request.prompt_len for request in case.requests]
    prompts = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
    played = engine.play(case, prompts, [row[n:] for row, n in zip(tokens, lengths, strict=True)])
    assert isinstance(played, EngineTrace), f"{played}"
    return played


def _gone(*pids: int) -> bool:
    return _wait_for(lambda: not any(_alive(pid) for pid in pids))


def _wait_for(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + SOON_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _alive(pid: int) -> bool:
    try:
        # an orphan that nobody has waited for yet is dead too
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
