"""What a decode step reads and writes: bytes that the interpreter counts, beside a closed formula.

Counted are the bytes that programs ask for, summed over programs: what two programs both read counts twice, although a
cache may serve it once. Closed formula for one row, in bytes; T = V / block_v tiles of the value axis, s, r, x the
bytes of an element of state, ring and activations, w = write_pos:

    token      HV T (2 K x + 2 x + 8) + HV V x     q and k whole per tile, a, b, A_log and dt_bias (float32); v
    packed     reads token + HV V K s + 4 HV T; writes HV V K s + HV V x
    append     reads token + HV V K s + w (HV V r + HV T K r + 4 HV T) + 9 HV T; writes HV V r + H K r + 4 HV + HV V x
    flush      reads as append, the gates once more (4 w HV T); writes HV V K s + HV V x

The 4 and 9 bytes are the row's slot (int32), and with it its write_pos (int32) and is_flush (one byte). A key entry is
read per value head and tile. HV V K s is the state: replay saves writing it, and pays the rest of its line.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cases.geometry import QWEN3_5, Geometry
from ..kernels.decode_launch import LAUNCH_CONFIGS
from .bench_step import StepDtypes, random_step
from .figure import Figure
from .interpreter import Launch, interpreted

MODELS = ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-27b", "qwen3.5-122b-a10b")
BUFFER_LEN = 16
DTYPES = StepDtypes()
# of the counted bytes; the formula is meant to be exact
AGREEMENT = 0.01
# share of packed decode's bytes that an append may move at any ring position, and a whole ring cycle on average
APPEND_SHARE, CYCLE_SHARE = 0.60, 0.62


@dataclass(frozen=True)
class Bytes:
    """Read and written by one row of one step."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Both."""
        return self.read + self.written


@dataclass(frozen=True)
class Row:
    """One row of a replay step."""

    write_pos: int
    is_flush: bool

    def __str__(self) -> str:
        return f"{'flush' if self.is_flush else 'append'} at {self.write_pos}"


# the positions of a ring cycle, and two flushes that prefix caching may ask for
ROWS = (*(Row(w, w == BUFFER_LEN - 1) for w in range(BUFFER_LEN)), Row(0, True), Row(BUFFER_LEN // 2, True))
# all are compared; these are printed
SHOWN = (Row(0, False), Row(BUFFER_LEN // 2, False), Row(BUFFER_LEN - 2, False), Row(BUFFER_LEN - 1, True))


def bench_traffic(seed: int) -> list[Figure]:
    """Counted bytes of each kind of row beside the formula, and replay's share of packed decode's bytes."""
    figures = []
    for model in MODELS:
        geometry = QWEN3_5[model]
        packed, replay = count_packed(geometry, seed), count_replay(geometry, seed)
        figures.append(compared(geometry, "packed", packed, packed_bytes(geometry)))
        for row, counted in zip(ROWS, replay, strict=True):
            figure = compared(geometry, str(row), counted, replay_bytes(geometry, row))
            figures += [figure] if row in SHOWN or figure.complaint else []
        figures += shares(geometry, packed, replay)
    return figures


def compared(geometry: Geometry, name: str, counted: Bytes, formula: Bytes) -> Figure:
    """Counted bytes, with a complaint where the formula says something else."""
    pairs = ((counted.read, formula.read), (counted.written, formula.written))
    off = any(abs(have - expected) > AGREEMENT * have for have, expected in pairs)
    told = f"formula {formula.read / 1024:.1f} + {formula.written / 1024:.1f}"
    unit = f"KiB/row: read {counted.read / 1024:.1f} + written {counted.written / 1024:.1f}, {told}"
    complaint = f"counted and formula differ by more than {AGREEMENT:.0%}" if off else ""
    return Figure(f"HV {geometry.num_v_heads}, {name}", counted.total / 1024, unit, complaint)


def shares(geometry: Geometry, packed: Bytes, replay: list[Bytes]) -> list[Figure]:
    """Replay's bytes over packed decode's: the worst append, and the average of a ring cycle."""
    appends = [counted.total for row, counted in zip(ROWS, replay, strict=True) if not row.is_flush]
    cycle = [counted.total for counted in replay[:BUFFER_LEN]]
    shares = (
        ("worst append over packed", max(appends) / packed.total, APPEND_SHARE),
        ("ring cycle over packed", sum(cycle) / len(cycle) / packed.total, CYCLE_SHARE),
    )
    return [
        Figure(f"HV {geometry.num_v_heads}, {name}", share, "times", f"at most {limit}" if share > limit else "")
        for name, share, limit in shares
    ]


def packed_bytes(geometry: Geometry) -> Bytes:
    """The formula for packed decode."""
    tiles = geometry.head_v_dim // LAUNCH_CONFIGS["default"].packed.block_v
    state, out = _state_bytes(geometry), _out_bytes(geometry)
    return Bytes(_token_bytes(geometry, tiles) + state + 4 * geometry.num_v_heads * tiles, state + out)


def replay_bytes(geometry: Geometry, row: Row) -> Bytes:
    """The formula for replay decode."""
    tiles = geometry.head_v_dim // LAUNCH_CONFIGS["default"].replay.block_v
    heads, value_dim, key_dim, r = geometry.num_v_heads, geometry.head_v_dim, geometry.head_k_dim, DTYPES.ring.itemsize
    state, out = _state_bytes(geometry), _out_bytes(geometry)
    entry = heads * value_dim * r + heads * tiles * key_dim * r + 4 * heads * tiles
    read = _token_bytes(geometry, tiles) + state + row.write_pos * entry + 9 * heads * tiles
    if row.is_flush:
        return Bytes(read + 4 * row.write_pos * heads * tiles, state + out)
    return Bytes(read, heads * value_dim * r + geometry.num_k_heads * key_dim * r + 4 * heads + out)


def _token_bytes(geometry: Geometry, tiles: int) -> int:
    x, heads = DTYPES.activation.itemsize, geometry.num_v_heads
    return heads * tiles * (2 * geometry.head_k_dim * x + 2 * x + 8) + heads * geometry.head_v_dim * x


def _state_bytes(geometry: Geometry) -> int:
    return geometry.num_v_heads * geometry.head_v_dim * geometry.head_k_dim * DTYPES.state.itemsize


def _out_bytes(geometry: Geometry) -> int:
    return geometry.num_v_heads * geometry.head_v_dim * DTYPES.activation.itemsize


def count_packed(geometry: Geometry, seed: int) -> Bytes:
    """What one row of packed decode moves in the interpreter."""
    step = random_step(geometry, BUFFER_LEN, [(0, False)], seed=seed, dtypes=DTYPES)
    with interpreted(unsupported="raise") as session:
        step.packed("triton")
    return _rows(session.traffic.launches[-1])[0]


def count_replay(geometry: Geometry, seed: int) -> list[Bytes]:
    """What each of `ROWS` moves in the interpreter, all in one launch."""
    cursor = [(row.write_pos, row.is_flush) for row in ROWS]
    step = random_step(geometry, BUFFER_LEN, cursor, seed=seed, dtypes=DTYPES)
    with interpreted(unsupported="raise") as session:
        step.replay("triton")
    return _rows(session.traffic.launches[-1])


def _rows(launch: Launch) -> list[Bytes]:
    """Bytes per row: the third axis of the grid."""
    read, written = (launch.bytes(direction).sum((0, 1)).tolist() for direction in ("load", "store"))
    return [Bytes(*pair) for pair in zip(read, written, strict=True)]
