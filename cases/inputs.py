"""Regimes: a Case becomes seeded tensors of one GDN layer, or token ids of a whole model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from .adversarial_inputs import adversarial_inputs
from .case import Case
from .exact_inputs import exact_inputs
from .layer_tensors import TORCH_DTYPES, LayerInputs, float32, pack, sequence_lengths
from .timeline import prefix_root

__all__ = ["TORCH_DTYPES", "LayerInputs", "layer_inputs", "poisons", "sequence_lengths", "token_ids"]


def layer_inputs(case: Case) -> LayerInputs:
    """The tensors of a Case's regime. A shared prefix repeats the other request's tokens."""
    draw = _REGIMES.get(case.inputs.regime)
    if draw is None:
        raise ValueError(f"inputs.regime: {case.inputs.regime} is for whole models, use {', '.join(_REGIMES)}")
    return draw(case)


def poisons(case: Case) -> str:
    """What must never be read holds "nan" (even seeds: finds more) or "stale" (odd seeds: names the culprit)."""
    return ("nan", "stale")[case.inputs.seed % 2]


def token_ids(case: Case, vocab_size: int) -> list[list[int]]:
    """Token ids of each request, prompt first, then the outputs that are forced; [prompt_len + output_len] each.

    Uniform over the vocabulary; in regime "trained" bytes of Python source from a place of each request's own, so that
    a model trained on such text knows what comes next and a wrong state costs it dearly.
    """
    sequences: list[list[int]] = []
    for index, request in enumerate(case.requests):
        count = request.prompt_len + request.output_len
        rng = np.random.default_rng([case.inputs.seed, index, 7])
        if case.inputs.regime == "trained":
            text = _source_text()
            own = np.take(text, rng.integers(0, len(text)) + np.arange(count), mode="wrap").tolist()
        else:
            own = rng.integers(0, vocab_size, count).tolist()
        shared = [sequences[other][place] for place in range(count) for other in _source(case, index, place)]
        sequences.append(shared + own[len(shared) :])
    return sequences


@cache
def _source_text() -> np.ndarray:
    """Python source that stays as it is, [N] bytes."""
    return np.frombuffer((Path(__file__).parent / "source_text.txt").read_bytes(), np.uint8).astype(np.int64)


def _source(case: Case, request: int, place: int) -> list[int]:
    root, _ = prefix_root(case, request, place + 1)
    return [] if root == request else [root]


def _model_like(case: Case) -> LayerInputs:
    """Distributions of a trained Qwen3.5: A = exp(A_log) log-uniform in [1, 16], softplus(dt_bias) in [1e-3, 1e-1].

    q, k and v have the magnitudes that SiLU of a unit normal has; the decode op normalises q and k itself.
    """
    geometry = case.geometry
    heads, value_heads = geometry.num_k_heads, geometry.num_v_heads
    layer = np.random.default_rng([case.inputs.seed, 1])
    A_log = layer.uniform(0.0, np.log(16.0), value_heads)
    dt = np.exp(layer.uniform(np.log(1e-3), np.log(1e-1), value_heads))
    lengths = sequence_lengths(case)

    def tokens(request: int, kind: int, *shape: int) -> np.ndarray:
        rng = np.random.default_rng([case.inputs.seed, request, 2, kind])
        return rng.standard_normal((lengths[request], *shape))

    requests = range(len(lengths))
    parts = {
        "q": [_silu(tokens(r, 0, heads, geometry.head_k_dim)) for r in requests],
        "k": [_silu(tokens(r, 1, heads, geometry.head_k_dim)) for r in requests],
        "v": [_silu(tokens(r, 2, value_heads, geometry.head_v_dim)) for r in requests],
        "a": [tokens(r, 3, value_heads) for r in requests],
        "b": [tokens(r, 4, value_heads) for r in requests],
    }
    packed = {name: pack(case, part) for name, part in parts.items()}
    return LayerInputs(**packed, A_log=float32(A_log), dt_bias=float32(dt + np.log(-np.expm1(-dt))))


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1.0 + np.exp(-x)))


_REGIMES = {"exact": exact_inputs, "model_like": _model_like, "adversarial": adversarial_inputs}
