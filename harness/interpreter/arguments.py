"""The arguments of a launch as a kernel sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import TensorWrapper, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from .expressions import plain
from .handle import Handle, Unsupported, held_dtype, memory_dtype
from .regions import Regions
from .source import Source


def bind(source: Source, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Values by parameter name, defaults filled in; compile options such as num_warps are dropped."""
    return source.bind(list(args), {name: kwargs[name] for name in kwargs if name in source.signature.parameters})


def kernel_values(source: Source, arguments: dict[str, Any], regions: Regions) -> dict[str, Any]:
    """Arguments as the kernel's names: tensors as pointers, numbers as scalars, constexprs as they are."""
    return {
        parameter.name: plain(arguments[parameter.name])
        if parameter.is_constexpr
        else _value(parameter.name, arguments[parameter.name], parameter, regions)
        for parameter in source.parameters
    }


def _value(name: str, value: Any, parameter: Any, regions: Regions) -> Any:
    value = plain(value)
    if isinstance(value, np.integer | np.bool_):
        value = value.item()
    if isinstance(value, tuple):
        return tuple(_value(f"{name}[{i}]", item, parameter, regions) for i, item in enumerate(value))
    if isinstance(value, bool):
        return _scalar(value, tl.int1)
    if isinstance(value, int):
        return _scalar(value, tl.str_to_ty(parameter.annotation_type or mangle_type(value), None))
    if isinstance(value, float):
        return _scalar(value, tl.str_to_ty(parameter.annotation_type or "fp32", None))
    if isinstance(value, torch.Tensor | TensorWrapper):
        return _pointer(name, value, parameter.is_const, regions)
    if isinstance(value, TensorDescriptor):
        raise Unsupported("a tensor descriptor")
    return value


def _scalar(value: Any, dtype: Any) -> Any:
    return tl.tensor(Handle(np.array([value], held_dtype(dtype)), dtype), dtype)


def _pointer(name: str, value: Any, const: bool, regions: Regions) -> Any:
    tensor = value.base if isinstance(value, TensorWrapper) else value
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; the interpreter works on CPU tensors in place, pass .cpu()")
    element = tl.str_to_ty(mangle_type(value).lstrip("*k"), None)
    kind = tl.pointer_type(element, const=const)
    address = np.array([value.data_ptr()], np.uint64)
    aligned = value.data_ptr() % memory_dtype(element).itemsize == 0
    return tl.tensor(Handle(address, kind, regions.register(name, tensor), aligned), kind)
