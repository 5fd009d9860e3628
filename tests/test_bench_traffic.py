"""How this tests the traffic benchmark, in plain words.

The bytes that the interpreter counts for a small layer must be the closed formula's, to the byte. Then what must be
refused: a formula that says something else, a launch whose tiles read the keys too often, and the exit status of both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from replay_parity.__main__ import main
from replay_parity.cases.geometry import QWEN3_5, Geometry
from replay_parity.harness import bench_traffic
from replay_parity.harness.bench_traffic import (
    ROWS,
    Bytes,
    compared,
    count_packed,
    count_replay,
    packed_bytes,
    replay_bytes,
    shares,
)
from replay_parity.kernels.decode_launch import LAUNCH_CONFIGS, LaunchConfig

SMALL = Geometry(2, 6, 32, 128, 4)
QWEN = QWEN3_5["qwen3.5-0.8b"]


def test_counted_bytes_are_the_formula() -> None:
    assert count_packed(SMALL, 0) == packed_bytes(SMALL)
    assert count_replay(SMALL, 0) == [replay_bytes(SMALL, row) for row in ROWS]


def test_a_formula_that_says_something_else_is_refused() -> None:
    counted = Bytes(read=10_000, written=1000)
    assert compared(SMALL, "x", counted, Bytes(10_099, 1000)).complaint == ""
    for formula in (Bytes(10_101, 1000), Bytes(9_899, 1000), Bytes(10_000, 1011)):
        assert compared(SMALL, "x", counted, formula).complaint == "counted and formula differ by more than 1%"


def test_a_share_beyond_its_limit_is_refused() -> None:
    packed = packed_bytes(QWEN)
    replay = [replay_bytes(QWEN, row) for row in ROWS]
    assert [figure.complaint for figure in shares(QWEN, packed, replay)] == ["", ""]
    one_state_more = [Bytes(have.read, have.written + packed.written) for have in replay]
    assert [figure.complaint for figure in shares(QWEN, packed, one_state_more)] == ["at most 0.6", "at most 0.62"]


def test_command_fails_where_tiles_are_too_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tiles of 16 read each key entry eight times per value head: beyond what an append may move."""
    monkeypatch.setattr(bench_traffic, "MODELS", ("qwen3.5-0.8b",))
    assert main(["bench", "--what", "traffic"]) == 0
    assert capsys.readouterr().err == ""
    narrow = replace(LAUNCH_CONFIGS["default"], replay=LaunchConfig(16, 4))
    monkeypatch.setitem(LAUNCH_CONFIGS, "default", narrow)
    assert main(["bench", "--what", "traffic"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "replay-parity: HV 16, worst append over packed: at most 0.6"
