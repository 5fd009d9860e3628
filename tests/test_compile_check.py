"""How this tests the compile check, in plain words.

One configuration per target is compiled for real, without a GPU, and must need no spills. A tile that is far too large
for the registers of one warp is compiled too: the check must see the spills and reject it. Limits of shared memory are
tested on plain numbers.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from replay_parity.cases.geometry import QWEN3_5
from replay_parity.harness.compile_check import (
    BUFFER_LENS,
    FP32,
    GEOMETRY,
    SHIPPED_DTYPES,
    TARGETS,
    Dtypes,
    Resources,
    Variant,
    main,
    report,
    shipped,
)
from replay_parity.kernels import decode_triton
from replay_parity.kernels.decode_launch import LAUNCH_CONFIGS
from triton.runtime.interpreter import InterpretedFunction

CHILD = """
import pickle, sys
from replay_parity.harness.compile_check import resources
variants = pickle.load(sys.stdin.buffer)
pickle.dump([resources(variant) for variant in variants], sys.stdout.buffer)
"""


def own(target: str) -> Variant:
    """What serves models on the target at L = 16."""
    config = LAUNCH_CONFIGS[target].replay
    return Variant(target, 16, SHIPPED_DTYPES[0], (config.block_v, config.num_warps, config.num_stages))


def oversized(target: str, block_v: int) -> Variant:
    """A tile of 256 float32 numbers a thread."""
    return Variant(target, None, Dtypes(FP32, FP32, FP32), (block_v, 1, 1))


OWN = [own(target) for target in TARGETS]
OVERSIZED = [oversized("sm_90", 64), oversized("gfx942", 128)]


@pytest.fixture(scope="module")
def compiled() -> dict[Variant, Resources]:
    """All of them, compiled in one child: tests before may have switched this process to interpreting."""
    variants = [*OWN, *OVERSIZED]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=pickle.dumps(variants), env=environment, stdout=subprocess.PIPE, check=True
    )
    return dict(zip(variants, pickle.loads(done.stdout), strict=True))


@pytest.mark.parametrize("variant", OWN, ids=lambda variant: variant.target)
def test_one_configuration_per_target(variant: Variant, compiled: dict[Variant, Resources]) -> None:
    needs = compiled[variant]
    assert needs.complaints(TARGETS[variant.target]) == []
    assert 32 < needs.registers <= (512 if variant.target == "gfx942" else 255)
    assert needs.shared > 0


@pytest.mark.parametrize("variant", OVERSIZED, ids=lambda variant: variant.target)
def test_a_tile_that_spills_is_rejected(
    variant: Variant, compiled: dict[Variant, Resources], capsys: pytest.CaptureFixture[str]
) -> None:
    needs = compiled[variant]
    assert needs.spills > 0
    assert report([OWN[0], variant], [compiled[OWN[0]], needs]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("  ok")
    assert told[1].endswith(f"  spills {needs.spills} bytes a thread")


def test_shared_memory_beyond_the_device_is_rejected() -> None:
    limit = TARGETS["sm_121"].max_shared
    assert Resources(100, 0, limit).complaints(TARGETS["sm_121"]) == []
    assert Resources(100, 0, limit + 1).complaints(TARGETS["sm_121"]) == [
        "needs 101377 bytes of shared memory, the device has 101376"
    ]


def test_all_that_ships_is_planned() -> None:
    variants = shipped()
    assert {variant.target for variant in variants} == set(TARGETS) == set(LAUNCH_CONFIGS) - {"default"}
    assert LAUNCH_CONFIGS["default"] in [LAUNCH_CONFIGS[target] for target in TARGETS]
    for target in TARGETS:
        planned = {(v.buffer_len, v.dtypes) for v in variants if v.target == target}
        assert planned == {(length, dtypes) for length in (*BUFFER_LENS, None) for dtypes in SHIPPED_DTYPES}
    assert (GEOMETRY.head_k_dim, GEOMETRY.head_v_dim) == (128, 128)
    assert QWEN3_5["qwen3.5-9b"] == GEOMETRY


def test_nothing_compiled_is_said_and_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels defined under TRITON_INTERPRET=1 cannot be compiled."""
    for name in ("replay_decode_kernel", "packed_decode_kernel"):
        compiled = getattr(decode_triton, name)
        monkeypatch.setattr(decode_triton, name, InterpretedFunction(compiled.fn))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert main() == 3
    assert capsys.readouterr().err.startswith("replay-parity: nothing was compiled: TRITON_INTERPRET is set")


def test_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sm_90", "sm_70"]) == 2
    expected = "replay-parity: target: expected sm_80, sm_90, sm_100, sm_121, gfx942, got 'sm_70'\n"
    assert capsys.readouterr().err == expected
