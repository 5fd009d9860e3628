"""The builder's constants, casts and elementwise operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import np_erf_fp32, np_erf_fp64

from .handle import (
    ANYWHERE,
    Array,
    Handle,
    Origin,
    Unsupported,
    from_memory,
    held_dtype,
    is_bfloat16,
    memory_dtype,
    round_bfloat16,
    to_memory,
)

Operation = Callable[..., Any]

_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_COMPARISONS: dict[str, Operation] = {
    "LE": np.less_equal,
    "LT": np.less,
    "GE": np.greater_equal,
    "GT": np.greater,
    "EQ": np.equal,
    "NE": np.not_equal,
}
_BINARY: dict[str, Operation] = {
    "create_fadd": np.add,
    "create_fsub": np.subtract,
    "create_fmul": np.multiply,
    "create_fdiv": np.divide,
    "create_precise_divf": np.divide,
    "create_approx_divf": np.divide,
    "create_frem": np.fmod,
    "create_add": np.add,
    "create_sub": np.subtract,
    "create_mul": np.multiply,
    "create_srem": np.fmod,
    "create_urem": np.fmod,
    "create_shl": np.left_shift,
    "create_minsi": np.minimum,
    "create_minui": np.minimum,
    "create_maxsi": np.maximum,
    "create_maxui": np.maximum,
    "create_minimumf": np.minimum,
    "create_maximumf": np.maximum,
    "create_minnumf": np.fmin,
    "create_maxnumf": np.fmax,
    "create_and": np.bitwise_and,
    "create_or": np.bitwise_or,
    "create_xor": np.bitwise_xor,
}
_UNARY: dict[str, Operation] = {
    "create_fneg": np.negative,
    "create_fabs": np.abs,
    "create_iabs": np.abs,
    "create_exp": np.exp,
    "create_exp2": np.exp2,
    "create_log": np.log,
    "create_log2": np.log2,
    "create_sqrt": np.sqrt,
    "create_precise_sqrt": np.sqrt,
    "create_sin": np.sin,
    "create_cos": np.cos,
    "create_floor": np.floor,
    "create_ceil": np.ceil,
    "create_rsqrt": lambda x: 1 / np.sqrt(x),
    "create_erf": lambda x: np_erf_fp64(x) if x.dtype == np.float64 else np_erf_fp32(x),
}
_CASTS = (
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_ext",
    "create_fp_trunc",
)


class Arithmetic:
    """Elementwise methods of Triton's builder on handles; methods that only differ by an operation are made below."""

    # bytes of the largest array made, to size the next group of programs
    peak = 0

    def made(self, data: Array, dtype: Any, origin: Origin = ANYWHERE) -> Handle:
        """A new value; bfloat16 is rounded here."""
        scalar = dtype.scalar
        if is_bfloat16(scalar):
            data = round_bfloat16(data if data.dtype == np.float32 else data.astype(np.float32))
        if data.nbytes > self.peak:
            self.peak = data.nbytes
        return Handle(data, scalar, origin)

    def get_int1(self, value: bool) -> Handle:
        return Handle(np.array([value], np.bool_), tl.int1)

    def get_fp16(self, value: float) -> Handle:
        return Handle(np.array([value], np.float16), tl.float16)

    def get_bf16(self, value: float) -> Handle:
        return self.made(np.array([value], np.float32), tl.bfloat16)

    def get_fp32(self, value: float) -> Handle:
        return Handle(np.array([value], np.float32), tl.float32)

    def get_fp64(self, value: float) -> Handle:
        return Handle(np.array([value], np.float64), tl.float64)

    def get_null_value(self, dtype: Any) -> Handle:
        return Handle(np.zeros(1, held_dtype(dtype)), dtype.scalar)

    def get_all_ones_value(self, dtype: Any) -> Handle:
        kind = held_dtype(dtype)
        return Handle(np.invert(np.zeros(1, kind)), dtype.scalar)

    def _binary(self, operation: Operation, lhs: Handle, rhs: Handle) -> Handle:
        a, b = lhs.data, rhs.data
        if a.dtype == np.bool_ and b.dtype == np.bool_:
            # int1 is an integer of one bit that wraps around; numpy's bool saturates
            return Handle((operation(a.view(np.int8), b.view(np.int8)) & 1).astype(np.bool_), tl.int1)
        data = operation(a, b)
        kind = held_dtype(lhs.dtype)
        return self.made(data if data.dtype == kind else data.astype(kind), lhs.dtype)

    def _compare(self, operation: Operation, lhs: Handle, rhs: Handle) -> Handle:
        return Handle(operation(lhs.data, rhs.data), tl.int1)

    def _unary(self, operation: Operation, arg: Handle) -> Handle:
        data = operation(arg.data)
        kind = held_dtype(arg.dtype)
        return self.made(data if data.dtype == kind else data.astype(kind), arg.dtype)

    def create_idiv(self, lhs: Handle, rhs: Handle) -> Handle:
        # rounds towards zero as C does, where numpy rounds down
        data = (lhs.data - np.fmod(lhs.data, rhs.data)) // rhs.data
        return self.made(data.astype(held_dtype(lhs.dtype), copy=False), lhs.dtype)

    create_sdiv = create_idiv
    create_udiv = create_idiv

    def create_ashr(self, lhs: Handle, rhs: Handle) -> Handle:
        signed = np.dtype(f"i{lhs.data.itemsize}")
        data = np.right_shift(lhs.data.astype(signed), rhs.data.astype(signed))
        return self.made(data.astype(lhs.data.dtype), lhs.dtype)

    def create_lshr(self, lhs: Handle, rhs: Handle) -> Handle:
        if lhs.data.dtype == np.bool_:
            return self._binary(np.right_shift, lhs, rhs)
        unsigned = np.dtype(f"u{lhs.data.itemsize}")
        data = np.right_shift(lhs.data.astype(unsigned), rhs.data.astype(unsigned))
        return self.made(data.astype(lhs.data.dtype), lhs.dtype)

    def create_umulhi(self, lhs: Handle, rhs: Handle) -> Handle:
        kind = lhs.data.dtype
        unsigned = np.dtype(f"u{kind.itemsize}")
        a, b = lhs.data.astype(unsigned), rhs.data.astype(unsigned)
        if kind.itemsize < 8:
            wide = np.dtype(f"u{kind.itemsize * 2}")
            high = np.multiply(a.astype(wide), b.astype(wide)) >> wide.type(kind.itemsize * 8)
        else:
            half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
            middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
            high = (a >> half) * (b >> half) + (middle >> half) + (((a & low) * (b >> half) + (middle & low)) >> half)
        return self.made(high.astype(unsigned).astype(kind), lhs.dtype)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        kind = z.data.dtype
        if kind in (np.float32, np.float64) and not is_bfloat16(z.dtype):
            fused = native.fma_fp32 if kind == np.float32 else native.fma_fp64
            arrays = [np.ascontiguousarray(a) for a in np.broadcast_arrays(x.data, y.data, z.data)]
            return self.made(fused(*arrays), z.dtype)
        # the product of two 16-bit floats is exact in float64
        product = np.multiply(x.data, y.data, dtype=np.float64)
        return self.made(np.add(product, z.data, dtype=np.float64).astype(kind), z.dtype)

    def create_clampf(self, arg: Handle, low: Handle, high: Handle, propagate_nans: Any) -> Handle:
        if propagate_nans == ir.PROPAGATE_NAN.NONE:
            return self._binary(np.fmin, self._binary(np.fmax, arg, low), high)
        return self._binary(np.minimum, self._binary(np.maximum, arg, low), high)

    def create_select(self, condition: Handle, lhs: Handle, rhs: Handle) -> Handle:
        same = lhs.origin is rhs.origin or (isinstance(lhs.origin, int) and lhs.origin == rhs.origin)
        data = np.where(condition.data, lhs.data, rhs.data)
        if data.nbytes > self.peak:
            self.peak = data.nbytes
        return Handle(data, lhs.dtype, lhs.origin if same else ANYWHERE, lhs.aligned and rhs.aligned)

    def create_cast(self, src: Handle, dst_type: Any) -> Handle:
        """Between numbers, to the nearest even."""
        return self.made(src.data.astype(held_dtype(dst_type)), dst_type)

    def create_int_cast(self, src: Handle, dst_type: Any, is_signed: bool) -> Handle:
        data = src.data if is_signed or src.data.dtype == np.bool_ else src.data.view(f"u{src.data.itemsize}")
        return self.made(data.astype(held_dtype(dst_type)), dst_type)

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding_mode: Any) -> Handle:
        nearest = self.create_cast(src, dst_type)
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return nearest
        if not is_bfloat16(dst_type):
            away = np.abs(nearest.data.astype(src.data.dtype)) > np.abs(src.data)
            data = np.where(away, np.nextafter(nearest.data, nearest.data.dtype.type(0)), nearest.data)
            return Handle(data, dst_type.scalar)
        if src.data.dtype != np.float32:
            raise Unsupported(f"rounding {src.dtype} towards zero to bfloat16")
        return Handle((src.data.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32), dst_type.scalar)

    def create_bitcast(self, src: Handle, dst_type: Any) -> Handle:
        data = to_memory(src.data, src.dtype).view(memory_dtype(dst_type))
        return Handle(from_memory(data, dst_type), dst_type.scalar, src.origin)

    def create_ptr_to_int(self, src: Handle, dst_type: Any) -> Handle:
        return Handle(src.data.astype(memory_dtype(dst_type)), dst_type.scalar)


def _add_operations() -> None:
    def binary(operation: Operation) -> Any:
        return lambda self, lhs, rhs: self._binary(operation, lhs, rhs)

    def compare(operation: Operation) -> Any:
        return lambda self, lhs, rhs: self._compare(operation, lhs, rhs)

    def unary(operation: Operation) -> Any:
        return lambda self, arg: self._unary(operation, arg)

    def constant(name: str) -> Any:
        dtype = getattr(tl, name)
        kind = memory_dtype(dtype)
        return lambda self, value: Handle(np.array([value], kind), dtype)

    for name, operation in _BINARY.items():
        setattr(Arithmetic, name, binary(operation))
    for name, operation in _UNARY.items():
        setattr(Arithmetic, name, unary(operation))
    for name, operation in _COMPARISONS.items():
        for prefix in ("create_icmpS", "create_icmpU", "create_icmp", "create_fcmpO", "create_fcmpU"):
            setattr(Arithmetic, prefix + name, compare(operation))
    for name in _INTEGERS:
        setattr(Arithmetic, f"get_{name}", constant(name))
    for name in _CASTS:
        setattr(Arithmetic, name, Arithmetic.create_cast)


_add_operations()
