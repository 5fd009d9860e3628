"""The builder's loads, stores and atomics, in place on the memory of torch tensors, checked and counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder

from .findings import Access, BadAccess, Kind
from .handle import Array, Handle, Unsupported, from_memory, is_bfloat16, memory_dtype, round_bfloat16, to_memory
from .programs import Programs
from .regions import Regions
from .shapes import Shapes
from .traffic import Direction, Launch

Check = Literal["off", "collect", "raise"]

# numpy shows no array that starts at address 0, so every index counts from here
_BASE = 4096
_spaces: dict[np.dtype[Any], Array] = {}


def _space(kind: np.dtype[Any]) -> Array:
    """The whole address space as one array: loads and stores become numpy's gathers and scatters."""
    space = _spaces.get(kind)
    if space is None:

        class Everything:
            __array_interface__ = {  # noqa: RUF012
                "data": (_BASE, False),
                "shape": ((2**47 - _BASE) // kind.itemsize,),
                "typestr": kind.str,
                "version": 3,
            }

        space = _spaces[kind] = np.asarray(Everything())
    return space


def read(addresses: Array, kind: np.dtype[Any], aligned: bool = False) -> Array:
    """What lies at these addresses; aligned where they are known to be multiples of the type's size."""
    index = _index(addresses, kind, aligned)
    if index is None:
        every = np.ascontiguousarray(addresses)
        return np.asarray(native.load(every, np.ones(every.shape, np.bool_), np.zeros(every.shape, kind), kind))
    return _space(kind).take(index)


def write(addresses: Array, values: Array, aligned: bool = False) -> None:
    """Put values at these addresses; of two values for one address the later stays."""
    kind = values.dtype
    index = _index(addresses, kind, aligned)
    if index is None:
        every = np.ascontiguousarray(addresses)
        native.store(every, np.ascontiguousarray(values), np.ones(every.shape, np.bool_))
        return
    _space(kind)[index] = values


def _index(addresses: Array, kind: np.dtype[Any], aligned: bool) -> Array | None:
    """Where addresses lie in the space of a type, None if some are no multiple of its size."""
    index: Array = addresses.view(np.int64) - _BASE
    if kind.itemsize > 1:
        if not aligned and int(np.bitwise_or.reduce(index, axis=None)) & (kind.itemsize - 1):
            return None
        index >>= kind.itemsize.bit_length() - 1
    return index


@dataclass
class Watch:
    """What is observed of accesses: bounds and poison, findings so far, the traffic of the launch (None: uncounted)."""

    regions: Regions
    findings: list[Access]
    unchecked: dict[tuple[str, int], int]
    bounds: Check
    poison: Check
    launch: Launch | None = None


class Memory(Shapes):
    """Memory methods of Triton's builder on handles."""

    programs: Programs
    # file and line of the kernel statement that runs
    place: tuple[str, int]
    kernel: str

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._undo: list[tuple[Array, Array]] = []

    def undo(self) -> None:
        """Put back what the launch overwrote."""
        for addresses, values in reversed(self._undo):
            write(addresses, values)
        self._undo.clear()

    def commit(self) -> None:
        """Forget what the launch overwrote."""
        self._undo.clear()

    def create_load(self, ptr: Handle, cache_policy: Any, is_volatile: bool) -> Handle:
        return self.load(ptr, None, None)

    def create_masked_load(self, ptr: Handle, mask: Handle, other: Handle | None, *policy: Any) -> Handle:
        return self.load(ptr, mask.data, other)

    def create_store(self, ptr: Handle, val: Handle, cache_policy: Any) -> None:
        self.store(ptr, val, None)

    def create_masked_store(self, ptr: Handle, val: Handle, mask: Handle, cache_policy: Any) -> None:
        self.store(ptr, val, mask.data)

    def create_atomic_load(self, ptr: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        return self.load(ptr, mask.data, None)

    def create_atomic_store(self, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> None:
        self.store(ptr, val, mask.data)

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        # int1 takes a byte
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        moved = offset.data.astype(np.int64) * size
        return Handle(ptr.data + moved.view(np.uint64), ptr.dtype, ptr.origin, ptr.aligned)

    def create_int_to_ptr(self, src: Handle, dst_type: Any) -> Handle:
        addresses = src.data.astype(np.int64).view(np.uint64)
        return Handle(addresses, dst_type.scalar, self.watch.regions.of(addresses))

    def load(self, ptr: Handle, mask: Array | None, other: Handle | None) -> Handle:
        """What lies at ``ptr``; mask and other broadcast against it."""
        dtype = ptr.get_element_ty()
        kind = memory_dtype(dtype)
        used = self._used(ptr, kind.itemsize, mask, "load")
        if used is None:
            data = from_memory(read(ptr.data, kind, ptr.aligned), dtype)
        else:
            length = max(len(used), len(ptr.data), 1 if other is None else len(other.data))
            shape = (length, *ptr.data.shape[1:])
            if other is None:
                data = np.zeros(shape, kind)
            else:
                data = np.empty(shape, kind)
                data[...] = to_memory(other.data, dtype)
            used = _spread(used, shape)
            data[used] = read(_spread(ptr.data, shape)[used], kind, ptr.aligned)
            data = from_memory(data, dtype)
        if self.watch.poison != "off" and dtype.is_floating():
            self._find_poison(ptr, data, used)
        if data.nbytes > self.peak:
            self.peak = data.nbytes
        return Handle(data, dtype)

    def store(self, ptr: Handle, val: Handle, mask: Array | None) -> None:
        """Put values at ``ptr``; they and the mask broadcast against it."""
        dtype = ptr.get_element_ty()
        kind = memory_dtype(dtype)
        used = self._used(ptr, kind.itemsize, mask, "store")
        values = to_memory(val.data, dtype).astype(kind, copy=False)
        length = max(len(ptr.data), len(values), 1 if used is None else len(used))
        shape = (length, *ptr.data.shape[1:])
        addresses, values = _spread(ptr.data, shape), _spread(values, shape)
        if used is not None:
            used = _spread(used, shape)
            addresses, values = addresses[used], values[used]
        self._remember(addresses, kind, ptr.aligned)
        write(addresses, values, ptr.aligned)

    def create_atomic_rmw(self, op: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        dtype = ptr.get_element_ty()
        kind = memory_dtype(dtype)
        used = self._used(ptr, kind.itemsize, mask.data, "load", "store")
        addresses, values, used = self._each(ptr.data, to_memory(val.data, dtype), mask.data if used is None else used)
        self._remember(addresses[used], kind)
        if is_bfloat16(dtype):
            if op not in (ir.ATOMIC_OP.FADD, ir.ATOMIC_OP.ADD):
                raise Unsupported(f"atomic {op} on bfloat16")
            return Handle(_add_bfloat16(addresses, values, used, dtype), dtype)
        operation = InterpreterBuilder.ir_rmw_op_to_interpreter_rmw_op.get(op)
        order = InterpreterBuilder.ir_sem_to_interpreter_sem.get(sem)
        if operation is None or order is None:
            raise Unsupported(f"atomic {op} with {sem}")
        return Handle(np.asarray(native.atomic_rmw(operation, addresses, values, used, order)), dtype)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Handle:
        dtype = ptr.get_element_ty()
        kind = memory_dtype(dtype)
        used = self._used(ptr, kind.itemsize, None, "load", "store")
        if used is not None:
            raise Unsupported("an atomic_cas outside its tensor")
        expected, values = (to_memory(x.data, dtype).astype(kind, copy=False) for x in (cmp, val))
        addresses, expected, values = self._each(ptr.data, expected, values)
        self._remember(addresses, kind)
        order = InterpreterBuilder.ir_sem_to_interpreter_sem[sem]
        return Handle(np.asarray(native.atomic_cas(addresses, expected, values, order)), dtype)

    def _each(self, *arrays: Array) -> list[Array]:
        """The arrays once for every program: each of them does its own atomic."""
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        shape = (len(self.programs), *shape[1:])
        return [np.ascontiguousarray(np.broadcast_to(array, shape)) for array in arrays]

    def _remember(self, addresses: Array, kind: np.dtype[Any], aligned: bool = False) -> None:
        if addresses.size:
            self._undo.append((addresses.copy(), read(addresses, kind, aligned)))

    def _used(self, ptr: Handle, size: int, mask: Array | None, *directions: Direction) -> Array | None:
        """Lanes that may be accessed, None for all of them; the others are reported, and all that are used counted."""
        used = None if mask is None or mask.all() else mask
        if self.watch.launch is not None:
            self._count(self.watch.launch, ptr, size, used, directions)
        if self.watch.bounds == "off":
            return used
        addresses = ptr.data.view(np.int64)
        region = self.watch.regions[ptr.origin] if isinstance(ptr.origin, int) else None
        if region is None:
            if isinstance(ptr.origin, int) or (ptr.origin < 0).any():
                self.watch.unchecked[self.place] = self.watch.unchecked.get(self.place, 0) + 1
                if isinstance(ptr.origin, int):
                    return used
        elif region.allowed is None and addresses.min() >= region.start and addresses.max() <= region.stop - size:
            return used
        start, stop = self.watch.regions.bounds(ptr.origin, addresses.ndim)
        inside = (addresses >= start) & (addresses <= stop - size)
        if region is not None and region.allowed is not None:
            first = np.where(inside, addresses - start, 0)
            for byte in range(size if inside.any() else 0):
                inside &= region.allowed[first + byte]
        bad = ~inside if used is None else used & ~inside
        if not bad.any():
            return used
        kind: Kind = "out_of_bounds_store" if directions[-1] == "store" else "out_of_bounds_load"
        self._report(kind, self.watch.bounds, ptr, bad)
        return inside if used is None else used & inside

    def _count(
        self, launch: Launch, ptr: Handle, size: int, used: Array | None, directions: tuple[Direction, ...]
    ) -> None:
        lanes = math.prod(ptr.data.shape[1:])
        moved: NDArray[np.int64] | int = lanes * size
        if used is not None:
            each = lanes // (used.size // len(used)) * size
            if len(used) == 1:
                moved = int(np.count_nonzero(used)) * each
            else:
                moved = np.add.reduce(used.reshape(len(used), -1), axis=1, dtype=np.int64) * each
        for direction in directions:
            launch.count(self.place, direction, self.programs.flat, moved)

    def _find_poison(self, ptr: Handle, data: Array, used: Array | None) -> None:
        poisoned = np.isnan(data)
        if used is not None:
            poisoned = poisoned & used
        if poisoned.any():
            self._report("poison", self.watch.poison, ptr, poisoned)

    def _report(self, kind: Kind, check: Check, ptr: Handle, bad: NDArray[np.bool_]) -> None:
        """Note the first of the bad lanes, as the programs run one after another."""
        row, *lane = (int(axis[0]) for axis in np.nonzero(bad))
        lanes = ptr.data[min(row, len(ptr.data) - 1)]
        address = int(np.broadcast_to(lanes, bad.shape[1:])[tuple(lane)])
        number = ptr.origin if isinstance(ptr.origin, int) else int(ptr.origin[min(row, len(ptr.origin) - 1)])
        region = self.watch.regions[number]
        access = Access(
            kind,
            self.kernel,
            *self.place,
            self.programs.at(row),
            tuple(lane),
            self.watch.regions.name(number),
            address - (region.start if region else 0),
            int(np.count_nonzero(bad)) * (len(self.programs) // len(bad)),
        )
        if check == "raise":
            raise BadAccess(access)
        self.watch.findings.append(access)


def _spread(array: Array, shape: tuple[int, ...]) -> Array:
    return array if array.shape == shape else np.broadcast_to(array, shape)


def _add_bfloat16(addresses: Array, values: Array, used: Array, dtype: Any) -> Array:
    """Atomic adds one after another, as bfloat16 has no native one; the values before."""
    before = np.zeros(addresses.shape, np.float32)
    kind = memory_dtype(dtype)
    for lane in zip(*np.nonzero(used), strict=True):
        at = addresses[lane].reshape(1)
        before[lane] = from_memory(read(at, kind), dtype)[0]
        total = round_bfloat16(before[lane].reshape(1) + from_memory(values[lane].reshape(1), dtype))
        write(at, to_memory(total, dtype))
    return before
