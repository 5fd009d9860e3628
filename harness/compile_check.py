"""Compile the Triton kernels for GPUs that are not here: registers, spills and shared memory of each configuration.

`python -m replay_parity.harness.compile_check [TARGET...]` compiles every configuration of `kernels.decode_launch` for
its device class, for the dtypes and ring lengths that ship, at Qwen3.5's K = V = 128. Exit status: 0 where nothing
spills and shared memory fits, 1 where not, 2 for an unknown target, 3 where nothing can be compiled. What is compiled
is the launch that the operators would make on a dense page, specialised as Triton specialises it. The assemblers and
cuobjdump come with triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from ..cases.geometry import QWEN3_5, Geometry

GEOMETRY = QWEN3_5["qwen3.5-9b"]
BUFFER_LENS = (8, 16, 32)
NUM_SLOTS, NUM_ROWS = 1024, 256
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Target:
    """A device class: what Triton calls it, and the shared memory (bytes) that one program can have.

    Limits: CUDA C++ Programming Guide, table of technical specifications per compute capability (opt-in maximum a
    thread block); 64 KiB of LDS a workgroup on CDNA 3.
    """

    backend: str
    arch: int | str
    warp_size: int
    max_shared: int


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024),
    "sm_100": Target("cuda", 100, 32, 227 * 1024),
    "sm_121": Target("cuda", 121, 32, 99 * 1024),
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024),
}


@dataclass(frozen=True)
class Dtypes:
    """Of activations, state and ring (d and k)."""

    activation: torch.dtype
    state: torch.dtype
    ring: torch.dtype

    def __str__(self) -> str:
        names = {FP32: "fp32", FP16: "fp16", BF16: "bf16"}
        return "/".join(names[dtype] for dtype in (self.activation, self.state, self.ring))


# what serves models, then what exact work uses
SHIPPED_DTYPES = (
    Dtypes(BF16, FP32, FP16),
    Dtypes(BF16, BF16, FP16),
    Dtypes(FP16, FP32, FP16),
    Dtypes(FP32, FP32, FP32),
)


@dataclass(frozen=True)
class Variant:
    """One thing to compile; ``buffer_len`` None is the packed kernel, ``tile`` is (block_v, num_warps, num_stages)."""

    target: str
    buffer_len: int | None
    dtypes: Dtypes
    tile: tuple[int, int, int]

    def __str__(self) -> str:
        kernel = "packed      " if self.buffer_len is None else f"replay L {self.buffer_len:<3}"
        block_v, num_warps, num_stages = self.tile
        return f"{self.target:7} {kernel} {self.dtypes!s:14} V {block_v:<3} warps {num_warps} stages {num_stages}"


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs: registers a thread, bytes of spills a thread, bytes of shared memory a program."""

    registers: int
    spills: int
    shared: int

    def complaints(self, target: Target) -> list[str]:
        """Why this must not ship, empty where it may."""
        spills = [f"spills {self.spills} bytes a thread"] if self.spills else []
        over = [f"needs {self.shared} bytes of shared memory, the device has {target.max_shared}"]
        return spills + (over if self.shared > target.max_shared else [])


class CompilerMissing(RuntimeError):
    """Nothing can be compiled here; the message says why."""


def shipped() -> list[Variant]:
    """Every kernel, configuration, dtype choice and ring length that ships; the default is one of the targets'."""
    from ..kernels.decode_launch import LAUNCH_CONFIGS

    lens: tuple[int | None, ...] = (*BUFFER_LENS, None)
    variants = []
    for target, dtypes, buffer_len in product(TARGETS, SHIPPED_DTYPES, lens):
        configs = LAUNCH_CONFIGS[target]
        config = configs.packed if buffer_len is None else configs.replay
        variants.append(Variant(target, buffer_len, dtypes, (config.block_v, config.num_warps, config.num_stages)))
    return variants


def resources(variant: Variant, geometry: Geometry = GEOMETRY) -> Resources:
    """Compile one variant; raises CompilerMissing where Triton cannot."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ModuleNotFoundError as error:
        raise CompilerMissing(f"triton cannot be imported: {error}") from None
    launch = _launch(variant, geometry)
    if not isinstance(launch.kernel, triton.runtime.JITFunction):
        raise CompilerMissing("TRITON_INTERPRET is set, so kernels are interpreted; unset it")
    target = TARGETS[variant.target]
    signature, constants, attributes = _specialised(launch)
    compiled = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": variant.tile[1], "num_stages": variant.tile[2], "enable_fp_fusion": True},
    )
    read = _cuda_resources if target.backend == "cuda" else _hip_resources
    return read(compiled)


def _launch(variant: Variant, geometry: Geometry) -> Any:
    """The launch that the operators would make, on tensors without storage."""
    from ..kernels.decode_launch import LaunchConfig, packed_launch, replay_launch

    h, hv = geometry.num_k_heads, geometry.num_v_heads
    kd, vd = geometry.head_k_dim, geometry.head_v_dim
    dtypes, rows, slots = variant.dtypes, NUM_ROWS, NUM_SLOTS

    def empty(*shape: int, dtype: torch.dtype = dtypes.activation) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    token = (empty(rows, h, kd), empty(rows, h, kd), empty(rows, hv, vd), empty(rows, hv), empty(rows, hv))
    layer = (empty(hv, dtype=FP32), empty(hv, dtype=FP32))
    state = empty(slots, hv, vd, kd, dtype=dtypes.state)
    index, out = empty(rows, dtype=torch.int32), empty(rows, hv, vd)
    config = LaunchConfig(*variant.tile)
    if variant.buffer_len is None:
        return packed_launch(token, layer, state, index, out, True, config)
    length = variant.buffer_len
    ring = (
        empty(slots, hv, length, vd, dtype=dtypes.ring),
        empty(slots, h, length, kd, dtype=dtypes.ring),
        empty(slots, hv, length, dtype=FP32),
    )
    cursor = (index, index, empty(rows, dtype=torch.bool))
    return replay_launch(token, layer, state, ring, cursor, out, True, config)


TRITON_TYPES = {
    FP32: "*fp32",
    FP16: "*fp16",
    BF16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}


def _specialised(launch: Any) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Signature, constants and attributes: ones are constants, pointers and multiples of 16 are known to be such."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launch.constants)
    attributes: dict[tuple[int], Any] = {}
    names = launch.kernel.arg_names
    for place, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        if isinstance(value, float):
            signature[name] = "fp32"
        elif place in launch.kernel.constexprs or (isinstance(value, int) and value == 1):
            constants[name] = value
        else:
            is_tensor = isinstance(value, torch.Tensor)
            signature[name] = TRITON_TYPES[value.dtype] if is_tensor else "i32" if value < 2**31 else "i64"
            if is_tensor or value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    # in the order of the parameters
    return {name: signature.get(name, "constexpr") for name in names}, constants, attributes


def _cuda_resources(compiled: Any) -> Resources:
    """Read the cubin: spilled registers live on the stack, and these kernels put nothing else there."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        words = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    return Resources(used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared)


def _hip_resources(compiled: Any) -> Resources:
    """Read the metadata at the end of the assembly; scratch memory holds spills, 4 bytes a register."""
    used = {
        name: int(value) for name, value in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)\s*$", compiled.asm["amdgcn"], re.M)
    }
    registers = used["vgpr_count"]
    spills = max(4 * (used["vgpr_spill_count"] + used["sgpr_spill_count"]), used["private_segment_fixed_size"])
    return Resources(registers, spills, compiled.metadata.shared)


def check(variants: Sequence[Variant], workers: int) -> int:
    """Compile and print each; returns how many must not ship."""
    from joblib import Parallel, delayed

    return report(variants, Parallel(n_jobs=workers, return_as="generator")(delayed(resources)(v) for v in variants))


def report(variants: Sequence[Variant], found: Iterable[Resources]) -> int:
    """Print what each variant needs as it comes; returns how many must not ship."""
    rejected = 0
    for variant, needs in zip(variants, found, strict=True):
        complaints = needs.complaints(TARGETS[variant.target])
        rejected += bool(complaints)
        verdict = "; ".join(complaints) or "ok"
        print(f"{variant}  registers {needs.registers:3}  spills {needs.spills:3}  shared {needs.shared:5}  {verdict}")
    print(f"{len(variants)} compiled, {rejected} rejected")
    return rejected


def main(targets: Sequence[str] = ()) -> int:
    """Check all that ships, or what ships for some targets; returns the exit status."""
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        print(f"replay-parity: target: expected {', '.join(TARGETS)}, got {unknown[0]!r}", file=sys.stderr)
        return 2
    variants = [variant for variant in shipped() if not targets or variant.target in targets]
    try:
        return 1 if check(variants, os.cpu_count() or 1) else 0
    except CompilerMissing as error:
        print(f"replay-parity: nothing was compiled: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
