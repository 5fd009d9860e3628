"""The exact regime's truth: each value head is a dictionary from key to value, and a token sets, skips or clears.

What Gated DeltaNet does with the inputs of the exact regime, said without linear algebra: decay 0 empties the
dictionary, write strength 1 puts the value under the token's key (the delta rule first takes the old one out), write
strength 0 leaves it alone; a one-hot query gets the value under its key, a query of all ones the sum of all values.
Only inputs of exactly that form are taken: anything else would be rounded somewhere, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cases.inputs import LayerInputs

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

# asked for by a query of all ones
ALL_KEYS = -1
# under a key that nobody has set
NOBODY = -1

# from here on sigmoid is exactly 0 or 1, softplus exactly 0, and exp(-softplus) exactly 0, all in float32
SURE = 200.0
FORGETS = 1000.0
# a sixteenth of 2^24, up to which float32 counts without a gap: sums of a few values stay exact
LARGEST_VALUE = 2**20


class OracleError(ValueError):
    """Inputs that are not of the exact form; the message names the tensor and the place."""


@dataclass(frozen=True)
class MemoryOps:
    """What each token does, for R requests of at most T tokens, per value head.

    ``length`` [R]: tokens of each request. ``key``, ``asked`` [R, T, HV]: the token's key; the key that its query asks
    for, or ALL_KEYS. ``clear``, ``write`` [R, T, HV]. ``value`` [R, T, HV, V] integers. ``num_keys``: K.
    """

    length: IntArray
    key: IntArray
    asked: IntArray
    clear: BoolArray
    write: BoolArray
    value: IntArray
    num_keys: int


@dataclass(frozen=True)
class MemoryTruth:
    """Dictionaries played over whole requests.

    ``total`` [R, T, HV, V]: what each token's query adds up to, integers. ``holder`` [R, T, HV, K]: after each token,
    the position of the token whose value stands under a key, or NOBODY. Past a request's end both are meaningless.
    """

    ops: MemoryOps
    total: IntArray
    holder: IntArray

    @property
    def divisor(self) -> FloatArray:
        """[R, T, HV]: an output is ``total`` over this."""
        return query_divisor(self.ops.asked, self.ops.num_keys)

    @property
    def outputs(self) -> Tensor:
        """Outputs [R, T, HV, V] float64, NaN past a request's end."""
        outputs = torch.from_numpy(self.total / self.divisor[..., None])
        outputs[torch.from_numpy(~self._lives())] = float("nan")
        return outputs

    @property
    def states(self) -> Tensor:
        """State after each token [R, T, HV, V, K] float64, NaN past a request's end: values in their key's column."""
        R, T, HV, V = self.ops.value.shape
        states = np.zeros((R, T, HV, V, self.ops.num_keys))
        for r, t, h, key in np.argwhere(self.holder != NOBODY):
            states[r, t, h, :, key] = self.ops.value[r, self.holder[r, t, h, key], h]
        states[~self._lives()] = np.nan
        return torch.from_numpy(states)

    def holders(self, request: int, position: int, head: int) -> dict[int, int]:
        """After the token at ``position``: under each key that is set, which token's value stands there."""
        row = self.holder[request, position, head]
        return {int(key): int(row[key]) for key in np.flatnonzero(row != NOBODY)}

    def _lives(self) -> BoolArray:
        positions = np.arange(self.ops.value.shape[1])
        lives: BoolArray = positions < self.ops.length[:, None]
        return lives


def query_divisor(asked: IntArray, num_keys: int) -> FloatArray:
    """[...] of asked [...]: sqrt(K), the query scale; K for a query of ones, whose lanes are 1 / sqrt(K) themselves."""
    return np.where(asked == ALL_KEYS, float(num_keys), float(np.sqrt(num_keys)))


def memory_truth(inputs: LayerInputs) -> MemoryTruth:
    """Play the dictionaries of every request and value head. Raises OracleError for inputs of another form."""
    ops = read_ops(inputs)
    R, T, HV, V = ops.value.shape
    total = np.zeros((R, T, HV, V), np.int64)
    holder = np.full((R, T, HV, ops.num_keys), NOBODY, np.int64)
    for request in range(R):
        for head in range(HV):
            memory: dict[int, int] = {}
            for position in range(int(ops.length[request])):
                at = request, position, head
                if ops.clear[at]:
                    memory.clear()
                if ops.write[at]:
                    memory[int(ops.key[at])] = position
                for key, who in memory.items():
                    holder[request, position, head, key] = who
                    if ops.asked[at] in (key, ALL_KEYS):
                        total[at] += ops.value[request, who, head]
    return MemoryTruth(ops, total, holder)


def read_ops(inputs: LayerInputs) -> MemoryOps:
    """What each token does. Raises OracleError where the tensors say anything but set, skip, clear and ask."""
    q, k, v, a, b = (x.double().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b))
    if inputs.A_log.any() or inputs.dt_bias.any():
        raise OracleError("A_log, dt_bias: must be zero: the decay is then softplus(a) itself")
    HV, num_keys = v.shape[2], k.shape[3]
    spread = np.arange(HV) // (HV // k.shape[2])
    length = _lengths(k)
    lives = np.arange(k.shape[1]) < length[:, None]
    _check("k", _is_one_hot(k), lives, "must be one-hot")
    _check("q", _is_one_hot(q) | _is_level(q), lives, "must be one-hot or the same in every lane")
    _check("b", np.abs(b) >= SURE, lives, f"must be at least {SURE:g} in size: write strength exactly 0 or 1")
    _check("a", (a <= -SURE) | (a >= FORGETS), lives, f"must be <= {-SURE:g} or >= {FORGETS:g}: decay exactly 1 or 0")
    whole = (v >= 0) & (v <= LARGEST_VALUE) & (v == np.floor(v))
    _check("v", whole, lives, f"must be a whole number from 0 to {LARGEST_VALUE}")
    asked = np.where(_is_one_hot(q), q.argmax(-1), ALL_KEYS)
    return MemoryOps(length, k.argmax(-1)[..., spread], asked[..., spread], a > 0, b > 0, v.astype(np.int64), num_keys)


def _lengths(k: FloatArray) -> IntArray:
    """[R]: a request ends where its keys are zero from there on."""
    used = np.abs(k).sum((2, 3)) != 0
    return np.where(used.any(1), used.shape[1] - used[:, ::-1].argmax(1), 0).astype(np.int64)


def _is_one_hot(x: FloatArray) -> BoolArray:
    """[...] of x [..., K]: one lane set, all others zero; its size is lost in the L2 norm without a trace."""
    one_hot: BoolArray = ((x != 0).sum(-1) == 1) & _norms_exactly(x.max(-1))
    return one_hot


def _is_level(x: FloatArray) -> BoolArray:
    """[...] of x [..., K]: every lane the same."""
    level: BoolArray = (x == x[..., :1]).all(-1) & _norms_exactly(x.max(-1))
    return level


def _norms_exactly(size: FloatArray) -> BoolArray:
    """A power of two from 64 on: its square swallows the norm's epsilon of 1e-6 in float32, its root is exact."""
    mantissa, _ = np.frexp(size)
    exact: BoolArray = (mantissa == 0.5) & (size >= 64.0)
    return exact


def _check(name: str, right: BoolArray, lives: BoolArray, rule: str) -> None:
    """right [R, T, ...], looked at where lives [R, T]."""
    wrong = np.argwhere(~right & lives.reshape(*lives.shape, *[1] * (right.ndim - 2)))
    if len(wrong):
        raise OracleError(f"{name}{wrong[0].tolist()}: {rule}: not an input of the exact regime")
