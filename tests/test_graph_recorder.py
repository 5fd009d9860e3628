"""The emulation of FULL CUDA graphs and the audit of what they read, on hand-made forwards; no engine is needed.

A recording must do what a CUDA graph does: use the memory of the capture and no other, run no Python, keep the grid of
a launch, and refuse what the host would have to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replay_parity.harness.graph_audit import GraphAudit
from replay_parity.harness.graph_recorder import CaptureError, Graph, HostCalls, capture
from torch import Tensor


def recorded(forward: Callable[[], Any], host: HostCalls | None = None) -> tuple[Graph, Any]:
    """The graph of a forward, and what the capture itself returned."""
    graph = Graph()
    with torch.inference_mode(), capture(graph, host):
        result = forward()
    return graph, result


@pytest.fixture
def operators() -> Iterator[list[str]]:
    """Operators written in Python, as vLLM has them: one that notes each of its calls, one that the host calls."""
    calls: list[str] = []

    def add_one(x: Tensor, out: Tensor) -> None:
        calls.append("add_one")
        out.copy_(x * 2 - x + 1)

    library: Any = torch.library.Library("graph_recorder_test", "DEF")  # type: ignore[no-untyped-call]
    library.define("add_one(Tensor x, Tensor(a!) out) -> ()")
    library.impl("add_one", add_one, "CPU")
    library.define("no_body(Tensor x) -> Tensor")
    yield calls
    library._destroy()


def test_a_replay_fills_the_same_memory_with_new_values() -> None:
    x = torch.arange(4.0)
    graph, (y, z) = recorded(lambda: (x * 2, torch.zeros(4).add_(x)))
    where = y.data_ptr(), z.data_ptr()
    x.fill_(5.0)
    graph.replay()
    assert (y.data_ptr(), z.data_ptr()) == where
    assert y.tolist() == [10.0] * 4
    # zeros belong to the graph as well, or the sum would go on
    assert z.tolist() == [5.0] * 4


def test_what_is_written_elsewhere_is_not_seen() -> None:
    holder = SimpleNamespace(flags=torch.zeros(3))
    graph, out = recorded(lambda: holder.flags + 1)
    holder.flags = torch.full((3,), 7.0)
    graph.replay()
    assert out.tolist() == [1.0] * 3


def test_views_and_empty_memory_are_no_operations() -> None:
    x = torch.arange(6.0)

    def forward() -> Tensor:
        out = torch.empty(2, 3)
        out[0] = x.view(2, 3)[1].contiguous()
        return out

    graph, out = recorded(forward)
    names = [operation.func.name() for operation in graph.operations]  # type: ignore[attr-defined]
    assert names == ["aten::copy_"]
    x += 1
    graph.replay()
    assert out[0].tolist() == [4.0, 5.0, 6.0]


def test_operators_written_in_python_run_only_at_capture(operators: list[str]) -> None:
    x, out = torch.zeros(2), torch.zeros(2)
    graph, _ = recorded(lambda: torch.ops.graph_recorder_test.add_one(x, out))
    x.fill_(4.0)
    graph.replay()
    assert out.tolist() == [5.0, 5.0]
    assert operators == ["add_one"]
    with pytest.raises(CaptureError, match="graph_recorder_test::no_body has no CPU kernel to look into"):
        recorded(lambda: torch.ops.graph_recorder_test.no_body(x))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "is_nonzero": lambda x: bool(x[0] > 0),
    "nonzero": lambda x: x.nonzero(),
    "index": lambda x: x[x > 0],
    "index_put_": lambda x: x.index_put_((x > 0,), x[0]),
    "equal": lambda x: torch.equal(x, x + 1),
    "masked_select": lambda x: x.masked_select(x > 0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_on_the_host_ends_the_capture(name: str) -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match=f"aten::{name}.* reads a value on the host while a graph is captured"):
        recorded(lambda: READS[name](x))


def test_an_integer_index_is_no_read() -> None:
    x, rows = torch.arange(4.0), torch.tensor([2, 0])
    graph, out = recorded(lambda: x[rows])
    rows.copy_(torch.tensor([1, 3]))
    graph.replay()
    assert out.tolist() == [1.0, 3.0]


def test_an_argument_that_the_host_makes_is_made_anew() -> None:
    lengths, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    host = HostCalls(frozenset(("aten::cumsum",)))
    with torch.inference_mode(), host:
        plan = lengths.cumsum(0)
        graph, _ = recorded(lambda: out.copy_(plan), host)
    lengths += 1
    graph.replay()
    assert out.tolist() == [2.0, 5.0]
    # without it the plan of the capture is used for ever
    with torch.inference_mode():
        plan = lengths.cumsum(0)
    graph, _ = recorded(lambda: out.copy_(plan))
    lengths += 1
    graph.replay()
    assert out.tolist() == [2.0, 5.0]


def test_a_launch_keeps_the_grid_of_the_capture() -> None:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    asked, ran = [], []

    class Launched(interpreter.InterpretedFunction):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            pass

    original = interpreter.InterpretedFunction.run

    def run(self: Any, x: Tensor, *, grid: Any, warmup: bool) -> None:
        size = grid({}) if callable(grid) else grid
        ran.append(size)
        x[: size[0]] += 1

    def grid(meta: object) -> tuple[int]:
        asked.append(meta)
        return (len(asked) + 1,)

    interpreter.InterpretedFunction.run = run
    try:
        x = torch.zeros(4)
        graph, _ = recorded(lambda: Launched().run(x, grid=grid, warmup=False))
        assert interpreter.InterpretedFunction.run is run
        graph.replay()
    finally:
        interpreter.InterpretedFunction.run = original
    # what a launch does inside is no operation of its own
    assert len(graph.operations) == 1
    assert ran == [(2,), (2,)] and len(asked) == 1
    assert x.tolist() == [2.0, 2.0, 0.0, 0.0]


# --- the audit ----------------------------------------------------------------------------------------------------

LAYER = "layers.0"


def _metadata(**tensors: Tensor) -> dict[str, Any]:
    entry = SimpleNamespace(num_decodes=2, scheduler_metadata=torch.zeros(1), masks_cpu=torch.zeros(1), **tensors)
    return {LAYER: entry, "layers.1": entry}


def _told(write_pos: list[int], is_flush: list[bool]) -> SimpleNamespace:
    return SimpleNamespace(
        layer_names=(LAYER, "layers.1"), write_pos=np.array(write_pos, np.int32), is_flush=np.array(is_flush)
    )


def _buffers() -> dict[str, Tensor]:
    return {
        "write_pos": torch.zeros(4, dtype=torch.int32),
        "is_flush": torch.zeros(4, dtype=torch.bool),
        "non_spec_state_indices_tensor": torch.zeros(4, dtype=torch.int32),
    }


def test_buffers_that_are_refreshed_are_in_order() -> None:
    buffers, audit = _buffers(), GraphAudit()
    audit.remember(4, _metadata(**buffers))
    buffers["write_pos"][0], buffers["is_flush"][0], buffers["non_spec_state_indices_tensor"][0] = 3, True, 9
    # shorter views of the same memory, and a host tensor that is another each step
    assert audit.moved(4, _metadata(**{name: tensor[:3] for name, tensor in buffers.items()})) == []
    slots = {LAYER: torch.tensor([9, 0, 0], dtype=torch.int32)}
    assert audit.untold(4, [_told([3, 0, 0], [True, False, False])], slots) == []


def test_a_field_that_stands_elsewhere_is_named_with_both_values() -> None:
    buffers, audit = _buffers(), GraphAudit()
    audit.remember(4, _metadata(**buffers))
    now = {**buffers, "write_pos": torch.tensor([1, 2, 0, 0], dtype=torch.int32)}
    assert audit.moved(4, _metadata(**now)) == [
        "write_pos of layers.0 and 1 more: the graph of 4 rows reads [0, 0, 0, 0] where it was at capture, "
        "this step's [1, 2, 0, 0] stand elsewhere"
    ]
    (line,) = audit.moved(4, _metadata(**buffers, chunk_indices=torch.zeros(1)))
    assert line == "chunk_indices of layers.0 and 1 more: the graph of 4 rows was captured without it"


@pytest.mark.parametrize(
    ("field", "value"), [("write_pos", "[0, 2]"), ("is_flush", "[0, 1]"), ("non_spec_state_indices_tensor", "[5, 0]")]
)
def test_a_value_that_was_not_refreshed_is_named(field: str, value: str) -> None:
    buffers, audit = {name: tensor[:2] for name, tensor in _buffers().items()}, GraphAudit()
    audit.remember(2, _metadata(**buffers))
    right = {
        "write_pos": torch.tensor([0, 2], dtype=torch.int32),
        "is_flush": torch.tensor([False, True]),
        "non_spec_state_indices_tensor": torch.tensor([5, 0], dtype=torch.int32),
    }
    for name, tensor in right.items():
        if name != field:
            buffers[name].copy_(tensor)
    told = [_told([0, 2], [False, True])]
    assert audit.untold(2, told, {LAYER: right["non_spec_state_indices_tensor"]}) == [
        f"{field} of layers.0 and 1 more: the graph of 2 rows reads [0, 0], the step's are {value}"
    ]


def test_each_size_has_its_own_capture() -> None:
    small, large, audit = _buffers(), _buffers(), GraphAudit()
    audit.remember(1, _metadata(**small))
    audit.remember(4, _metadata(**large))
    assert audit.moved(4, _metadata(**large)) == [] and len(audit.moved(1, _metadata(**large))) == 3
