"""The tiny checkpoints: the same arguments give the same bytes, and the recurrent state decides what comes out.

Bytes are compared in fresh cache directories, two processes race for one, and the oracle reads the checkpoint twice:
as it is and with gates that forget at once. If that changed little, an engine that loses its state would pass.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from replay_parity.cases.geometry import ENGINE, TINY
from replay_parity.cases.refusal import Refusal
from replay_parity.harness.architectures import ARCHITECTURES
from replay_parity.harness.checkpoint import VOCAB_SIZE, default_cache_dir, tiny_checkpoint
from replay_parity.kernels.vllm_config import MODEL_TYPES
from replay_parity.oracles.qwen3_5 import Qwen3_5Oracle
from safetensors.torch import load_file, save_file


def _digest(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_same_arguments_same_name_and_bytes(tmp_path: Path, architecture: str) -> None:
    one, two = (tiny_checkpoint(ENGINE, 3, tmp_path / name, architecture) for name in ("one", "two"))
    assert one.name == two.name
    assert _digest(one) == _digest(two)
    assert set(_digest(one)) == {"config.json", "model.safetensors"}


def test_seed_and_geometry_are_in_the_name(tmp_path: Path) -> None:
    asked = ((ENGINE, 0), (ENGINE, 1), (TINY, 0))
    paths = [tiny_checkpoint(geometry, seed, tmp_path) for geometry, seed in asked]
    assert len({path.name for path in paths}) == 3
    assert len({_digest(path)["model.safetensors"] for path in paths}) == 3


def test_architectures_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    """Each as small as the other, named as vLLM and transformers read it; what two of them share is the same."""
    paths = {name: tiny_checkpoint(ENGINE, 0, tmp_path, name) for name in ARCHITECTURES}
    assert len({path.name for path in paths.values()}) == len(ARCHITECTURES)
    weights = {name: load_file(path / "model.safetensors") for name, path in paths.items()}
    text = weights["Qwen3_5ForCausalLM"]
    for name, kind in ARCHITECTURES.items():
        config = json.loads((paths[name] / "config.json").read_text())
        assert (config["architectures"], config["model_type"]) == ([name], kind.model_type)
        assert config.get("text_config", config)["model_type"] == kind.text_model_type
        assert 1e6 < sum(tensor.numel() for tensor in weights[name].values()) < 2e6
        prefix = "model.language_model." if kind.multimodal else "model."
        for shared in ("layers.0.linear_attn.A_log", "layers.3.self_attn.q_proj.weight", "embed_tokens.weight"):
            assert torch.equal(weights[name][prefix + shared], text[f"model.{shared}"])


def test_the_table_of_architectures_is_the_plugins() -> None:
    assert {name: kind.text_model_type for name, kind in ARCHITECTURES.items()} == MODEL_TYPES


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"^--architecture Qwen3: is not served; use one of Qwen3_5ForCausalLM, "):
        tiny_checkpoint(ENGINE, 0, tmp_path, "Qwen3")
    assert not list(tmp_path.iterdir())


def test_an_existing_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    path = tiny_checkpoint(ENGINE, 0, tmp_path)
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert tiny_checkpoint(ENGINE, 0, tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_two_processes_may_race(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from replay_parity.cases.geometry import ENGINE; "
        "from replay_parity.harness.checkpoint import tiny_checkpoint; sys.stdin.readline(); "
        "print(tiny_checkpoint(ENGINE, 0, Path(sys.argv[1])))"
    )
    racers = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True) for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.communicate()[0].strip() for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert answers[0] == answers[1]
    # nothing half-made stays behind
    assert [path.name for path in tmp_path.iterdir()] == [Path(answers[0]).name]


def test_cache_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_PARITY_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("REPLAY_PARITY_CACHE")
    assert default_cache_dir().name == "replay-parity"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gates_follow_the_law_of_trained_models(tmp_path: Path, architecture: str) -> None:
    weights = load_file(tiny_checkpoint(ENGINE, 0, tmp_path, architecture) / "model.safetensors")
    rates = torch.cat([tensor for name, tensor in weights.items() if name.endswith("A_log")]).exp()
    steps = torch.nn.functional.softplus(
        torch.cat([tensor for name, tensor in weights.items() if name.endswith("dt_bias")])
    )
    assert len(rates) == 3 * ENGINE.num_v_heads
    assert rates.min() >= 1 and rates.max() <= 16
    # softplus and its inverse in float32 move the ends by parts in 1e7
    assert steps.min() >= 0.999e-3 and steps.max() <= 1.001e-1
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_state_decides_what_comes_out(tmp_path: Path, architecture: str) -> None:
    path = tiny_checkpoint(ENGINE, 0, tmp_path / "cache", architecture)
    tokens = torch.randint(0, VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    remembers = Qwen3_5Oracle.load(path).log_probs(tokens)
    assert torch.isfinite(remembers).all()
    # neither flat (5.5 nats would be uniform) nor the same answer everywhere
    entropy = -(remembers.exp() * remembers).sum(-1).mean()
    assert 2.0 < entropy < 5.0
    assert len(set(remembers.argmax(-1).tolist())) > 20

    forgetful = tmp_path / "forgetful"
    forgetful.mkdir()
    (forgetful / "config.json").write_bytes((path / "config.json").read_bytes())
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("dt_bias"):
            # exp(-A softplus(20)) is at most 2e-9
            weights[name] = torch.full_like(weights[name], 20.0)
    save_file(weights, forgetful / "model.safetensors")
    change = (remembers - Qwen3_5Oracle.load(forgetful).log_probs(tokens)).abs().amax(-1)
    # the first token has no state to forget; later ones change by nats, not by rounding (observed: at least 4.2)
    assert change[0] < 1e-3
    assert change[4:].min() > 1.0
