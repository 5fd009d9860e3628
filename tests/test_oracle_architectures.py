"""How this tests, in plain words.

The tiny checkpoints of the MoE and the multimodal models get norms away from their neutral value; transformers loads
them, and the oracle must give the same log-probabilities over the whole vocabulary at every position, in float32 and
in float64; one MoE block alone agrees to the rounding of transformers' router. Then the oracle is changed, in a weight
or in its code, and the same comparison must reject it. Configurations that say something the oracle does not do are
refused in one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_parity.cases.geometry import ENGINE
from replay_parity.harness.architectures import ARCHITECTURES
from replay_parity.harness.checkpoint import VOCAB_SIZE, tiny_checkpoint
from replay_parity.harness.cpu_platform import let_transformers_import
from replay_parity.oracles import qwen3_5
from replay_parity.oracles.moe import MoeConfig, mixture_of_experts, moe_shapes, routing
from replay_parity.oracles.qwen3_5 import OracleError, Qwen3_5Oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

NEW = [name for name in ARCHITECTURES if name != "Qwen3_5ForCausalLM"]
MULTIMODAL = [name for name in NEW if ARCHITECTURES[name].multimodal]
NUM_TOKENS = 70
# observed maximum over 18 checkpoints (6 seeds): 3.1e-5 and 1.6e-5; transformers keeps norms, gates, the recurrence and
# the router's softmax in float32 in a float64 model as well. Smallest planted change below: 4.8e-3
LIMIT = {torch.float32: 1e-4, torch.float64: 5e-5}
# observed 1.0e-7
BLOCK_LIMIT = 5e-7


@dataclass(frozen=True)
class Reference:
    """A checkpoint directory, a prompt, and transformers' own log-probabilities for it by dtype."""

    path: Path
    prompt: list[int]
    log_probs: dict[torch.dtype, Tensor]


@pytest.fixture(scope="module")
def modeling() -> Any:
    """transformers, or skip."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: nothing to compare the whole-model oracle with")
    let_transformers_import()
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=NEW)
def reference(modeling: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One architecture's checkpoint with norms that matter, and what transformers makes of it."""
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    shutil.copytree(tiny_checkpoint(ENGINE, architecture=request.param), path)
    rng = torch.Generator().manual_seed(20)
    weights = load_file(path / "model.safetensors")
    for name in sorted(weights):
        if name.endswith("norm.weight"):
            weights[name] += 0.3 * torch.randn(weights[name].shape, generator=rng)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    prompt = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=rng).tolist()
    return Reference(path, prompt, {dtype: answers(modeling, path, prompt, dtype) for dtype in LIMIT})


def answers(modeling: Any, path: Path, prompt: list[int], dtype: torch.dtype) -> Tensor:
    """Log-probabilities [T, vocab] by transformers, every tensor of the checkpoint read."""
    kind = getattr(modeling, path.name)
    # the plain loop over experts: grouped products differ by dtype
    model, info = kind.from_pretrained(path, dtype=dtype, output_loading_info=True, experts_implementation="eager")
    assert not any(info[trouble] for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=torch.tensor([prompt])).logits[0]
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def oracle(reference: Reference) -> Qwen3_5Oracle:
    """The oracle of the reference's checkpoint, float32."""
    return Qwen3_5Oracle.load(reference.path)


def distance(model: Qwen3_5Oracle, reference: Reference, dtype: torch.dtype = torch.float32) -> float:
    """Largest |log-probability difference| over the vocabulary and all positions; NaN counts as infinite."""
    got = model.log_probs(reference.prompt)
    assert got.shape == (NUM_TOKENS, VOCAB_SIZE)
    worst = float((got.double() - reference.log_probs[dtype].double()).abs().max())
    return worst if worst == worst else float("inf")


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_equals_transformers(reference: Reference, dtype: torch.dtype) -> None:
    assert distance(Qwen3_5Oracle.load(reference.path, dtype=dtype), reference, dtype) < LIMIT[dtype]


def test_language_part_is_the_text_model(reference: Reference) -> None:
    """Same tensors under longer names, a tower beside them."""
    name = reference.path.name
    if name not in MULTIMODAL:
        pytest.skip("a text model")
    text = Qwen3_5Oracle.load(tiny_checkpoint(ENGINE, architecture=name.replace("ConditionalGeneration", "CausalLM")))
    whole = Qwen3_5Oracle.load(tiny_checkpoint(ENGINE, architecture=name))
    assert whole.config == replace(text.config, prefix="model.language_model.")
    assert_same_tensors(whole, text)


def assert_same_tensors(one: Qwen3_5Oracle, two: Qwen3_5Oracle) -> None:
    """The same names and bits; what is computed from them may differ in last bits with their place in memory."""
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(tensor, two.tensors[name]) for name, tensor in one.tensors.items())


def test_block_equals_transformers_in_float64(modeling: Any) -> None:
    """transformers' router takes its softmax in float32; all else of the block is float64 in both."""
    config = MoeConfig(8, 2, 64, 32)
    module = importlib.import_module("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    sizes = {name: getattr(config, name) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    text = modeling.Qwen3_5MoeTextConfig(hidden_size=128, shared_expert_intermediate_size=32, **sizes)
    text._experts_implementation = "eager"
    block = module.Qwen3_5MoeSparseMoeBlock(text).double()
    rng = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(shape, generator=rng).double() / 11 for name, shape in moe_shapes(128, config).items()}
    experts = [[weights[f"experts.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")] for e in range(8)]
    fused = {
        "experts.gate_up_proj": torch.stack([torch.cat([gate, up]) for gate, up, _ in experts]),
        "experts.down_proj": torch.stack([down for _, _, down in experts]),
    }
    block.load_state_dict(fused | {name: t for name, t in weights.items() if not name.startswith("experts.")})
    x = torch.randn(50, 128, generator=rng).double()
    with torch.no_grad():
        difference = block(x[None])[0] - mixture_of_experts(x, weights, config)
    assert float(difference.abs().max()) < BLOCK_LIMIT


def test_weights_of_the_experts_follow_the_config() -> None:
    """Three of five experts by hand; not normalised they sum to what the softmax gave them."""
    logits = torch.tensor([[0.0, 1.0, 3.0, -1.0, 2.0]], dtype=torch.float64).log_softmax(-1)
    kept = logits.exp() * torch.tensor([0, 1, 1, 0, 1])
    plain = routing(logits, MoeConfig(5, 3, 1, 1, norm_topk_prob=False))
    torch.testing.assert_close(plain, kept, rtol=0, atol=1e-15)
    torch.testing.assert_close(routing(logits, MoeConfig(5, 3, 1, 1)), kept / kept.sum(), rtol=0, atol=1e-15)


def swapped(first: str, second: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Two tensors of one layer in each other's place."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        one, two = (f"model.layers.1.mlp.{name}.weight" for name in (first, second))
        return tensors | {one: tensors[two], two: tensors[one]}

    return change


def scaled(name: str, factor: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """One tensor times a factor."""
    return lambda tensors: tensors | {name: tensors[name] * factor}


WEIGHTS = {
    "one norm off": scaled("model.layers.2.linear_attn.norm.weight", 1.001),
    "decay off": scaled("model.layers.0.linear_attn.A_log", 1.01),
}
MOE_WEIGHTS = {
    "gate and up of an expert swapped": swapped("experts.2.gate_proj", "experts.2.up_proj"),
    "experts swapped": swapped("experts.2.down_proj", "experts.5.down_proj"),
    "router of one layer off": scaled("model.layers.3.mlp.gate.weight", 1.01),
    "shared gate of one layer off": scaled("model.layers.0.mlp.shared_expert_gate.weight", 1.01),
}
CODE: dict[str, Callable[[Tensor, dict[str, Tensor], MoeConfig], Tensor]] = {
    "one expert a token": lambda x, w, config: mixture_of_experts(x, w, replace(config, num_experts_per_tok=1)),
    "weights not normalised": lambda x, w, config: mixture_of_experts(x, w, replace(config, norm_topk_prob=False)),
    "shared expert without its gate": lambda x, w, config: mixture_of_experts(
        x, w | {"shared_expert_gate.weight": torch.zeros_like(w["shared_expert_gate.weight"])}, config
    ),
}


@pytest.mark.parametrize("name", [*WEIGHTS, *MOE_WEIGHTS])
def test_comparison_rejects_changed_weight(reference: Reference, oracle: Qwen3_5Oracle, name: str) -> None:
    if name in MOE_WEIGHTS and oracle.config.moe is None:
        pytest.skip("a dense model")
    changed = replace(oracle, tensors=(WEIGHTS | MOE_WEIGHTS)[name](dict(oracle.tensors)))
    assert distance(changed, reference) > LIMIT[torch.float32]


@pytest.mark.parametrize("name", CODE)
def test_comparison_rejects_changed_code(
    reference: Reference, oracle: Qwen3_5Oracle, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if oracle.config.moe is None:
        pytest.skip("a dense model")
    monkeypatch.setattr(qwen3_5, "mixture_of_experts", CODE[name])
    assert distance(oracle, reference) > LIMIT[torch.float32]


@pytest.fixture
def copied(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A private copy of the checkpoint that the test's parameter names."""
    return Path(shutil.copytree(tiny_checkpoint(ENGINE, architecture=request.param), tmp_path / "copy"))


def edit_config(path: Path, part: str | None, changes: dict[str, Any]) -> None:
    """Write fields into config.json, or into a part of it; a value of ``...`` removes the field."""
    whole = json.loads((path / "config.json").read_text())
    raw = whole if part is None else whole[part]
    raw |= changes
    for name in [name for name, value in raw.items() if value is ...]:
        del raw[name]
    (path / "config.json").write_text(json.dumps(whole))


MOE_TEXT, DENSE_WHOLE = "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration"
REFUSED: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "num_experts must be a positive int, got None": (MOE_TEXT, None, {"num_experts": ...}),
    "num_experts_per_tok = 9 must be at most num_experts = 8": (MOE_TEXT, None, {"num_experts_per_tok": 9}),
    "shared_expert_intermediate_size must be a positive int, got 0": (
        MOE_TEXT,
        None,
        {"shared_expert_intermediate_size": 0},
    ),
    "model.layers.0.mlp.experts.0.gate_proj.weight must be [32, 128]": (MOE_TEXT, None, {"moe_intermediate_size": 32}),
    "text_config must be an object, got None": (DENSE_WHOLE, None, {"text_config": ...}),
    "text_config.model_type must be 'qwen3_5_text', got 'qwen3_5_moe_text'": (
        DENSE_WHOLE,
        "text_config",
        {"model_type": "qwen3_5_moe_text"},
    ),
    "tie_word_embeddings = True and text_config.tie_word_embeddings = False": (
        DENSE_WHOLE,
        None,
        {"tie_word_embeddings": True},
    ),
    "attention_bias = True is not implemented": (DENSE_WHOLE, "text_config", {"attention_bias": True}),
}


@pytest.mark.parametrize(
    ("copied", "message"), [(case[0], message) for message, case in REFUSED.items()], indirect=["copied"]
)
def test_config_is_refused_in_one_line(copied: Path, message: str) -> None:
    _, part, changes = REFUSED[message]
    edit_config(copied, part, changes)
    with pytest.raises(OracleError) as refused:
        Qwen3_5Oracle.load(copied)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("copied", [MOE_TEXT], indirect=True)
def test_experts_in_one_tensor_are_the_same_model(copied: Path) -> None:
    """As published checkpoints hold them; a tensor given both ways is refused."""
    file = copied / "model.safetensors"
    weights = load_file(file)
    fused = {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name}
    for layer in range(4):
        below = f"model.layers.{layer}.mlp.experts"
        parts = [
            [weights[f"{below}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")] for expert in range(8)
        ]
        fused[f"{below}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        fused[f"{below}.down_proj"] = torch.stack([down for _, _, down in parts])
    save_file(fused, file)
    whole, apart = Qwen3_5Oracle.load(copied), Qwen3_5Oracle.load(tiny_checkpoint(ENGINE, architecture=MOE_TEXT))
    assert whole.config == apart.config
    assert_same_tensors(whole, apart)
    one = "model.layers.0.mlp.experts.0.down_proj.weight"
    save_file({one: weights[one]}, copied / "model-00002-of-00002.safetensors")
    with pytest.raises(OracleError, match=r"tensor .*experts\..* is doubled"):
        Qwen3_5Oracle.load(copied)


@pytest.mark.parametrize("copied", [DENSE_WHOLE], indirect=True)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "language_model.lm_head.weight", "model.audio.weight"])
def test_tensors_from_elsewhere_are_refused(copied: Path, name: str) -> None:
    save_file({name: torch.zeros(1)}, copied / "model-00002-of-00002.safetensors")
    with pytest.raises(OracleError, match=f"tensor {name} is unknown"):
        Qwen3_5Oracle.load(copied)
