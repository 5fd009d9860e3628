"""Hardware markers: a machine without the hardware skips with a reason, and fails where hardware is required.

Runs pytest in a child process on a small file; CUDA is hidden from it, so this machine's own hardware does not matter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from replay_parity.harness.hardware import MARKERS, why_not

SAMPLE = """
import pytest

@pytest.mark.gpu
def test_gpu(): assert False

@pytest.mark.sm(9, 0)
def test_sm(): assert False

@pytest.mark.multi_gpu(2)
def test_multi(): assert False

@pytest.mark.kernel
@pytest.mark.schedule
def test_plain(): pass
"""


def outcome(folder: Path, *words: str, sample: str = SAMPLE) -> str:
    (folder / "test_sample.py").write_text(sample)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--strict-markers", *words, "test_sample.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    return done.stdout


def test_missing_hardware_skips_with_its_reason(tmp_path: Path) -> None:
    out = outcome(tmp_path)
    assert "1 passed, 3 skipped" in out
    assert "needs a CUDA device" in out and "needs 2 CUDA devices" in out


def test_required_hardware_fails(tmp_path: Path) -> None:
    out = outcome(tmp_path, "--require-hardware")
    assert "1 passed, 3 errors" in out and "--require-hardware: needs a CUDA device" in out


def test_a_marker_written_wrong_fails(tmp_path: Path) -> None:
    out = outcome(tmp_path, sample="import pytest\n@pytest.mark.sm(9)\ndef test_sm(): pass\n")
    assert "1 error" in out and "sm(major, minor)" in out


def test_every_marker_has_an_answer() -> None:
    assert why_not("kernel") is None and why_not("schedule") is None
    assert set(MARKERS) == {"kernel", "schedule", "engine", "gpu", "sm", "multi_gpu"}
    with pytest.raises(ValueError, match="multi_gpu"):
        why_not("multi_gpu")
