"""Trains the small checkpoint that ships with the package: a byte-level Qwen3.5 text model on Python's own source.

Run as ``python -m replay_parity.harness.training`` (``nox -s checkpoint``). Needs transformers; the seed decides the
data's order and the initial weights, and thread counts may change last bits.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cases.geometry import ENGINE
from .checkpoint import SHAPE, gate_laws, model_config, write_checkpoint
from .cpu_platform import let_transformers_import
from .progress import Progress
from .trained import CARD, TRAINED

WINDOW = 256
BATCH = 12
STEPS = 1100
PEAK_RATE = 3e-3
# the tail of the sorted files is kept for validation
VALIDATION = 0.05
VALIDATION_WINDOWS = 48
QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to validate on, uint8 each."""

    training: Tensor
    validation: Tensor


def main() -> int:
    """Train, measure, write config.json, model.safetensors and card.json."""
    parser = argparse.ArgumentParser(prog="replay_parity.harness.training", description=__doc__)
    parser.add_argument("--out", type=Path, default=TRAINED, help="directory to write (default: the package's own)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.perf_counter()
    corpus = standard_library()
    model = train(corpus, arguments.steps, arguments.seed)
    card = measure(model, corpus) | {"steps": arguments.steps, "seed": arguments.seed}
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(arguments.out, model_config(ENGINE, SHAPE), weights)
    (arguments.out / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    print(f"{card['parameters']} parameters, {card['bits_per_byte']} bits per byte on held-out source, in", end=" ")
    print(f"{(time.perf_counter() - started) / 60:.1f} min: {arguments.out}")
    return 0


def standard_library() -> Corpus:
    """The source files of this Python's standard library, tests left out, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
    files = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    held_out = files[int(len(files) * (1 - VALIDATION)) :]
    training, validation = (
        torch.from_numpy(np.frombuffer(b"".join(path.read_bytes() for path in part), np.uint8).copy())
        for part in (files[: len(files) - len(held_out)], held_out)
    )
    if len(training) < 100 * WINDOW or len(validation) < VALIDATION_WINDOWS * WINDOW:
        raise FileNotFoundError(f"standard library: there is too little source in {root}; install it")
    return Corpus(training, validation)


def train(corpus: Corpus, steps: int, seed: int) -> Any:
    """A transformers model after ``steps`` of AdamW on random windows, cosine decay after a short warm-up."""
    model = _fresh(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = max(1, steps // 20)
    windows = _windows(corpus.training, seed)
    with Progress(steps, 0) as progress:
        for step in range(steps):
            share = (step - warm_up) / max(1, steps - warm_up)
            rate = (step + 1) / warm_up if step < warm_up else 0.5 * (1 + math.cos(math.pi * share))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * rate
            loss = _loss(model, next(windows))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.advance(f"{loss.item() / math.log(2):.2f} bits per byte")
    return model.eval()


def measure(model: Any, corpus: Corpus) -> dict[str, Any]:
    """Bits per byte on held-out windows, and quantiles of alpha and beta over their tokens, layers and heads."""
    gates: dict[str, list[Tensor]] = {"alpha": [], "beta": []}
    hooks = []
    for layer in model.model.layers:
        if not hasattr(layer, "linear_attn"):
            continue
        gdn = layer.linear_attn

        def keep_alpha(_: Any, __: Any, a: Tensor, gdn: Any = gdn) -> None:
            gates["alpha"].append(torch.exp(-gdn.A_log.exp() * torch.nn.functional.softplus(a + gdn.dt_bias)).flatten())

        def keep_beta(_: Any, __: Any, b: Tensor) -> None:
            gates["beta"].append(torch.sigmoid(b).flatten())

        hooks += [gdn.in_proj_a.register_forward_hook(keep_alpha), gdn.in_proj_b.register_forward_hook(keep_beta)]
    starts = np.linspace(0, len(corpus.validation) - WINDOW, VALIDATION_WINDOWS).astype(np.int64)
    windows = torch.stack([corpus.validation[start : start + WINDOW] for start in starts]).long()
    with torch.no_grad():
        loss = float(_loss(model, windows))
    for hook in hooks:
        hook.remove()
    card: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in model.state_dict().values()),
        "bits_per_byte": round(loss / math.log(2), 3),
    }
    for name, kept in gates.items():
        values = torch.cat(kept).double().numpy()
        card[name] = {f"{quantile:.0%}": round(float(np.quantile(values, quantile)), 4) for quantile in QUANTILES}
    return card


def _fresh(seed: int) -> Any:
    """transformers' initial weights, with the gates of model_like: its own ones forget at once."""
    let_transformers_import()
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    fields = {name: value for name, value in model_config(ENGINE, SHAPE).items() if name != "architectures"}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields)).float().train()
    laws = gate_laws(ENGINE, SHAPE, seed)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in laws.items():
            own[name].copy_(values)
    return model


def _windows(source: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches [BATCH, WINDOW] of token ids."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(source) - WINDOW, (BATCH,), generator=random)
        yield torch.stack([source[start : start + WINDOW] for start in starts.tolist()]).long()


def _loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, nats."""
    logits = model(input_ids=windows, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), windows[:, 1:].reshape(-1))


if __name__ == "__main__":
    raise SystemExit(main())
