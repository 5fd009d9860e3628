"""How this tests the decode operators bit for bit, in plain words.

With one-hot keys, write strength 0 or 1, decay all or nothing and small integers as values, a value head of GDN is a
dictionary: set, skip, clear. Every correct implementation then gives the same bits in every dtype, so a python dict
per head is the judge: outputs at every step, states at every flush. The first key head asks for one key, the second
asks for the sum over all keys, which shows every pending term. Rules of the operator are then broken one by one to
show that the judge rejects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from replay_parity.kernels import decode_torch
from replay_parity.kernels.decode import gdn_packed_decode, gdn_replay_decode

K, V, H, HV = 16, 4, 2, 4
MAGNITUDE = 64
NUM_KEYS = 6
# six values of at most 40 sum to 240: an integer of 8 bits, exact in bfloat16
MAX_VALUE = 40
CLEAR_PROBABILITY = (0.0, 0.3, 0.02, 0.5)
SKIP_PROBABILITY = (0.0, 0.2, 0.0, 0.1)

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
DTYPES = [
    (activation, ring, state)
    for activation in (torch.float32, torch.float16, torch.bfloat16)
    for ring in (torch.float32, torch.float16, torch.bfloat16)
    for state in (torch.float32, torch.bfloat16)
]

# called with unpacked lists, whose lengths a type checker cannot see
replay: Callable[..., torch.Tensor] = gdn_replay_decode
packed_step: Callable[..., torch.Tensor] = gdn_packed_decode


class Heads:
    """One request's value heads as dictionaries from key to value lanes."""

    def __init__(self) -> None:
        self.heads: list[dict[int, np.ndarray[Any, Any]]] = [{} for _ in range(HV)]

    def step(
        self, key: int, asked: int, value: np.ndarray[Any, Any], clear: np.ndarray[Any, Any], skip: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Apply one token, then answer: the asked key for heads 0 and 1, the sum over keys for heads 2 and 3."""
        for head, memory in enumerate(self.heads):
            if clear[head]:
                memory.clear()
            if not skip[head]:
                memory[key] = value[head]
        zero = np.zeros(V)
        one_key = [self.heads[head].get(asked, zero) for head in (0, 1)]
        all_keys = [sum(self.heads[head].values(), zero) for head in (2, 3)]
        return np.array(one_key + all_keys)

    def state(self) -> torch.Tensor:
        """State matrices [HV, V, K]."""
        matrix = torch.zeros(HV, V, K)
        for head, memory in enumerate(self.heads):
            for key, value in memory.items():
                matrix[head, :, key] = torch.from_numpy(value)
        return matrix


def mismatches(dtypes: Dtypes, buffer_len: int, num_steps: int = 40, num_rows: int = 3, seed: int = 0) -> list[str]:
    """Play random tokens on requests with rings of their own; names every (step, row) that differs from the dicts."""
    activation, ring, state_dtype = dtypes
    draw = np.random.default_rng(seed)
    slots = torch.from_numpy(1 + draw.permutation(num_rows + 1)[:num_rows])
    state = torch.zeros(num_rows + 2, HV, V, K, dtype=state_dtype)
    packed_state = torch.zeros(num_rows + 2, HV, V, K, dtype=state_dtype)
    ring_d = torch.full((num_rows + 2, HV, buffer_len, V), float("nan"), dtype=ring)
    ring_k = torch.full((num_rows + 2, H, buffer_len, K), float("nan"), dtype=ring)
    ring_g = torch.full((num_rows + 2, HV, buffer_len), float("nan"))
    requests = [Heads() for _ in range(num_rows)]
    pending = np.zeros(num_rows, dtype=np.int64)
    # q = 64 everywhere normalises to 1/4 a lane; both heads are scaled by K**-0.5 = 1/4
    scale = np.array([4.0, 4.0, 16.0, 16.0])[:, None]
    found = []
    for step in range(num_steps):
        live = draw.random(num_rows) < 0.85
        is_flush = (pending == buffer_len - 1) | (draw.random(num_rows) < 0.05)
        key = draw.integers(0, NUM_KEYS, num_rows)
        asked = draw.integers(0, NUM_KEYS, num_rows)
        value = draw.integers(0, MAX_VALUE + 1, (num_rows, HV, V)).astype(np.float64)
        clear = draw.random((num_rows, HV)) < CLEAR_PROBABILITY
        skip = draw.random((num_rows, HV)) < SKIP_PROBABILITY

        q = torch.full((num_rows, H, K), float(MAGNITUDE), dtype=activation)
        q[:, 0] = MAGNITUDE * torch.eye(K, dtype=activation)[asked]
        k = (MAGNITUDE * torch.eye(K, dtype=activation)[key])[:, None].expand(num_rows, H, K)
        token = [q, k] + [
            torch.from_numpy(array).to(activation)
            for array in (value, np.where(clear, 1000.0, -200.0), np.where(skip, -200.0, 200.0))
        ]
        gates = (torch.zeros(HV), torch.zeros(HV))
        row_slots = torch.where(torch.from_numpy(live), slots, 0)
        out = replay(
            *token, *gates, state, ring_d, ring_k, ring_g, row_slots,
            torch.from_numpy(pending.copy()), torch.from_numpy(is_flush),
        )  # fmt: skip
        packed_out = packed_step(*token, *gates, packed_state, row_slots)
        for row in range(num_rows):
            if not live[row]:
                found += [f"step {step} row {row}: padding"] * bool(out[row].any() or packed_out[row].any())
                continue
            answer = requests[row].step(key[row], asked[row], value[row], clear[row], skip[row]) / scale
            expected = torch.from_numpy(answer).to(activation)
            found += [f"step {step} row {row}: output"] * (not torch.equal(out[row], expected))
            found += [f"step {step} row {row}: packed output"] * (not torch.equal(packed_out[row], expected))
            if is_flush[row]:
                matrix = requests[row].state().to(state_dtype)
                found += [f"step {step} row {row}: state"] * (not torch.equal(state[slots[row]], matrix))
                found += [f"step {step} row {row}: packed state"] * (not torch.equal(packed_state[slots[row]], matrix))
        pending = np.where(live, np.where(is_flush, 0, pending + 1), pending)
    return found


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x).removeprefix("torch.") for x in d))
@pytest.mark.parametrize("buffer_len", [1, 3, 16])
def test_bits_equal_a_dictionary(dtypes: Dtypes, buffer_len: int) -> None:
    assert mismatches(dtypes, buffer_len) == []


def _skip_alpha(token: decode_torch.Token, recalled: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return recalled + delta * (token.k * token.q).sum(-1, keepdim=True)


BROKEN: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "prefix decay": ("decay_since", lambda g: g.cumsum(-1)),
    "no decay of entries": ("decay_since", torch.zeros_like),
    "no alpha": ("attend", _skip_alpha),
    "checkpoint only": (
        "recall",
        lambda checkpoint, pending, x: pending.total * decode_torch.read_state(checkpoint, x),
    ),
    "undecayed checkpoint": (
        "recall",
        lambda checkpoint, pending, x: (
            decode_torch.read_state(checkpoint, x)
            + (pending.d * (pending.weight * (pending.k * x[:, :, None, :]).sum(-1))[..., None]).sum(-2)
        ),
    ),
    "wrong key head": ("key_head_of", lambda h, hv, device: torch.arange(hv, device=device) % h),
    "flush keeps the old state": ("fold", lambda checkpoint, pending, token, delta: checkpoint),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_rejected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, wrong = BROKEN[name]
    monkeypatch.setattr(decode_torch, rule, wrong)
    found = mismatches((torch.float32, torch.float32, torch.float32), 4)
    assert found
