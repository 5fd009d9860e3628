"""How this tests the Triton kernels of GDN decode, in plain words.

One step of rows at unlike ring positions (empty, middle, last, flushed early) and of padding rows goes through the
Triton kernels and through the torch formulation, each on its own copy of the same pages. Pages are strided; dead ring
entries, the NULL slot, other slots, page padding and the output hold NaN. Outputs, written states and written ring
entries must agree to float32 rounding (and, where they are stored in 16 bits, to one unit of it); every other byte must
be the byte that stood there. In the exact regime (one-hot keys, integer values, decay 1 or 0) every byte must agree.
Wrong cursors, heads and flags are planted to show that the comparison rejects.

On a CPU the kernels run in the harness's interpreter; with the gpu marker the same tests run them on a CUDA device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from replay_parity.harness.interpreter import BadAccess, interpreted
from replay_parity.kernels import decode_launch
from replay_parity.kernels.decode import Backend, gdn_packed_decode, gdn_replay_decode

# NaN with a payload in every dtype
NAN_BYTES = (0xA0, 0x7F, 0xA0, 0x7F)
PAGE_PADDING = 48
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# float32 differences of the two formulations, relative to the largest value of the tensor. Observed on all cases of
# this file, seeds 0 to 5: replay 1.2e-6, packed 3.1e-7. Margin 3; the smallest planted fault misses by 1e-4.
LIMIT = 4e-6


@dataclass(frozen=True)
class Layer:
    """Shapes and dtypes of one comparison."""

    num_k_heads: int = 2
    num_v_heads: int = 4
    head_k_dim: int = 16
    head_v_dim: int = 16
    buffer_len: int = 5
    activation: torch.dtype = FP32
    state: torch.dtype = FP32
    ring: torch.dtype = FP32
    transposed_state: bool = False

    def __str__(self) -> str:
        sizes = f"{self.num_k_heads}x{self.num_v_heads}-{self.head_k_dim}x{self.head_v_dim}-L{self.buffer_len}"
        dtypes = "-".join(NAMES[dtype] for dtype in (self.activation, self.state, self.ring))
        return f"{sizes}-{dtypes}{'-transposed' if self.transposed_state else ''}"


@dataclass(frozen=True, eq=False)
class Memory:
    """Pages [N, bytes] uint8 and the views of state and ring on them."""

    pages: torch.Tensor
    state: torch.Tensor
    ring_d: torch.Tensor
    ring_k: torch.Tensor
    ring_g: torch.Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """Arguments of one step but its memory; the order is that of the operators."""

    token: tuple[torch.Tensor, ...]
    layer: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    write_pos: torch.Tensor
    is_flush: torch.Tensor
    out: torch.Tensor


def make_memory(layer: Layer, num_slots: int, device: str) -> Memory:
    """Pages of NaN bytes."""
    h, hv, kd, vd = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    state = (hv, kd, vd) if layer.transposed_state else (hv, vd, kd)
    parts = [
        (state, layer.state), ((hv, layer.buffer_len, vd), layer.ring), ((h, layer.buffer_len, kd), layer.ring),
        ((hv, layer.buffer_len), FP32),
    ]  # fmt: skip
    sizes = [-(-dtype.itemsize * torch.Size(shape).numel() // 16) * 16 for shape, dtype in parts]
    page = sum(sizes) + PAGE_PADDING
    pages = torch.tensor(NAN_BYTES, dtype=torch.uint8).repeat(num_slots, page // 4).to(device)
    views, start = [], 0
    for (shape, dtype), size in zip(parts, sizes, strict=True):
        used = dtype.itemsize * torch.Size(shape).numel()
        views.append(pages[:, start : start + used].view(dtype).view(num_slots, *shape))
        start += size
    if layer.transposed_state:
        views[0] = views[0].mT
    return Memory(pages, *views)


def copied(layer: Layer, memory: Memory) -> Memory:
    """The same bytes in other pages."""
    other = make_memory(layer, len(memory.pages), memory.pages.device.type)
    other.pages.copy_(memory.pages)
    return other


def cursors(buffer_len: int) -> list[tuple[int, int, bool]]:
    """(slot, write_pos, is_flush) of each row: all kinds of rows that a ring of this length has, then padding."""
    last = buffer_len - 1
    kinds = [(0, last == 0), (last, True), (last // 2, True), (0, True)]
    kinds += [(w, False) for w in sorted({last // 3, last // 2, last - 1}) if 0 < w < last]
    live = [(slot, w, flush) for slot, (w, flush) in zip([5, 2, 7, 1, 6, 3, 8], kinds, strict=False)]
    return [*live[:2], (0, 0, False), *live[2:], (-1, last, True)]


def make_step(layer: Layer, seed: int, device: str) -> tuple[Step, Memory]:
    """A step of random tokens, gates that remember, and memory whose live parts are random."""
    random = torch.Generator().manual_seed(seed)
    h, hv, kd, vd = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    rows = cursors(layer.buffer_len)
    num_rows = len(rows)
    # projections of one row lie side by side, so rows are strided, as a model gives them
    wide = draw(num_rows, 2 * h * kd + hv * vd + 3).to(device, layer.activation)
    q, k = wide[:, : h * kd].view(num_rows, h, kd), wide[:, h * kd : 2 * h * kd].view(num_rows, h, kd)
    v = wide[:, 2 * h * kd : 2 * h * kd + hv * vd].view(num_rows, hv, vd)
    gates = draw(num_rows, 2 * hv).to(device, layer.activation)
    memory = make_memory(layer, 9, device)
    for slot, write_pos, _ in rows:
        if slot <= 0:
            continue
        memory.state[slot] = 0.3 * draw(hv, vd, kd).to(device, layer.state)
        memory.ring_d[slot, :, :write_pos] = draw(hv, write_pos, vd).to(device, layer.ring)
        memory.ring_k[slot, :, :write_pos] = draw(h, write_pos, kd).to(device, layer.ring) / kd**0.5
        memory.ring_g[slot, :, :write_pos] = -draw(hv, write_pos).abs().to(device) / layer.buffer_len
    step = Step(
        token=(q, k, v, gates[:, hv:], gates[:, :hv]),
        layer=(torch.log(1 + draw(hv).abs()).to(device), (draw(hv) - 4).to(device)),
        slots=torch.tensor([row[0] for row in rows], dtype=torch.int32, device=device),
        write_pos=torch.tensor([row[1] for row in rows], dtype=torch.int32, device=device),
        is_flush=torch.tensor([row[2] for row in rows], device=device),
        out=torch.full((num_rows, hv, vd), float("nan"), dtype=layer.activation, device=device),
    )
    return step, memory


def writable(layer: Layer, step: Step, has_ring: bool) -> Memory:
    """Memory that is NaN where the step may write, and zero elsewhere."""
    memory = make_memory(layer, 9, step.slots.device.type)
    memory.pages.zero_()
    for slot, write_pos, is_flush in zip(
        step.slots.tolist(), step.write_pos.tolist(), step.is_flush.tolist(), strict=True
    ):
        if slot > 0 and (is_flush or not has_ring):
            memory.state[slot] = float("nan")
        elif slot > 0:
            for ring in (memory.ring_d, memory.ring_k, memory.ring_g):
                ring[slot, :, write_pos] = float("nan")
    # a NaN's bytes may be zero: mark whole elements
    for view in (memory.state, memory.ring_d, memory.ring_k, memory.ring_g):
        marked = view.isnan()
        numbers = view.view(torch.int32 if view.element_size() == 4 else torch.int16)
        numbers[marked] = -1
    return memory


Operator = Callable[[Step, Memory, Backend], torch.Tensor]


def replay(step: Step, memory: Memory, backend: Backend) -> torch.Tensor:
    """One step of the replay operator; returns its output."""
    return replay_into(step, memory, step.out.clone(), backend)


def replay_into(step: Step, memory: Memory, out: torch.Tensor, backend: Backend = "triton") -> torch.Tensor:
    """One step of the replay operator with the caller's output."""
    # called with unpacked lists, whose lengths a type checker cannot see
    run: Callable[..., torch.Tensor] = gdn_replay_decode
    return run(
        *step.token, *step.layer, memory.state, memory.ring_d, memory.ring_k, memory.ring_g,
        step.slots, step.write_pos, step.is_flush, out=out, backend=backend,
    )  # fmt: skip


def packed(step: Step, memory: Memory, backend: Backend) -> torch.Tensor:
    """One step of the packed operator; returns its output."""
    run: Callable[..., torch.Tensor] = gdn_packed_decode
    return run(*step.token, *step.layer, memory.state, step.slots, out=step.out.clone(), backend=backend)


@contextmanager
def triton_runs_on(device: str, memory: Memory) -> Iterator[None]:
    """The interpreter for CPU tensors: reading a NaN or touching a byte between the views is an error there."""
    views = (memory.state, memory.ring_d, memory.ring_k, memory.ring_g)
    if device != "cpu":
        yield
        return
    with interpreted(poison="raise", regions=views, unsupported="raise"):
        yield


def compare(
    layer: Layer,
    operator: Operator,
    seed: int,
    device: str,
    change: Callable[[Step], Step] = lambda step: step,
    make: Callable[[Layer, int, str], tuple[Step, Memory]] = make_step,
) -> float:
    """Run a step both ways and assert agreement; returns the largest float32 difference. ``change`` plants a fault."""
    step, before = make(layer, seed, device)
    ours, theirs = copied(layer, before), copied(layer, before)
    expected = operator(step, theirs, "torch")
    with triton_runs_on(device, ours):
        got = operator(change(step), ours, "triton")
    live = step.slots > 0
    assert not got[~live].any(), "padding rows must give zeros"
    worst = differ("out", got[live], expected[live])
    kept = writable(layer, step, operator is replay).pages == 0
    assert torch.equal(theirs.pages[kept], before.pages[kept]), "torch changed a byte that must not change"
    assert torch.equal(ours.pages[kept], before.pages[kept]), "a byte changed that must not"
    for name in ("state", "ring_d", "ring_k", "ring_g"):
        assert torch.equal(getattr(ours, name).isnan(), getattr(theirs, name).isnan()), f"{name}: poison moved"
        worst = max(worst, differ(name, getattr(ours, name).nan_to_num(), getattr(theirs, name).nan_to_num()))
    return worst


def differ(name: str, got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference beyond one unit of a 16-bit dtype, relative to the tensor's largest value."""
    unit = 0.0 if got.dtype == FP32 else torch.finfo(got.dtype).eps
    expected = expected.float()
    # an element below the normal range has a fixed unit
    step = unit * expected.abs().clamp(min=torch.finfo(got.dtype).tiny)
    beyond = ((got.float() - expected).abs() - step).clamp(min=0)
    # all zero where nothing was ever written, as in a ring of one entry
    worst = float(beyond.max() / expected.abs().max().clamp(min=1e-30))
    assert worst <= LIMIT, f"{name}: differs by {worst:.2e} of its largest value"
    return worst


DTYPE_LAYERS = [Layer(activation=act, state=state, ring=ring) for act, state, ring in product(DTYPES, DTYPES, DTYPES)]
SHAPES = [(1, 1, 4, 4), (2, 2, 16, 8), (1, 3, 12, 20), (2, 4, 1, 3), (1, 2, 32, 80), (2, 4, 64, 64)]
LENGTHS = [1, 2, 8, 16, 33, 64]
PRODUCTION = (BF16, FP32, FP16)
SHAPE_LAYERS = [
    *(Layer(*shape, length) for shape, length in product(SHAPES, LENGTHS)),
    *(Layer(*shape, 16, *PRODUCTION) for shape in SHAPES),
]
PACKED_LAYERS = [*DTYPE_LAYERS[::3], *SHAPE_LAYERS[:: len(LENGTHS)]]
TRANSPOSED = [Layer(1, 2, 12, 20, 4, *dtypes, True) for dtypes in [(FP32, FP32, FP32), PRODUCTION]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [*DTYPE_LAYERS, *SHAPE_LAYERS, *TRANSPOSED], ids=str)
def test_replay_agrees_with_torch(layer: Layer, device: str) -> None:
    compare(layer, replay, seed=0, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [*PACKED_LAYERS, *TRANSPOSED], ids=str)
def test_packed_agrees_with_torch(layer: Layer, device: str) -> None:
    compare(layer, packed, seed=0, device=device)


def exact_step(layer: Layer, seed: int, device: str) -> tuple[Step, Memory]:
    """The step of `make_step` with one-hot q and k of 64 (1 once normalised), integers, decay and strength 0 or 1.

    Every sum is then exact in float32, in any order; K = 16 keeps the scale of q a power of two.
    """
    random = torch.Generator().manual_seed(seed)
    step, memory = make_step(layer, seed, device)
    h, hv, kd, vd = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def below(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=random).to(device)

    def one_hot(*shape: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(below(4, *shape), kd)

    num_rows = len(step.slots)
    q, k, v, a, b = step.token
    q.copy_(64 * one_hot(num_rows, h)), k.copy_(64 * one_hot(num_rows, h)), v.copy_(below(16, num_rows, hv, vd))
    a.copy_(torch.where(below(4, num_rows, hv) == 0, 1000, -200))
    b.copy_(torch.where(below(4, num_rows, hv) == 0, -200, 200))
    for slot, write_pos, _ in cursors(layer.buffer_len):
        if slot > 0:
            memory.state[slot] = below(16, hv, vd, kd).to(layer.state)
            memory.ring_d[slot, :, :write_pos] = below(8, hv, write_pos, vd).to(layer.ring)
            memory.ring_k[slot, :, :write_pos] = one_hot(h, write_pos).to(layer.ring)
            memory.ring_g[slot, :, :write_pos] = torch.where(below(8, hv, write_pos) == 0, -1000.0, 0.0)
    return replace(step, layer=(torch.zeros(hv, device=device), torch.zeros(hv, device=device))), memory


EXACT = [
    *((replay, layer) for layer in DTYPE_LAYERS),
    *((replay, replace(DTYPE_LAYERS[-1], buffer_len=length)) for length in (1, 16, 64)),
    *((packed, layer) for layer in DTYPE_LAYERS[::3]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("operator", "layer"), EXACT, ids=lambda value: getattr(value, "__name__", str(value)))
def test_exact_regime_is_equal_in_every_dtype(operator: Operator, layer: Layer, device: str) -> None:
    assert compare(layer, operator, 1, device, make=exact_step) == 0.0


FAULTS: list[tuple[str, Callable[[Step], Step]]] = [
    ("entry behind the ring", lambda step: replace(step, write_pos=(step.write_pos + 1).clamp(max=4))),
    ("entry before it", lambda step: replace(step, write_pos=(step.write_pos - 1).clamp(min=0))),
    ("flush for append", lambda step: replace(step, is_flush=~step.is_flush)),
    ("slots of other rows", lambda step: replace(step, slots=step.slots.flip(0))),
    ("padding taken for slot 4", lambda step: replace(step, slots=torch.where(step.slots == 0, 4, step.slots))),
    ("key heads swapped", lambda step: replace(step, token=(step.token[0].flip(1), *step.token[1:]))),
    ("a and b swapped", lambda step: replace(step, token=(*step.token[:3], *step.token[:2:-1]))),
    ("one value off", lambda step: replace(step, token=(*step.token[:2], nudged(step.token[2]), *step.token[3:]))),
]


def nudged(v: torch.Tensor) -> torch.Tensor:
    """One element of one row off by a thousandth."""
    v = v.clone()
    v[1, 0, 0] += 1e-3
    return v


@pytest.mark.parametrize(("name", "change"), FAULTS, ids=[name for name, _ in FAULTS])
def test_comparison_rejects(name: str, change: Callable[[Step], Step]) -> None:
    compare(Layer(), replay, 0, "cpu")
    with pytest.raises((AssertionError, BadAccess)):
        compare(Layer(), replay, 0, "cpu", change)


@pytest.mark.parametrize("device", DEVICES)
def test_views_that_are_not_dense(device: str) -> None:
    """Activations, index tensors and output of any strides; no rows at all."""
    step, memory = make_step(Layer(), 0, device)

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(*x.shape, 2, dtype=x.dtype, device=device)
        wide[..., 0] = x
        return wide[..., 0]

    wide = Step(
        tuple(spread(x) for x in step.token), tuple(spread(x) for x in step.layer), spread(step.slots).long(),
        spread(step.write_pos), spread(step.is_flush), spread(step.out),
    )  # fmt: skip
    plain_memory, wide_memory = copied(Layer(), memory), copied(Layer(), memory)
    with interpreted() if device == "cpu" else nullcontext():
        plain = replay(step, plain_memory, "triton")
        out = replay_into(wide, wide_memory, wide.out)
        none = slice(0, 0)
        empty = replace(
            step, token=tuple(x[none] for x in step.token), slots=step.slots[none], write_pos=step.write_pos[none],
            is_flush=step.is_flush[none], out=step.out[none],
        )  # fmt: skip
        assert replay(empty, plain_memory, "triton").shape == (0, 4, 16)
    assert out is wide.out
    assert torch.equal(out, plain)
    assert torch.equal(plain_memory.pages, wide_memory.pages)


def test_tensors_beyond_a_launch_are_named() -> None:
    step, memory = make_step(Layer(), 0, "cpu")
    # the check of devices comes before: the launch is asked itself
    launch: Callable[..., None] = decode_launch.packed_decode
    far = torch.empty_strided((9, 4, 16, 16), (1, 1, 2**28, 1), device="meta")
    with pytest.raises(decode_launch.LaunchError, match=r"^state: one head spans 4026531855 elements"):
        launch(*step.token, *step.layer, far, step.slots, step.out, True)
    many = replace(
        step, token=tuple(x[:1].expand(70000, *x.shape[1:]) for x in step.token), slots=step.slots[:1].expand(70000),
        write_pos=step.write_pos[:1].expand(70000), is_flush=step.is_flush[:1].expand(70000),
        out=step.out[:1].expand(70000, 4, 16),
    )  # fmt: skip
    with pytest.raises(decode_launch.LaunchError, match=r"^q: at most 65535 rows a call, got 70000"):
        replay(many, memory, "triton")


def test_auto_takes_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_launch, "replay_decode", None)
    step, memory = make_step(Layer(), 0, "cpu")
    assert torch.equal(replay(step, copied(Layer(), memory), "auto"), replay(step, memory, "torch"))


@pytest.mark.gpu
def test_auto_takes_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(decode_launch, "replay_decode", lambda *arguments: called.append(len(arguments)))
    step, memory = make_step(Layer(), 0, "cuda")
    replay(step, memory, "auto")
    assert called == [16]


PLAIN_STEP = """
import torch
from replay_parity.kernels.decode import gdn_packed_decode
x, y = torch.ones(1, 1, 4), torch.ones(1, 1)
def call(backend):
    return gdn_packed_decode(x, x, x, y, y, y[0], y[0], torch.ones(2, 1, 4, 4), torch.tensor([1]), backend=backend)
assert call("auto").shape == (1, 1, 4)
try:
    call("triton")
except NotImplementedError as error:
    print(error)
"""
WITHOUT_TRITON = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("", 'backend: "triton" takes CPU tensors under a Triton interpreter only; '),
        (WITHOUT_TRITON, "backend: triton is not installed; "),
    ],
    ids=["no-interpreter", "no-triton"],
)
def test_backend_that_cannot_run_is_refused_in_one_line(before: str, told: str) -> None:
    """In a child, where nothing has set up an interpreter; the torch formulation runs there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", before + PLAIN_STEP]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(told)
    assert done.stdout.count("\n") == 1
