"""The exact regime: inputs that make each value head a dictionary (set, skip, clear), so that every correct
implementation gives the same bits in every dtype.

Keys are one-hot and normalise to exactly 1; write strength is exactly 0 or 1 and decay exactly 1 or 0 in float32;
values are small integers, so that no sum is ever rounded. A token sets the value under one of a few keys, which come
round in turn; a one-hot query names the token that it finds, a query of all ones adds up everything that is held.
"""

from __future__ import annotations

import math

import numpy as np

from .case import Case
from .geometry import Geometry
from .layer_tensors import LayerInputs, float32, pack, sequence_lengths

# x / sqrt(x^2 + 1e-6) of a one-hot 64 is exactly 1 in float32: 4096 + 1e-6 rounds to 4096
MAGNITUDE = 64.0
# gate inputs a, with A_log = dt_bias = 0: g = -softplus(a) is 0 or -1000, exp(g) exactly 1 or 0 (-80 and -100 leave a
# residue in float64, -inf gives NaN); write inputs b: sigmoid is exactly 0 or 1 in float32. All exact in 16 bits.
KEEP, CLEAR = -200.0, 1000.0
WRITE, SKIP = 200.0, -200.0
# keys in turn: enough of them that a wrong value lives for some tokens before it is overwritten. Now and then a token
# takes the key before its own: two rows of a short ring then meet, or a ring left out of the delta rule goes unseen
NUM_KEYS = 6
REPEAT = 0.2
# by value head, in turn. Without any clear a wrong decay changes nothing; without any skip each error is overwritten
CLEAR_PROBABILITY = (0.0, 0.3, 0.02, 0.5)
SKIP_PROBABILITY = (0.0, 0.2, 0.0, 0.1)
# share of one-hot queries of even key heads; odd ones ask for everything. A single key head has to do both evenly
ONE_HOT, ONE_HOT_ALONE = 0.7, 0.5
# integers from 0 to this one are all exact
LARGEST_EXACT = {"bfloat16": 256, "float16": 2048, "float32": 2**20}
# where 1 / sqrt(K) is no power of two the scale rounds: values stay small, so that integers stay far apart (the judge's
# limit and its evidence stand in harness/whole.py)
LARGEST_SCALED = 32


def exact_inputs(case: Case) -> LayerInputs:
    """The tensors of a Case, drawn from its seed by request. Values are from 0 to ``largest_value(case)``."""
    requests = range(len(case.requests))
    lengths = sequence_lengths(case)
    geometry = case.geometry
    rngs = {name: [_rng(case, request, kind) for request in requests] for kind, name in enumerate("qkvab")}
    parts = {
        "q": [_queries(rngs["q"][r], lengths[r], geometry) for r in requests],
        "k": [_keys(rngs["k"][r], lengths[r], geometry) for r in requests],
        "v": [_values(rngs["v"][r], r, lengths[r], geometry, largest_value(case)) for r in requests],
        "a": [_gates(rngs["a"][r], lengths[r], geometry, CLEAR_PROBABILITY, CLEAR, KEEP) for r in requests],
        "b": [_gates(rngs["b"][r], lengths[r], geometry, SKIP_PROBABILITY, SKIP, WRITE) for r in requests],
    }
    packed = {name: pack(case, part) for name, part in parts.items()}
    none = float32(np.zeros(geometry.num_v_heads))
    return LayerInputs(**packed, A_log=none, dt_bias=none.clone())


def largest_value(case: Case) -> int:
    """Largest value of a lane: it, any difference of two, and any sum that a decoder could form, are exact.

    Corrected values of one key alternate (new - old), so that a sum over any of n of them is at most ceil((n + 1) / 2)
    values; over a ring of L entries and the checkpoint, for ``NUM_KEYS`` keys: (L + 2 NUM_KEYS) / 2 values. That many
    must stay within the 2^24 that float32 counts without a gap.
    """
    replay = case.replay
    stored = min(LARGEST_EXACT[name] for name in (replay.activation_dtype, replay.state_dtype, replay.ring_dtype))
    summed = 2**25 // (replay.buffer_len + 2 * NUM_KEYS)
    if scales_exactly(case.geometry.head_k_dim):
        return min(stored, summed)
    # errors grow with the number of terms: small values again in the very long rings
    return min(LARGEST_SCALED, 2**13 // (replay.buffer_len + 2 * NUM_KEYS))


def scales_exactly(head_k_dim: int) -> bool:
    """True where 1 / sqrt(K) is a power of two (K = 1, 4, 16, 64, 256, ...): outputs then have exact bits."""
    root = math.isqrt(head_k_dim)
    return root * root == head_k_dim and root & (root - 1) == 0


def num_keys(geometry: Geometry) -> int:
    """Keys in use, all of them below this index."""
    return min(NUM_KEYS, geometry.head_k_dim)


def _rng(case: Case, request: int, kind: int) -> np.random.Generator:
    return np.random.default_rng([case.inputs.seed, request, 3, kind])


def _keys(rng: np.random.Generator, length: int, geometry: Geometry) -> np.ndarray:
    """[T, H, K] one-hot, keys in turn with repeats; each head starts at another one."""
    turn = np.arange(length)[:, None] + np.arange(geometry.num_k_heads)
    turn = turn + num_keys(geometry) - (rng.random(turn.shape) < REPEAT)
    one_hot: np.ndarray = np.eye(geometry.head_k_dim)[turn % num_keys(geometry)]
    return MAGNITUDE * one_hot


def _queries(rng: np.random.Generator, length: int, geometry: Geometry) -> np.ndarray:
    """[T, H, K]: one-hot for a key in use, or all ones."""
    heads, size = geometry.num_k_heads, geometry.head_k_dim
    share = np.where(np.arange(heads) % 2 == 0, ONE_HOT if heads > 1 else ONE_HOT_ALONE, 0.0)
    one_hot = rng.random((length, heads)) < share
    asked = np.eye(size)[rng.integers(0, num_keys(geometry), (length, heads))]
    return MAGNITUDE * np.where(one_hot[..., None], asked, 1.0)


def _values(rng: np.random.Generator, request: int, length: int, geometry: Geometry, largest: int) -> np.ndarray:
    """[T, HV, V] integers that name their token.

    Lanes, as many as there are: a number that no other head has at this token, position, request, a random number,
    the high part of the position, then random numbers. So from V = 3 on no two tokens share a vector as long as
    requests, positions and heads are fewer than ``largest``; from V = 5 on positions up to its square.
    """
    heads, lanes = geometry.num_v_heads, geometry.head_v_dim
    values: np.ndarray = rng.integers(1, largest + 1, (length, heads, max(lanes, 5)))
    position = np.arange(length)[:, None]
    values[..., 0] = 1 + (values[:, :1, 0] + np.arange(heads)) % largest
    values[..., 1] = position % (largest + 1)
    values[..., 2] = 1 + request % largest
    values[..., 4] = position // (largest + 1) % (largest + 1)
    return values[..., :lanes]


def _gates(
    rng: np.random.Generator,
    length: int,
    geometry: Geometry,
    probability: tuple[float, ...],
    drawn: float,
    otherwise: float,
) -> np.ndarray:
    """[T, HV]: ``drawn`` with the head's probability."""
    # a single value head takes the second column: it must clear and skip, or decay and write strength go untested
    first = 1 if geometry.num_v_heads == 1 else 0
    heads = (np.arange(geometry.num_v_heads) + first) % len(probability)
    return np.where(rng.random((length, geometry.num_v_heads)) < np.array(probability)[heads], drawn, otherwise)
