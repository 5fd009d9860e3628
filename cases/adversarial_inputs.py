"""The adversarial regime: inputs at the edges of what a decode op may meet, all of them finite in every dtype.

A Case's seed draws one family for all heads, or a mixture in which every head has its own. A family of keys shapes q, k
and v of a key head and the value heads that read it; a family of gates shapes a and b of one value head. What a family
does not shape is as plain as in the model_like regime.

Keys, by key head:

- plain: SiLU of unit normals.
- repeated_keys: each token takes one of two fixed keys; queries take one of the same two.
- collinear_keys: k and q are one fixed direction and noise, each token's of 1e-3 to 1e-1 of its length (log-uniform).
- tiny_norm: lengths of q and k from 1e-5 to 1e-2 (log-uniform): around 1e-3 the 1e-6 inside the L2 norm takes over.
- large_values: v of either sign, 8192 to 30000, k one-hot of 1000 to 30000, q uniform within +-30000. In float16 any
  square of them overflows (in float32 none does). Keys that are the same or orthogonal, decays and write strengths of
  at most 1 keep what the state answers within the largest value, so a corrected value stays below 60160 and the state
  below 30080: a right implementation overflows nowhere.

Gates, by value head:

- plain: b unit normal, a too, around a rest of the head's own that makes softplus(a) about 1e-3 to 1e-1.
- long_memory: a in [-16, -8]: log decay g from about -5e-3 to -1e-7.
- hard_forgetting: every other token on average has a in [3, 20]: g from -3 to -320, where exp(g) underflows; the others
  are plain.
- write_extremes: b in +-[6, 30]: write strengths from 1e-13 to 2.5e-3, and as near to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .case import Case
from .layer_tensors import LayerInputs, float32, pack, sequence_lengths

KEYS = ("repeated_keys", "collinear_keys", "tiny_norm", "large_values")
GATES = ("long_memory", "hard_forgetting", "write_extremes")
FAMILIES = (*KEYS, *GATES, "mixture")

TINY_NORMS = (1e-5, 1e-2)
NOISE = (1e-3, 1e-1)
LARGEST = 30000.0
LARGE_VALUES, LARGE_KEYS = (8192.0, LARGEST), (1000.0, LARGEST)
LONG_MEMORY, FORGETTING = (-16.0, -8.0), (3.0, 20.0)
WRITES = (6.0, 30.0)


@dataclass(frozen=True)
class Families:
    """What a Case's heads get: ``keys`` by key head, ``gates`` by value head; ``name`` is one of ``FAMILIES``."""

    name: str
    keys: tuple[str, ...]
    gates: tuple[str, ...]


def families(case: Case) -> Families:
    """The families of a Case, drawn from its seed."""
    rng = np.random.default_rng([case.inputs.seed, 4])
    name = str(rng.choice(FAMILIES))
    heads, value_heads = case.geometry.num_k_heads, case.geometry.num_v_heads
    if name == "mixture":
        keys, gates = rng.choice(("plain", *KEYS), heads), rng.choice(("plain", *GATES), value_heads)
        return Families(name, tuple(keys.tolist()), tuple(gates.tolist()))
    keys_name, gates_name = (name, "plain") if name in KEYS else ("plain", name)
    return Families(name, (keys_name,) * heads, (gates_name,) * value_heads)


def adversarial_inputs(case: Case) -> LayerInputs:
    """The tensors of a Case. A = exp(A_log) is log-uniform in [1, 16] and dt_bias zero, so that ``a`` alone decides."""
    drawn, geometry = families(case), case.geometry
    values = (geometry.heads_per_key, geometry.head_v_dim)
    layer = np.random.default_rng([case.inputs.seed, 5])
    A_log = layer.uniform(0.0, np.log(16.0), geometry.num_v_heads)
    dt = _log_uniform(layer, (1e-3, 1e-1), (geometry.num_v_heads,))
    rest = dt + np.log(-np.expm1(-dt))
    # two keys a head, the same for all requests
    fixed = _silu(layer.standard_normal((geometry.num_k_heads, 2, geometry.head_k_dim)))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in "qkvab"}
    for request, length in enumerate(sequence_lengths(case)):
        shaped = [
            _SHAPES[family](_rng(case, request, 6, head), length, fixed[head], values)
            for head, family in enumerate(drawn.keys)
        ]
        gates = [_gates(_rng(case, request, 7, h), length, family, rest[h]) for h, family in enumerate(drawn.gates)]
        parts["q"].append(np.stack([q for q, _, _ in shaped], axis=1))
        parts["k"].append(np.stack([k for _, k, _ in shaped], axis=1))
        parts["v"].append(np.concatenate([v for _, _, v in shaped], axis=1))
        parts["a"].append(np.stack([a for a, _ in gates], axis=1))
        parts["b"].append(np.stack([b for _, b in gates], axis=1))
    packed = {name: pack(case, part) for name, part in parts.items()}
    return LayerInputs(**packed, A_log=float32(A_log), dt_bias=float32(np.zeros(geometry.num_v_heads)))


def _rng(case: Case, request: int, kind: int, head: int) -> np.random.Generator:
    return np.random.default_rng([case.inputs.seed, request, kind, head])


# q, k [T, K] of one key head and v [T, HV // H, V] of the value heads that read it
_Shaped = tuple[np.ndarray, np.ndarray, np.ndarray]


def _plain(rng: np.random.Generator, length: int, fixed: np.ndarray, values: tuple[int, int]) -> _Shaped:
    size = (length, fixed.shape[-1])
    return _silu(rng.standard_normal(size)), _silu(rng.standard_normal(size)), _plain_values(rng, length, values)


def _repeated(rng: np.random.Generator, length: int, fixed: np.ndarray, values: tuple[int, int]) -> _Shaped:
    q, k = fixed[rng.integers(0, 2, length)], fixed[rng.integers(0, 2, length)]
    return q, k, _plain_values(rng, length, values)


def _collinear(rng: np.random.Generator, length: int, fixed: np.ndarray, values: tuple[int, int]) -> _Shaped:
    direction = fixed[0] / np.linalg.norm(fixed[0])

    def near() -> np.ndarray:
        noise = _log_uniform(rng, NOISE, (length, 1)) * _directions(rng, length, len(direction))
        return np.asarray(direction + noise)

    return near(), near(), _plain_values(rng, length, values)


def _tiny(rng: np.random.Generator, length: int, fixed: np.ndarray, values: tuple[int, int]) -> _Shaped:
    def short() -> np.ndarray:
        norms = _log_uniform(rng, TINY_NORMS, (length, 1))
        return np.asarray(norms * _directions(rng, length, fixed.shape[-1]))

    return short(), short(), _plain_values(rng, length, values)


def _large(rng: np.random.Generator, length: int, fixed: np.ndarray, values: tuple[int, int]) -> _Shaped:
    size = fixed.shape[-1]
    q = rng.uniform(-LARGEST, LARGEST, (length, size))
    k = np.eye(size)[rng.integers(0, size, length)] * rng.uniform(*LARGE_KEYS, (length, 1))
    v = rng.uniform(*LARGE_VALUES, (length, *values)) * rng.choice((-1.0, 1.0), (length, *values))
    return q, k, v


_SHAPES: dict[str, Callable[[np.random.Generator, int, np.ndarray, tuple[int, int]], _Shaped]] = {
    "plain": _plain,
    "repeated_keys": _repeated,
    "collinear_keys": _collinear,
    "tiny_norm": _tiny,
    "large_values": _large,
}


def _gates(rng: np.random.Generator, length: int, family: str, rest: float) -> tuple[np.ndarray, np.ndarray]:
    """a, b [T] of one value head."""
    a, b = rest + rng.standard_normal(length), rng.standard_normal(length)
    if family == "long_memory":
        a = rng.uniform(*LONG_MEMORY, length)
    elif family == "hard_forgetting":
        a = np.where(rng.random(length) < 0.5, rng.uniform(*FORGETTING, length), a)
    elif family == "write_extremes":
        b = rng.uniform(*WRITES, length) * rng.choice((-1.0, 1.0), length)
    return a, b


def _plain_values(rng: np.random.Generator, length: int, values: tuple[int, int]) -> np.ndarray:
    return _silu(rng.standard_normal((length, *values)))


def _directions(rng: np.random.Generator, length: int, size: int) -> np.ndarray:
    """[T, size] of length 1."""
    drawn = rng.standard_normal((length, size))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))


def _log_uniform(rng: np.random.Generator, ends: tuple[float, float], size: tuple[int, ...]) -> np.ndarray:
    low, high = (float(np.log(end)) for end in ends)
    return np.asarray(np.exp(rng.uniform(low, high, size)))


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1.0 + np.exp(-x)))
