"""How this tests the decode benchmark without timing anything, in plain words.

What is timed must be what is claimed: the steps of a cycle visit every ring position, use their own slots and run; the
bytes that a step cannot avoid lie just below those that the traffic benchmark counts. A broken kernel must not be
timed, and a machine without a GPU must say so and exit with 3. With the gpu marker a small benchmark runs.
"""

from __future__ import annotations

import pytest
import torch
from replay_parity.__main__ import main
from replay_parity.cases.geometry import QWEN3_5, TINY
from replay_parity.harness import bench_decode
from replay_parity.harness.bench_decode import agreement, cycle, least_bytes, staggered
from replay_parity.harness.bench_traffic import BUFFER_LEN, Row, packed_bytes, replay_bytes
from replay_parity.harness.interpreter import interpreted
from replay_parity.kernels import decode_launch


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--what", "decode"]) == 3
    told = capsys.readouterr()
    assert told.err == "replay-parity: bench decode needs a CUDA device, torch sees none\n"
    assert told.out == ""


def test_rows_are_staggered() -> None:
    assert staggered(5, 3, 1) == [(1, False), (2, True), (0, False), (1, False), (2, True)]
    for row in range(4):
        assert sorted(staggered(4, 16, phase)[row][0] for phase in range(16)) == list(range(16))


@pytest.mark.parametrize(("cold_bytes", "sets"), [(1, 1), (3 * 5 * 4096, 3), (1 << 40, 4)])
def test_cycle_rotates_over_slots(cold_bytes: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """State of TINY: 4 * 16 * 16 * 4 = 4096 bytes a row."""
    monkeypatch.setattr(bench_decode, "COLD_BYTES", cold_bytes)
    steps = cycle(TINY, 5, 4, 0, "cpu")
    assert [step.slots.tolist()[0] for step in steps] == [1 + 5 * (phase % sets) for phase in range(4)]
    assert len(steps[0].state) == 1 + 5 * sets
    for step in steps:
        assert len(set(step.slots.tolist())) == 5
        assert step.replay("torch").isfinite().all()
        assert step.packed("torch").isfinite().all()


def test_least_bytes_lie_just_below_the_counted_ones() -> None:
    geometry = QWEN3_5["qwen3.5-9b"]
    counted = [replay_bytes(geometry, Row(w, w == BUFFER_LEN - 1)).total for w in range(BUFFER_LEN)]
    share = least_bytes(geometry, 7, BUFFER_LEN) / (7 * sum(counted) / BUFFER_LEN)
    assert 0.93 < share < 1
    assert 0.97 < least_bytes(geometry, 7, None) / (7 * packed_bytes(geometry).total) < 1


def test_agreement_comes_before_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with interpreted():
        assert [figure.complaint for figure in agreement(TINY, 0, "cpu", "triton")] == ["", ""]
        assert all(figure.value < 1 for figure in agreement(TINY, 0, "cpu", "triton"))
    for broken in (torch.nan, 0.0):
        monkeypatch.setattr(decode_launch, "replay_decode", lambda *args, value=broken: args[-2].fill_(value))
        with interpreted():
            told = [figure.complaint for figure in agreement(TINY, 0, "cpu", "triton")]
        assert told == ["outputs differ from the torch formulation's: not timed", ""]


@pytest.mark.gpu
def test_small_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode, "MODELS", ("qwen3.5-9b",))
    monkeypatch.setattr(bench_decode, "BATCHES", (8,))
    figures = {figure.name: figure for figure in bench_decode.bench_decode(0)}
    assert not any(figure.complaint for figure in figures.values())
    for length in bench_decode.BUFFER_LENS:
        assert 0 < figures[f"HV 32, batch 8, replay L {length}, of copy bandwidth"].value < 150
