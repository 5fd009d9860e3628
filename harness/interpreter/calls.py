"""Calls inside a kernel: device functions, Triton's builtins, compile-time functions."""

from __future__ import annotations

import ast
import builtins
from typing import Any

import triton.language as tl
from triton.language import core, standard
from triton.runtime.jit import ConstexprFunction

from .expressions import Expressions, plain
from .handle import Unsupported
from .language import Bound, is_device_function, pristine, wants
from .reductions import Reductions
from .scope import MISSING, Scope, merge
from .source import Source

_STATIC = (len, isinstance, getattr, hasattr, int, float, bool, str, abs, sum, tuple, list, type, min, max, round)
_DEEPEST = 64
# caches are not modelled
_ANY_CACHE = core._CachePolicy()


class Calls(Expressions):
    """Evaluates calls."""

    depth = 0

    def run_function(self, source: Source, arguments: dict[str, Any], scope: Scope) -> Any:
        """The result of a function for the programs of ``scope``; statements define it."""
        raise NotImplementedError

    def _Call(self, node: ast.Call, scope: Scope) -> Any:
        callee = self.evaluate(node.func, scope)
        args = self._items(node.args, scope)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, scope)
            kwargs.update({keyword.arg: value} if keyword.arg else value)
        self.builder.at(scope.programs, scope.source.file, node.lineno)
        return plain(self.call(callee, args, kwargs, scope))

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> Any:
        """callee(*args, **kwargs) for the programs of ``scope``."""
        if isinstance(callee, Bound):
            args = [callee.owner, *args]
            callee = callee.function
        name = self.ours.get(id(callee))
        if name is not None:
            return getattr(self, f"_{name.lstrip('_')}")(scope, *args, **kwargs)
        if is_device_function(callee):
            return self.call_function(callee, args, kwargs, scope)
        if isinstance(callee, ConstexprFunction):
            return callee.fn(*(plain(arg) for arg in args), **{name: plain(arg) for name, arg in kwargs.items()})
        function = pristine(getattr(callee, "__func__", callee))
        if getattr(function, core.TRITON_BUILTIN, False):
            return self._builtin(callee, function, args, kwargs)
        return self._python(callee, args, kwargs, scope)

    def call_function(self, function: Any, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> Any:
        """A function made by ``triton.jit``."""
        source = Source.of(function.fn)
        arguments = source.bind(args, kwargs)
        if self.depth >= _DEEPEST:
            raise Unsupported(f"calls nested {_DEEPEST} deep")
        self.depth += 1
        try:
            return self.run_function(source, {name: plain(value) for name, value in arguments.items()}, scope)
        finally:
            self.depth -= 1

    def _builtin(self, callee: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        owner = getattr(callee, "__self__", None)
        semantic, generator = wants(function)
        if semantic:
            kwargs["_semantic"] = self.semantic
        if generator:
            kwargs["_generator"] = self
        return function(*args, **kwargs) if owner is None else function(owner, *args, **kwargs)

    def _python(self, callee: Any, args: list[Any], kwargs: dict[str, Any], scope: Scope) -> Any:
        if callee in (builtins.min, builtins.max) and any(isinstance(arg, tl.tensor) for arg in args):
            fold = core.minimum if callee is builtins.min else core.maximum
            result = args[0]
            for arg in args[1:]:
                result = self.call(fold, [result, arg], {}, scope)
            return result
        if callee is print:
            return self.call(core.device_print, args, kwargs, scope)
        if getattr(callee, "__triton_aggregate__", False):
            raise Unsupported("an aggregate")
        tensors = any(isinstance(arg, tl.tensor) for arg in [*args, *kwargs.values()])
        ours = isinstance(callee, type) and callee.__module__.startswith("triton.language")
        if callee in _STATIC or ours or not tensors:
            return callee(*args, **kwargs)
        raise Unsupported(f"the call of {getattr(callee, '__name__', callee)} on tensors")

    def _load(
        self,
        scope: Scope,
        pointer: Any,
        mask: Any = None,
        other: Any = None,
        *,
        cache_modifier: Any = "",
        eviction_policy: Any = "",
        volatile: Any = False,
    ) -> Any:
        mask, other = (None if x is None else self.to_tensor(x) for x in (plain(mask), plain(other)))
        return self.semantic.load(pointer, mask, other, _ANY_CACHE, plain(volatile))

    def _store(
        self,
        scope: Scope,
        pointer: Any,
        value: Any,
        mask: Any = None,
        *,
        cache_modifier: Any = "",
        eviction_policy: Any = "",
    ) -> Any:
        mask = plain(mask)
        value, mask = self.to_tensor(value), None if mask is None else self.to_tensor(mask)
        return self.semantic.store(pointer, value, mask, _ANY_CACHE)

    def _reduce(self, scope: Scope, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        return Reductions(self, scope).reduce(input, plain(axis), combine_fn, bool(plain(keep_dims)))

    def _sum(self, scope: Scope, input: Any, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> Any:
        # as in triton.language.standard, where it is called most of all device functions
        kind = standard._pick_sum_dtype.fn(input.dtype, plain(dtype))
        return self._reduce(scope, self.semantic.cast(input, kind), axis, standard._sum_combine, keep_dims)

    def _associative_scan(self, scope: Scope, input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
        return Reductions(self, scope).scan(input, plain(axis), combine_fn, bool(plain(reverse)))

    def _reduce_with_indices(self, scope: Scope, input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        return Reductions(self, scope).reduce_with_indices(input, plain(axis), combine_fn, bool(plain(keep_dims)))

    def _static_assert(self, scope: Scope, cond: Any, msg: Any = "") -> None:
        if isinstance(cond, tl.tensor):
            raise TypeError("static_assert of a value that is known at run time only")
        if not cond:
            raise AssertionError(str(msg) or "static_assert failed")

    def _static_print(self, scope: Scope, *values: Any, **options: Any) -> None:
        print(*values, **options)

    def _hint(self, scope: Scope, input: Any, values: Any) -> Any:
        return input

    _multiple_of = _hint
    _max_contiguous = _hint
    _max_constancy = _hint

    def merged(self, results: list[tuple[Scope, Any]], scope: Scope) -> Any:
        """What a function returned, from the programs that left it at different places."""
        if len(results) == 1:
            return results[0][1]
        rows = [scope.programs.rows_of(part.programs) for part, _ in results]
        value = merge([value for _, value in results], rows, self.to_tensor, "the result of a function")
        return None if value is MISSING else value
