"""How this tests, in plain words: a sentinel over plain torch tensors, no vLLM and no device.

Each way to read a value on the host, or to upload one and wait, is made on a marked tensor and must be kept with this
file and line; the same on an unmarked tensor, and each way of computing that reads nothing, must be free. Both in
inference mode, where torch hands composite operators over whole, and out of it. Then what is blamed: the innermost
frame that is no library's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from replay_parity.harness import engine_sync
from replay_parity.harness.engine_sync import CudaCheck, device_tensors
from replay_parity.harness.sync import HostRead, Sentinel, blame, is_marked
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")

Call = Callable[[Tensor], object]

READS: dict[str, Call] = {
    "item": lambda x: x[0, 0].item(),
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 1).any()),
    "any": lambda x: any(x[0]),
    "index": lambda x: [7, 8, 9][x[0, 0].long()],
    "slice": lambda x: x[:, : x[0, 1].long()],
    "range": lambda x: list(range(x[0, 1].long())),
    "format": lambda x: f"{x[0, 0]:.1f}",
    "repr": lambda x: repr(x),
    "in": lambda x: 3.0 in x,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "to_cpu": lambda x: x.to("cpu"),
    "to_keyword": lambda x: x.to(device="cpu", dtype=torch.float64),
    "to_host_tensor": lambda x: x.to(torch.zeros(1)),
    "copy_to_host": lambda x: torch.zeros(2, 3).copy_(x),
    "setitem_on_host": lambda x: torch.zeros(2, 3).__setitem__(0, x[0]),
    "nonzero": lambda x: x.nonzero(),
    "torch_nonzero": lambda x: torch.nonzero(x, as_tuple=True),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 1),
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "mask_index": lambda x: x[x > 1],
    "mask_of_bytes": lambda x: torch.zeros(2, 3)[(x > 1).to(torch.uint8)],
    "mask_write": lambda x: x.__setitem__(x > 3, x.new_zeros(2)),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x[0].long()),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], x[1].long()),
    "one_hot": lambda x: torch.nn.functional.one_hot(x[0].long()),
    "full": lambda x: torch.full((2,), x[0, 0]),  # type: ignore[call-overload]
    "tensor_of": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "new_tensor": lambda x: torch.zeros(1).new_tensor([x[0, 0]]),
    # uploads that block
    "copy_to_device": lambda x: x.copy_(torch.ones(2, 3)),
    "to_device": lambda x: torch.ones(3).to(x.device),
    "tensor_on_device": lambda x: torch.tensor([1, 2], device=x.device),
    "host_index": lambda x: x[torch.tensor([0])],
    "host_index_write": lambda x: x.__setitem__(torch.tensor([0]), 0.0),
    "host_values": lambda x: x.__setitem__(x[0, :1].long(), torch.ones(1, 3)),
}
UPLOADS = ("copy_to_device", "to_device", "tensor_on_device", "host_index", "host_index_write", "host_values")
FREE: dict[str, Call] = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "matmul": lambda x: x @ x.t(),
    "fill_by_mask": lambda x: x.__setitem__(x > 100, 0.0),
    "where": lambda x: torch.where(x > 1, x, 0.0),
    "gather": lambda x: x[:, x[0].long() * 0],
    "put": lambda x: x.__setitem__(x[0, :1].long(), 0.0),
    "late": lambda x: x.to("cpu", non_blocking=True),
    "late_copy": lambda x: torch.zeros(2, 3).copy_(x, non_blocking=True),
    "dtype": lambda x: x.to(torch.float64),
    "same_device": lambda x: x.to(x.device),
    "late_upload": lambda x: x.copy_(torch.ones(2, 3), non_blocking=True),
    "late_upload_to": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "number": lambda x: x.__setitem__(0, 3.0),
    "numbers_at": lambda x: x.__setitem__(x[0, :1].long(), 3.0),
    "fresh": lambda x: torch.zeros(3, device=x.device).copy_(x[0]),
    "sized": lambda x: torch.repeat_interleave(x[0], x[1].long(), output_size=12),
    "classes": lambda x: torch.nn.functional.one_hot(x[0].long(), 9),
    "shape": lambda x: (x.shape[0], len(x), x.numel(), x.stride()),
    "unbind": lambda x: [row + 1 for row in x],
    "host": lambda x: (torch.arange(3).tolist(), bool(torch.ones(1)), torch.zeros(3)[torch.arange(3) > 1].sum().item()),
    "host_by_name": lambda x: torch.zeros(3, device="cpu").tolist(),
}


def _device() -> Tensor:
    return torch.arange(6.0).reshape(2, 3)


def _found(call: Call, *, uploads: tuple[Any, ...] = (), allowed: Callable[[], bool] = lambda: False) -> list[HostRead]:
    sentinel = Sentinel(uploads, allowed)
    x = _device()
    sentinel.mark(x)
    with sentinel.watch():
        call(x)
    return sentinel.take()


@contextmanager
def _mode(inference: bool) -> Iterator[None]:
    with torch.inference_mode(inference):
        yield


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", READS)
def test_a_read_is_kept_with_its_line(name: str, inference: bool) -> None:
    with _mode(inference):
        (read,) = _found(READS[name])
    line = READS[name].__code__.co_firstlineno
    assert read.place.endswith(f"test_sync.py:{line}") and not read.stock
    assert str(read) == f"{read.place}: {read.what} waits for the device"


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [name for name in READS if name not in UPLOADS])
def test_the_same_on_the_host_is_free(name: str, inference: bool) -> None:
    with _mode(inference):
        sentinel, x = Sentinel(), _device()
        with sentinel.watch():
            READS[name](x)
    assert sentinel.take() == []


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", FREE)
def test_what_reads_nothing_is_free(name: str, inference: bool) -> None:
    with _mode(inference):
        assert _found(FREE[name]) == []


@pytest.mark.parametrize(
    "derive",
    [
        lambda x: x.view(-1)[1:],
        lambda x: x.t().contiguous(),
        lambda x: torch.stack([x, x]).unbind()[1],
        lambda x: torch.topk(x, 2).values,
        lambda x: torch.zeros(2, 3, device=x.device).add_(1),
        lambda x: torch.add(x, x, out=torch.empty(2, 3)),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_ones(2),
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: torch.from_numpy(np.ones(3)).to(x.device, non_blocking=True),
    ],
)
def test_what_is_computed_from_it_is_followed(derive: Callable[[Tensor], Tensor]) -> None:
    assert len(_found(lambda x: derive(x).tolist())) == 1


def test_an_argument_that_a_custom_operator_writes_is_followed() -> None:
    library: Any = torch.library.Library("replay_parity_test", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("doubled_into(Tensor(a!) out, Tensor x) -> ()")
    library.impl("doubled_into", doubled_into, "CPU")

    def call(x: Tensor) -> None:
        out = torch.empty(2, 3)
        torch.ops.replay_parity_test.doubled_into(out, x)
        out.tolist()

    inside, outside = _found(call)
    # an operator in Python is looked into
    assert inside.place.endswith(f":{doubled_into.__code__.co_firstlineno + 1}")
    assert outside.place.endswith(f":{call.__code__.co_firstlineno + 3}")


def doubled_into(out: Tensor, x: Tensor) -> None:
    x.tolist()
    out.copy_(x * 2)


def test_a_copy_on_the_host_is_read_freely() -> None:
    assert [read.what for read in _found(lambda x: x.cpu().tolist())] == ["Tensor.cpu"]
    assert _found(lambda x: x.to("cpu", non_blocking=True).tolist()) == []


def test_uploads_make_tensors_of_the_device() -> None:
    def upload(data: Tensor) -> Tensor:
        return data.to(dtype=None)

    def from_list(data: list[int]) -> Tensor:
        return torch.tensor(data, device="cpu")

    def shared(data: Tensor) -> Tensor:
        return data[:2]

    host = torch.arange(3)
    code = (upload.__code__, from_list.__code__, shared.__code__)
    for made in (lambda: upload(host), lambda: from_list([1, 2]), lambda: shared(host)):
        assert len(_found(lambda x, made=made: made().tolist(), uploads=code)) == 1  # type: ignore[misc]
        assert _found(lambda x, made=made: made().tolist()) == []  # type: ignore[misc]
    assert not is_marked(host) and host.tolist() == [0, 1, 2]


def test_an_allowed_region_is_honoured() -> None:
    assert _found(lambda x: x.tolist(), allowed=lambda: True) == []


def test_nothing_is_seen_outside_and_in_a_pause() -> None:
    sentinel, x = Sentinel(), _device()
    sentinel.mark(x)
    x.tolist()
    with sentinel.watch():
        with sentinel.pause():
            x.tolist()
            x.sum().item()
        assert sentinel.take() == []
        x.tolist()
    assert len(sentinel.take()) == 1


def test_a_place_is_named_once_until_it_is_forgotten() -> None:
    sentinel, x = Sentinel(), _device()
    sentinel.mark(x)

    def reads() -> int:
        with sentinel.watch():
            for _ in range(3):
                x.tolist()
        return len(sentinel.take())

    assert (reads(), reads()) == (1, 0)
    sentinel.forget()
    assert reads() == 1


def _through(*modules: str) -> HostRead | None:
    """What is blamed for a read by the last of these modules, each called by the one before."""
    found: list[list[FrameType]] = []

    def innermost() -> None:
        frames = []
        frame: FrameType | None = sys._getframe(1)
        for _ in modules:
            assert frame is not None
            frames.append(frame)
            frame = frame.f_back
        found.append(frames[::-1])

    call: Callable[[], None] = innermost
    for module in reversed(modules):
        scope: dict[str, Any] = {"__name__": module, "call": call}
        exec("def f():\n\n    call()", scope)
        call = scope["f"]
    call()
    return blame("it", found[0])


@pytest.mark.parametrize(
    ("modules", "place", "stock"),
    [
        (("vllm.v1.worker", "replay_parity.kernels.vllm_layer"), "kernels/vllm_layer.py:3", False),
        (("replay_parity.kernels.vllm_metadata", "vllm.v1.attention.gdn"), "vllm/v1/attention/gdn.py:3", True),
        (("vllm.v1.worker", "replay_parity.kernels.decode", "torch.functional"), "kernels/decode.py:3", False),
        (("vllm.v1.worker", "somebody.plugin", "numpy.core", "contextlib"), "somebody/plugin.py:3", False),
        # CUDA's warning comes out of vLLM's own hook
        (("replay_parity.kernels.vllm_layer", "vllm.utils.gpu_sync_debug"), "kernels/vllm_layer.py:3", False),
    ],
)
def test_the_innermost_frame_is_blamed(modules: tuple[str, ...], place: str, stock: bool) -> None:
    assert _through(*modules) == HostRead("it", place, stock)


@pytest.mark.parametrize(
    "device",
    ["triton.runtime.interpreter", "replay_parity.harness.interpreter.session", "replay_parity.harness.graphs"],
)
def test_the_devices_own_code_is_not_blamed(device: str) -> None:
    assert _through("vllm.v1.worker", device, "replay_parity.kernels.decode_triton") is None
    assert _through("torch.nn") is None


def _raised(module: str, message: str) -> Exception:
    scope: dict[str, Any] = {"__name__": module, "error": RuntimeError(message)}
    exec("def f():\n    raise error", scope)
    try:
        scope["f"]()
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_of_the_check_with_cuda_is_an_event() -> None:
    words = "GPU<->CPU sync detected - avoid it"
    (event,) = CudaCheck().events(4, _raised("replay_parity.kernels.vllm_metadata", words))
    assert (event.symptom, event.step) == ("host_sync", 4)
    assert event.message.startswith("kernels/vllm_metadata.py:2: ")
    assert CudaCheck().events(4, _raised("vllm.v1.worker", words)) == []
    assert CudaCheck().events(4, _raised("replay_parity.kernels.vllm_metadata", "out of memory")) == []
    assert CudaCheck().events(4) == []


def test_tensors_of_an_object_are_found_but_the_hosts() -> None:
    class Held:
        pass

    Held.__module__ = "vllm.made_up"
    root, part = Held(), Held()
    device, listed, weight = torch.zeros(1), torch.zeros(2), torch.nn.Linear(2, 2)
    root.__dict__ |= {"part": part, "cpu": torch.zeros(3), "base_cpu": torch.zeros(4), "root": root}
    part.__dict__ |= {"a": device, "b": {"c": [listed]}, "layer": weight, "np": np.zeros(1)}
    found = device_tensors(root)
    assert {id(tensor) for tensor in found} == {id(device), id(listed), id(weight.weight), id(weight.bias)}


def test_of_equal_steps_a_third_is_watched_and_the_first_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_sync, "vllm_sentinel", Sentinel)
    monkeypatch.setattr(engine_sync, "allowed_regions", nullcontext)
    monkeypatch.setattr(engine_sync.SyncWatch, "_unseen_launches", lambda self: nullcontext())
    device = _device()
    worker = SimpleNamespace(
        model_runner=[device], execute_model=lambda scheduled: device.tolist(), sample_tokens=lambda: device.numpy()
    )
    watch = engine_sync.SyncWatch(worker, True)

    def reads(*tokens: int) -> int:
        watch.sentinel.forget()
        worker.execute_model(SimpleNamespace(num_scheduled_tokens=dict(enumerate(tokens))))
        worker.sample_tokens()
        return len(watch.events(0))

    assert [reads(8), reads(1), reads(1), reads(1), reads(1), reads(1, 2), reads(2, 1)] == [2, 2, 0, 0, 2, 2, 0]
    watch.start()
    assert reads(1) == 2
    watch.start()
    watch.watching = False
    assert reads(1) == 0
