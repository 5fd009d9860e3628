"""The trained checkpoint that ships with the package; ``nox -s checkpoint`` makes it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAINED = Path(__file__).parent / "trained_checkpoint"
CARD = "card.json"


def trained_checkpoint() -> Path:
    """Directory with config.json and model.safetensors, a byte-level model: its token ids are bytes.

    Raises FileNotFoundError where the package came without it.
    """
    if not (TRAINED / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"trained checkpoint: there is no model.safetensors in {TRAINED}; run nox -s checkpoint"
        )
    return TRAINED


def trained_card() -> dict[str, Any]:
    """What was measured after training: parameters, bits_per_byte, quantiles of alpha and beta, steps, seed."""
    card: dict[str, Any] = json.loads((TRAINED / CARD).read_text(encoding="utf-8"))
    return card
