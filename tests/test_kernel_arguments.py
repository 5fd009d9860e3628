"""How this tests the refusals of the decode operators, in plain words.

A good call is made, then each argument is made wrong once, in shape, dtype, device or value: the error must be one
line that starts with the argument's name, and nothing may have been written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replay_parity.kernels.decode import DecodeArgumentError, gdn_packed_decode, gdn_replay_decode

R, H, HV, KD, VD, L, N = 3, 2, 4, 8, 6, 5, 7
PAGED = ("state", "ring_d", "ring_k", "ring_g")


def good(device: str = "cpu") -> dict[str, Any]:
    """Arguments of a replay call that runs."""
    shapes = {
        "q": (R, H, KD), "k": (R, H, KD), "v": (R, HV, VD), "a": (R, HV), "b": (R, HV), "A_log": (HV,),
        "dt_bias": (HV,), "state": (N, HV, VD, KD), "ring_d": (N, HV, L, VD), "ring_k": (N, H, L, KD),
        "ring_g": (N, HV, L),
    }  # fmt: skip
    call: dict[str, Any] = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
    call["slots"] = torch.arange(1, R + 1, device=device)
    call["write_pos"] = torch.zeros(R, dtype=torch.int32, device=device)
    call["is_flush"] = torch.zeros(R, dtype=torch.bool, device=device)
    call["out"] = torch.zeros(R, HV, VD, device=device)
    return call


def packed(call: dict[str, Any]) -> torch.Tensor:
    """The packed operator on the arguments that it has."""
    dropped = ("ring_d", "ring_k", "ring_g", "write_pos", "is_flush")
    return gdn_packed_decode(**{name: value for name, value in call.items() if name not in dropped})


WRONG: list[tuple[str, Callable[[torch.Tensor], object]]] = [
    ("q", lambda x: x[0]),
    ("q", lambda x: x[:, :0]),
    ("q", lambda x: x.double()),
    ("k", lambda x: x[:, :, :-1]),
    ("k", lambda x: x[:-1]),
    ("v", lambda x: x[:, :3]),
    ("v", lambda x: x[:-1]),
    ("v", lambda x: x.long()),
    ("a", lambda x: x[:, :-1]),
    ("a", lambda x: x.long()),
    ("b", lambda x: x[..., None]),
    ("A_log", lambda x: x[:-1]),
    ("dt_bias", lambda x: x[None]),
    ("state", lambda x: x.transpose(-1, -2)),
    ("state", lambda x: x[0]),
    ("state", lambda x: x[:0]),
    ("state", lambda x: x.double()),
    ("ring_d", lambda x: x.transpose(1, 2)),
    ("ring_d", lambda x: x[:-1]),
    ("ring_d", lambda x: x[:, :, :0]),
    ("ring_k", lambda x: x[:, :, :-1]),
    ("ring_k", lambda x: x.half()),
    ("ring_g", lambda x: x[..., None]),
    ("ring_g", lambda x: x.bfloat16()),
    ("slots", lambda x: x[:-1]),
    ("slots", lambda x: x.float()),
    ("write_pos", lambda x: x[:-1]),
    ("write_pos", lambda x: x.bool()),
    ("is_flush", lambda x: x[:, None]),
    ("is_flush", lambda x: x.float()),
    ("out", lambda x: x[:, :-1]),
    ("out", lambda x: x.half()),
    *((name, lambda x: x.to("meta")) for name in good() if name != "v"),
]


@pytest.mark.parametrize(("name", "change"), WRONG, ids=[f"{i}-{name}" for i, (name, _) in enumerate(WRONG)])
def test_wrong_argument_is_named(name: str, change: Callable[[torch.Tensor], object]) -> None:
    call = good()
    with pytest.raises(DecodeArgumentError, match=f"^{name}: ") as caught:
        gdn_replay_decode(**{**call, name: change(call[name])})
    assert "\n" not in str(caught.value)
    assert all(bool((call[paged] == 1).all()) for paged in PAGED)
    assert not call["out"].any()
    if not name.startswith("ring_") and name not in ("write_pos", "is_flush"):
        with pytest.raises(DecodeArgumentError, match=f"^{name}: "):
            packed({**call, name: change(call[name])})


def test_good_call_runs() -> None:
    call = good()
    assert gdn_replay_decode(**call) is call["out"]
    assert call["out"].any()
    assert packed(good()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_output_is_made_in_the_activation_dtype(dtype: torch.dtype) -> None:
    call = good()
    del call["out"]
    for name in ("q", "k", "v", "a", "b"):
        call[name] = call[name].to(dtype)
    assert gdn_replay_decode(**call).dtype == dtype
    assert packed(call).dtype == dtype


def test_device_without_backend() -> None:
    with pytest.raises(NotImplementedError, match=r'^no GDN decode backend for meta tensors yet; pass backend="torch"'):
        gdn_replay_decode(**good("meta"))
    with pytest.raises(NotImplementedError, match=r"^no GDN decode backend for meta"):
        packed(good("meta"))
    assert gdn_replay_decode(**good("meta"), backend="torch").shape == (R, HV, VD)


def test_unknown_backend() -> None:
    wrong: Any = "cuda"
    with pytest.raises(DecodeArgumentError, match=r"^backend: expected .auto., .torch. or .triton., got 'cuda'"):
        gdn_replay_decode(**good(), backend=wrong)
