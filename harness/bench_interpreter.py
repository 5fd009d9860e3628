"""What interpreting a kernel costs: replay decode with all programs at once beside Triton's own interpreter.

Both run the same launch on the same bytes in one process; every byte they leave must agree. Measured is the time of the
processor, which a busy machine counts like an idle one; ours is the best of some rounds, the other's single.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass

import torch

from ..cases.geometry import ENGINE, QWEN3_5, Geometry
from ..kernels.decode_launch import LAUNCH_CONFIGS, Launch, replay_launch
from .bench_step import BenchStep, StepDtypes, random_step
from .figure import Figure
from .interpreter import interpreted, run_stock

BUFFER_LEN = 16
ROUNDS = 5
# a program takes Triton's interpreter up to so long, in seconds
STOCK_PROGRAM = 0.06
FP32 = StepDtypes(torch.float32, torch.float32, torch.float32)
FP16 = StepDtypes(torch.float16, torch.float16, torch.float16)


@dataclass(frozen=True)
class Setting:
    """One comparison: sizes, dtypes, and how many times faster it must be."""

    name: str
    geometry: Geometry
    rows: int
    dtypes: StepDtypes
    least: float


SETTINGS = (
    Setting("4 rows, HV 4, K 64, fp32", ENGINE, 4, FP32, 20),
    Setting("4 rows, HV 4, K 64, fp16", ENGINE, 4, FP16, 20),
    Setting("8 rows, HV 32, K 128, fp32", QWEN3_5["qwen3.5-9b"], 8, FP32, 100),
)


def bench_interpreter(seed: int) -> list[Figure]:
    """Seconds of both interpreters for each setting and their ratio, with a complaint where bytes differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [figure for setting in SETTINGS for figure in compare(setting, seed)]
    finally:
        torch.set_num_threads(threads)


def compare(setting: Setting, seed: int) -> list[Figure]:
    """One launch of mixed rows (padding, appends, a flush) in both interpreters."""
    step = mixed_step(setting, seed)
    theirs, mine = copy.deepcopy(step), copy.deepcopy(step)
    programs = _programs(launch(step))
    if programs * STOCK_PROGRAM > 10:
        wait = f"{programs} programs in Triton's own interpreter take up to {programs * STOCK_PROGRAM:.0f} s"
        print(f"replay-parity: {setting.name}: {wait}", file=sys.stderr, flush=True)
    slow = _stock_seconds(theirs)
    fast = min(_seconds(mine if last else copy.deepcopy(step)) for last in [False] * ROUNDS + [True])
    ratio = slow / fast
    name = f"{setting.name}, {programs} programs"
    return [
        Figure(f"{name}, Triton's interpreter", slow, "s"),
        Figure(f"{name}, ours", fast, "s", differing(mine, theirs)),
        Figure(f"{name}, faster", ratio, "times", f"at least {setting.least:g}" if ratio < setting.least else ""),
    ]


def mixed_step(setting: Setting, seed: int) -> BenchStep:
    """Rows at unlike ring positions, every fourth flushing, the last one padding."""
    cursor = [(BUFFER_LEN - 1, True) if row % 4 == 2 else (5 * row % BUFFER_LEN, False) for row in range(setting.rows)]
    step = random_step(setting.geometry, BUFFER_LEN, cursor, seed=seed, dtypes=setting.dtypes)
    step.slots[-1] = 0
    step.out.fill_(7)
    return step


def differing(mine: BenchStep, theirs: BenchStep) -> str:
    """Which tensors differ in a byte, "" if none does."""
    pairs = {
        "out": (mine.out, theirs.out),
        "state": (mine.state, theirs.state),
        **{f"ring {name}": pair for name, *pair in zip("dkg", mine.ring, theirs.ring, strict=True)},
    }
    names = [name for name, (a, b) in pairs.items() if not torch.equal(a.view(torch.uint8), b.view(torch.uint8))]
    return f"other bytes than Triton's interpreter in {', '.join(names)}" if names else ""


def launch(step: BenchStep) -> Launch:
    """The launch of a replay step."""
    a_log, dt_bias = step.layer
    ring_d, ring_k, ring_g = step.ring
    cursor = (step.slots, *step.cursor)
    config = LAUNCH_CONFIGS["default"].replay
    return replay_launch(
        step.token, (a_log, dt_bias), step.state, (ring_d, ring_k, ring_g), cursor, step.out, True, config
    )


def _programs(made: Launch) -> int:
    x, y, z = made.grid
    return x * y * z


def _seconds(step: BenchStep) -> float:
    made = launch(step)
    with interpreted(unsupported="raise"):
        started = time.process_time()
        made.kernel[made.grid](*made.arguments, **made.constants)
        return time.process_time() - started


def _stock_seconds(step: BenchStep) -> float:
    made = launch(step)
    started = time.process_time()
    run_stock(made.kernel, made.grid, made.arguments, made.constants)
    return time.process_time() - started
