"""What a wrong row of the exact regime gave, and which integers it may stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..oracles.memory import ALL_KEYS, BoolArray, IntArray, query_divisor
from .guesses import Guess
from .what_if import Heads, Scene
from .whole import shows, slack

# far over any sum of values, far under what int64 holds
BEYOND = 2.0**60


@dataclass(frozen=True)
class Seen:
    """What a row gave: ``outputs`` [HV, V] of its query, or ``state`` [HV, V, K] after its flush; heads that are wrong.

    One of the two is None. Dtypes are those of the run.
    """

    outputs: Tensor | None
    state: Tensor | None
    bad: tuple[int, ...]


class Reading:
    """A row's values beside the right ones. A wrong state is looked at like an answer about its first wrong key.

    ``asked`` [HV]: the key that each head's value is about, or ALL_KEYS; ``right`` [HV, V]: the integers it should be.
    """

    def __init__(self, heads: Heads, scene: Scene, seen: Seen) -> None:
        self.heads, self.seen = heads, seen
        self.num_keys = heads.ops.num_keys
        self.is_output = seen.state is None
        state = heads.after(scene.last)
        self.asked = heads.ops.asked[scene.last] if seen.state is None else _first_wrong_keys(seen.state, state)
        self.right = heads.read(state, self.asked)

    def stored(self, head: int) -> Tensor:
        """[V] as stored: the head's output, or its state under its first wrong key."""
        if self.seen.state is not None:
            return self.seen.state[head, :, int(self.asked[head])]
        assert self.seen.outputs is not None
        return self.seen.outputs[head]

    def lanes(self, head: int, totals: IntArray, asked: int | None = None) -> BoolArray:
        """[..., V] of integers [..., V]: would this lane have been stored as it was?"""
        divisor = self.divisor(head, asked)
        allowed = slack(self.num_keys) / divisor if self.is_output else 0.0
        same: BoolArray = shows(self.stored(head), torch.from_numpy(totals / divisor), allowed).numpy()
        return same

    def gives(self, head: int, totals: IntArray, asked: int | None = None) -> BoolArray:
        """[...] of integers [..., V]: would this have been stored as it was?"""
        return np.asarray(self.lanes(head, totals, asked).all(-1))

    def given_by(self, guess: Guess) -> list[int]:
        """Heads whose output, or whole state, a guess gives."""
        if self.is_output:
            asked = guess.asked.tolist()
            return [head for head in self.heads.all.tolist() if self.gives(head, guess.total[head], asked[head])]
        assert self.seen.state is not None
        same = _by_key(self.seen.state, self.heads.keys) == torch.from_numpy(guess.state)
        return [head for head, given in enumerate(same.flatten(1).all(1).tolist()) if given]

    def numbers(self, head: int) -> np.ndarray:
        """[V] what was stored, times its divisor: integers where all is well."""
        stored: np.ndarray = self.stored(head).double().numpy()
        return stored * self.divisor(head, None)

    def is_whole(self, head: int) -> bool:
        """True where every lane may stand for an integer; what is beyond all sums is none of ours."""
        numbers = np.clip(np.nan_to_num(self.numbers(head)), -BEYOND, BEYOND)
        return bool(self.gives(head, np.rint(numbers).astype(np.int64)))

    def divisor(self, head: int, asked: int | None) -> float:
        """An output is an integer over this; 1 in a state."""
        if not self.is_output:
            return 1.0
        return float(query_divisor(np.asarray(self.asked[head] if asked is None else asked), self.num_keys))

    def names_a_key(self, head: int) -> bool:
        """True where the head's value is that of one token at most."""
        return bool(self.asked[head] != ALL_KEYS)


def _by_key(state: Tensor, keys: int) -> Tensor:
    """[HV, keys, V] of a state [HV, V, K]: columns of keys that no token uses are left out, being zero."""
    return state[..., :keys].double().transpose(1, 2)


def _first_wrong_keys(state: Tensor, right: IntArray) -> IntArray:
    """[HV]: the first key whose column is wrong; 0 where none is."""
    wrong = (_by_key(state, right.shape[1]) != torch.from_numpy(right)).any(2)
    keys: IntArray = wrong.int().argmax(1).numpy()
    return keys
