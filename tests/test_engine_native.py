"""The engine level for a vLLM with GDN ReplaySSM of its own: where vLLM refuses the switch its words are quoted.

The engine really starts with use_replayssm; vLLM 0.32 has no such decode for this architecture and must say so. Engine
arguments of the user's reach the engine the same way.
"""

from __future__ import annotations

import shlex

import pytest
from replay_parity.__main__ import _engine_args
from replay_parity.cases.engine_scenarios import engine_scenarios
from replay_parity.harness.builder_path import BuilderPath
from replay_parity.harness.engine_path import EnginePath
from replay_parity.harness.faults import FaultError
from replay_parity.harness.judge_case import judge_case
from replay_parity.harness.paths import LevelUnavailable, open_path
from replay_parity.harness.record import rerun_command

pytestmark = pytest.mark.engine

CASE = engine_scenarios()["plain-flush"].case


def test_what_vllm_refuses_is_quoted() -> None:
    with pytest.raises(LevelUnavailable, match=r"--use-replayssm is not supported for architecture"):
        open_path("engine", None, "vllm-native")


def test_a_fault_of_the_plugin_is_none_of_vllm() -> None:
    with pytest.raises(FaultError, match=r"ring\.write_next is planted in the plugin"):
        open_path("engine", "ring.write_next", "vllm-native")


@pytest.mark.parametrize(
    ("argument", "outcome", "words"),
    [(("max_num_seqs", 4), "pass", None), (("no_such_argument", 1), "unknown", "no_such_argument")],
)
def test_engine_arguments_reach_the_engine(argument: tuple[str, int], outcome: str, words: str | None) -> None:
    path = EnginePath(engine_args=(argument,))
    try:
        record = judge_case(path, CASE).record
    finally:
        path.close()
    assert record["verdict"] == outcome, record["reason"]
    assert words is None or words in record["reason"]


def test_a_record_says_how_the_engine_was_opened() -> None:
    """The command that judges a case again opens the same engine: target, model and engine arguments."""
    arguments = (("max_num_seqs", 4), ("compilation_config", {"mode": 0}), ("dtype", "float32"))
    path = EnginePath("cursor.prompt_base", engine_args=arguments, architecture="Qwen3_5MoeForCausalLM")
    command = rerun_command(CASE, path)
    words = shlex.split(command)[3:]
    assert words[:4] == ["--level", "engine", "--architecture", "Qwen3_5MoeForCausalLM"]
    assert words[-2:] == ["--fault", "cursor.prompt_base"]
    assert _engine_args(words[5:-2:2]) == arguments
    assert "--target vllm-native" in rerun_command(CASE, EnginePath(target="vllm-native"))
    assert "--target builder" in rerun_command(CASE, BuilderPath())
