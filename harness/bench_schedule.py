"""What the schedule level costs: cases a second, and rows a second beside a plain loop over rows, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..cases.geometry import TINY, Geometry
from ..kernels.decode import gdn_replay_decode
from .explore import chunks, explore
from .figure import Figure
from .judge_case import judge_case
from .schedule_path import SchedulePath

ROUNDS = 5
CASES = 50
BUFFER_LEN = 16
ROW_COUNTS = (1, 4, 32)


def bench_schedule(seed: int) -> list[Figure]:
    """Cases a second (one thread), row-steps a second batched and row by row, and their ratio."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [_cases(seed)]
        for rows in ROW_COUNTS:
            figures += _rows(rows, seed)
        return figures
    finally:
        torch.set_num_threads(threads)


def _cases(seed: int) -> Figure:
    path = SchedulePath()
    started = time.perf_counter()
    judged = [one for chunk in chunks("schedule", seed, CASES) for one in explore(chunk, lambda c: judge_case(path, c))]
    return Figure("generated cases judged", len(judged) / (time.perf_counter() - started), "cases/s")


def _rows(rows: int, seed: int) -> list[Figure]:
    """Both ways in turn, best of the rounds: the machine's speed drifts, their ratio does not."""
    step = _Step(TINY, rows, seed)
    batched, plain = float("inf"), float("inf")
    for _ in range(ROUNDS):
        batched = min(batched, _seconds(step.batched))
        plain = min(plain, _seconds(step.row_by_row))
    return [
        Figure(f"{rows} rows, batched", rows / batched, "row-steps/s"),
        Figure(f"{rows} rows, plain loop", rows / plain, "row-steps/s"),
        Figure(f"{rows} rows, batched over plain", plain / batched, "times"),
    ]


def _seconds(work: Callable[[], None]) -> float:
    work()
    started = time.perf_counter()
    for _ in range(5):
        work()
    return (time.perf_counter() - started) / 5


class _Step:
    """One decode step of ``rows`` rows in mid-ring, each in a slot of its own."""

    def __init__(self, geometry: Geometry, rows: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random)

        heads, value_heads = geometry.num_k_heads, geometry.num_v_heads
        key_dim, value_dim = geometry.head_k_dim, geometry.head_v_dim
        slots = rows + 1
        self.rows = rows
        self.token = (draw(rows, heads, key_dim), draw(rows, heads, key_dim), draw(rows, value_heads, value_dim))
        self.gates = (draw(rows, value_heads), draw(rows, value_heads))
        self.layer = (torch.zeros(value_heads), torch.full((value_heads,), -4.0))
        self.memory = (
            draw(slots, value_heads, value_dim, key_dim),
            draw(slots, value_heads, BUFFER_LEN, value_dim),
            draw(slots, heads, BUFFER_LEN, key_dim),
            -draw(slots, value_heads, BUFFER_LEN).abs(),
        )
        self.slots = torch.arange(1, slots)
        self.write_pos = torch.arange(rows, dtype=torch.int32) % BUFFER_LEN
        self.is_flush = self.write_pos == BUFFER_LEN - 1

    def batched(self) -> None:
        """All rows in one call."""
        self._decode(slice(None))

    def row_by_row(self) -> None:
        """The plain loop: one call a row."""
        for row in range(self.rows):
            self._decode(slice(row, row + 1))

    def _decode(self, rows: slice) -> None:
        q, k, v = (x[rows] for x in self.token)
        a, b = (x[rows] for x in self.gates)
        cursor = (self.slots[rows], self.write_pos[rows], self.is_flush[rows])
        gdn_replay_decode(q, k, v, a, b, *self.layer, *self.memory, *cursor)
