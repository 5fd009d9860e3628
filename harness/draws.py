"""Seeded draws of a checkpoint's tensors."""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from numpy.typing import NDArray


class Draws:
    """Tensors by name: each has its own random stream, so adding one changes no other."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, name: str, *size: int, std: float) -> None:
        """Independent normal values of mean 0."""
        self._keep(name, self._stream(name).standard_normal(size) * std)

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """A [rows, columns] weight that takes unit-variance inputs to outputs of standard deviation ``gain``."""
        self.normal(name, rows, columns, std=gain / math.sqrt(columns))

    def constant(self, name: str, size: int, value: float) -> None:
        """One value throughout."""
        self._keep(name, np.full(size, value))

    def log_decay_rate(self, name: str, size: int) -> None:
        """A_log = log U(1, 16), the law Mamba2 and Gated DeltaNet train from."""
        self._keep(name, np.log(self._stream(name).uniform(1.0, 16.0, size)))

    def dt_bias(self, name: str, size: int) -> None:
        """softplus^-1 of a log-uniform time step in [1e-3, 1e-1], the law Mamba2 and Gated DeltaNet train from."""
        step = np.exp(self._stream(name).uniform(math.log(1e-3), math.log(1e-1), size))
        self._keep(name, step + np.log(-np.expm1(-step)))

    def _stream(self, name: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed, zlib.crc32(name.encode())]))

    def _keep(self, name: str, values: NDArray[np.float64]) -> None:
        self.tensors[name] = torch.from_numpy(values.astype(np.float32))
