"""The interpreter's benchmark on a small launch: it must be satisfied, and must complain when it should.

A stock interpreter that does nothing leaves other bytes; a ratio that nobody reaches is not reached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")

from replay_parity.__main__ import main
from replay_parity.cases.geometry import Geometry
from replay_parity.harness import bench_interpreter
from replay_parity.harness.bench_interpreter import FP32, SETTINGS, Setting, compare, mixed_step

SMALL = Setting("small", Geometry(1, 2, 16, 16, 4), 4, FP32, 0)


def test_both_interpreters_leave_the_same_bytes() -> None:
    stock, ours, faster = compare(SMALL, 0)
    assert [figure.name for figure in (stock, ours, faster)] == [
        "small, 8 programs, Triton's interpreter",
        "small, 8 programs, ours",
        "small, 8 programs, faster",
    ]
    assert faster.value == stock.value / ours.value
    assert [figure.complaint for figure in (stock, ours, faster)] == ["", "", ""]


def test_rows_of_every_kind_are_in_the_step() -> None:
    step = mixed_step(SMALL, 0)
    write_pos, is_flush = step.cursor
    assert step.slots.tolist() == [1, 2, 3, 0]
    assert is_flush.tolist() == [False, False, True, False]
    assert write_pos.tolist() == [0, 5, 15, 15]


def test_other_bytes_and_a_slow_interpreter_are_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(*arguments: Any) -> None:
        del arguments

    monkeypatch.setattr(bench_interpreter, "run_stock", idle)
    _, ours, faster = compare(replace(SMALL, least=1e9), 0)
    assert ours.complaint == "other bytes than Triton's interpreter in out, state, ring d, ring k, ring g"
    assert faster.complaint == "at least 1e+09"


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_interpreter, "SETTINGS", (SMALL,))
    assert main(["bench", "--what", "interpreter"]) == 0
    assert "small, 8 programs, faster" in capsys.readouterr().out
    monkeypatch.setattr(bench_interpreter, "SETTINGS", (replace(SMALL, least=1e9),))
    assert main(["bench", "--what", "interpreter"]) == 1


def test_what_is_promised() -> None:
    assert [(setting.rows, setting.geometry.num_v_heads, setting.least) for setting in SETTINGS] == [
        (4, 4, 20),
        (4, 4, 20),
        (8, 32, 100),
    ]
