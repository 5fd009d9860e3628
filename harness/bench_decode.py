"""Time of a decode step on a CUDA device: replay beside packed decode and, where vLLM is installed, its packed kernel.

Steady state: the rows of a batch stand at staggered ring positions, and one measurement runs a whole ring cycle of
steps as one CUDA graph, each step on slots that the cache does not hold; its median over the cycle's length is the time
of a step. Share of bandwidth: bytes that a step cannot avoid (state, live entries, the entry or state written) over
its time, against a large copy measured in the same run. Outputs are compared first: no speed-up on wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..cases.geometry import QWEN3_5, Geometry
from ..kernels.decode import Backend
from .bench_step import BenchStep, StepDtypes, random_step
from .figure import Figure, NothingToMeasure

MODELS = ("qwen3.5-9b", "qwen3.5-122b-a10b")
BATCHES = (1, 8, 32, 128, 512)
BUFFER_LENS = (8, 16, 32)
DTYPES = StepDtypes()
COPY_BYTES = 1 << 30
# what a step's state must exceed before it is used again: several times the largest last-level cache (MI300X, 256 MiB)
COLD_BYTES = 1 << 30
# bfloat16 outputs: two units of the value, and what sums of float32 terms may lose. Not a judgement of parity (that is
# the kernel level's): it keeps a broken kernel from being timed
OUTPUT_UNITS, OUTPUT_FLOOR = 2 * 2.0**-7, 1e-3


def bench_decode(seed: int) -> list[Figure]:
    """Microseconds a step, speed-ups and shares of bandwidth; raises NothingToMeasure without a CUDA device."""
    if not torch.cuda.is_available():
        raise NothingToMeasure("bench decode needs a CUDA device, torch sees none")
    bandwidth = copy_bandwidth()
    figures = [Figure("copy", bandwidth / 1e9, "GB/s")]
    for model in MODELS:
        geometry = QWEN3_5[model]
        wrong = agreement(geometry, seed, "cuda", "triton")
        figures += wrong
        if any(figure.complaint for figure in wrong):
            continue
        for batch in BATCHES:
            figures += _timed(geometry, batch, bandwidth, seed)
    return figures


def agreement(geometry: Geometry, seed: int, device: str, backend: Backend) -> list[Figure]:
    """Largest difference to the torch formulation, in units of what may be, of one step of both operators."""
    length = BUFFER_LENS[-1]
    figures = []
    for name in ("replay", "packed"):
        outs = []
        backends: tuple[Backend, Backend] = (backend, "torch")
        for which in backends:
            # the same seed twice: a step changes its memory
            step = random_step(geometry, length, staggered(length, length, 0), seed=seed, dtypes=DTYPES, device=device)
            outs.append(getattr(step, name)(which).float())
        off = _units(outs[0], outs[1])
        figures.append(_agreed(geometry, name, off))
    return figures


def _units(got: Tensor, expected: Tensor) -> float:
    allowed = OUTPUT_UNITS * expected.abs() + OUTPUT_FLOOR * expected.abs().max()
    return float(((got - expected).abs() / allowed).max())


def _agreed(geometry: Geometry, name: str, off: float) -> Figure:
    # a NaN is no agreement
    complaint = "" if off <= 1 else "outputs differ from the torch formulation's: not timed"
    return Figure(f"HV {geometry.num_v_heads}, {name}, difference to torch", off, "of what may be", complaint)


def staggered(rows: int, buffer_len: int, phase: int) -> list[tuple[int, bool]]:
    """(write_pos, is_flush) of rows that started one after another, ``phase`` steps into the cycle."""
    positions = [(row + phase) % buffer_len for row in range(rows)]
    return [(position, position == buffer_len - 1) for position in positions]


def cycle(geometry: Geometry, batch: int, buffer_len: int, seed: int, device: str) -> list[BenchStep]:
    """The steps of one ring cycle, on as many sets of slots as keep each set out of the cache when its turn comes."""
    state_bytes = geometry.num_v_heads * geometry.head_v_dim * geometry.head_k_dim * DTYPES.state.itemsize
    sets = min(buffer_len, -(-COLD_BYTES // (batch * state_bytes)))
    first = random_step(
        geometry,
        buffer_len,
        staggered(batch, buffer_len, 0),
        seed=seed,
        dtypes=DTYPES,
        device=device,
        spare_slots=(sets - 1) * batch,
    )
    steps = []
    for phase in range(buffer_len):
        write_pos, is_flush = zip(*staggered(batch, buffer_len, phase), strict=True)
        cursor = (
            torch.tensor(write_pos, dtype=torch.int32, device=device),
            torch.tensor(is_flush, device=device),
        )
        steps.append(replace(first, slots=first.slots + phase % sets * batch, cursor=cursor))
    return steps


def least_bytes(geometry: Geometry, batch: int, buffer_len: int | None) -> float:
    """Bytes that an average step must move for its memory: packed where ``buffer_len`` is None.

    Per row: state read; replay reads w entries of d, k and g (L (L - 1) / 2 in a cycle), writes L - 1 entries and one
    state in L steps. Activations are left out: 1 % of the state.
    """
    heads, value_dim, key_dim = geometry.num_v_heads, geometry.head_v_dim, geometry.head_k_dim
    state = heads * value_dim * key_dim * DTYPES.state.itemsize
    if buffer_len is None:
        return float(batch * 2 * state)
    entry = (heads * value_dim + geometry.num_k_heads * key_dim) * DTYPES.ring.itemsize + 4 * heads
    moved = entry * (buffer_len * (buffer_len - 1) // 2 + buffer_len - 1) + state
    return batch * (state + moved / buffer_len)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _timed(geometry: Geometry, batch: int, bandwidth: float, seed: int) -> list[Figure]:
    """Packed decode (ours, vLLM's), then replay at each ring length beside it."""
    name = f"HV {geometry.num_v_heads}, batch {batch}"
    least = least_bytes(geometry, batch, None)
    packed, theirs = _packed_seconds(geometry, batch, seed)
    figures = _speed(f"{name}, packed", packed, least, bandwidth)
    if theirs is not None:
        figures += _speed(f"{name}, vLLM's packed", theirs, least, bandwidth)
    for length in BUFFER_LENS:
        replay = _replay_seconds(geometry, batch, length, seed)
        figures += _speed(f"{name}, replay L {length}", replay, least_bytes(geometry, batch, length), bandwidth)
        figures.append(Figure(f"{name}, replay L {length} over packed", packed / replay, "times as fast"))
    return figures


def _packed_seconds(geometry: Geometry, batch: int, seed: int) -> tuple[float, float | None]:
    """Ours and vLLM's, None where it cannot be imported, on the same memory."""
    steps = cycle(geometry, batch, BUFFER_LENS[0], seed, "cuda")
    theirs = vllm_steps(steps)
    ours = _step_seconds([partial(step.packed, "triton") for step in steps])
    return ours, _step_seconds(theirs) if theirs else None


def _replay_seconds(geometry: Geometry, batch: int, buffer_len: int, seed: int) -> float:
    steps = cycle(geometry, batch, buffer_len, seed, "cuda")
    return _step_seconds([partial(step.replay, "triton") for step in steps])


def _speed(name: str, seconds: float, least: float, bandwidth: float) -> list[Figure]:
    return [
        Figure(name, seconds * 1e6, "us/step"),
        Figure(f"{name}, of copy bandwidth", 100 * least / seconds / bandwidth, "%"),
    ]


def vllm_steps(steps: list[BenchStep]) -> list[Callable[[], object]]:
    """The same steps through vLLM's packed kernel; none where it cannot be imported."""
    try:
        from ..kernels.vllm_packed import packed_step
    except ImportError:
        return []
    return [packed_step(step.token, step.layer, step.state, step.slots, step.out) for step in steps]


def _step_seconds(steps: Sequence[Callable[[], object]]) -> float:
    """Seconds of a step: all of them as one CUDA graph, so that launching from Python is not measured."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return _seconds(graph.replay) / len(steps)


def _seconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median")) / 1e3
