"""Statements of a kernel: a branch whose programs disagree splits their group, and it is joined behind.

A statement takes the scope in which it starts and gives the one in which the next statement starts, None if no
program gets there. Loops go on with the programs that have not finished.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from .builder import Builder
from .calls import Calls
from .expressions import plain
from .findings import BadAccess, KernelError
from .handle import Handle, Unsupported, held_dtype
from .scope import Scope, join
from .source import Source

_SPINS = ("atomic_cas", "atomic_xchg", "atomic_poll")
_LONGEST = 1_000_000


class _Loop:
    """Programs that left the body of a loop early."""

    def __init__(self) -> None:
        self.broken: list[Scope] = []
        self.continued: list[Scope] = []


class _Activation:
    """One run of a function: what it returned, for which programs, and the loops that are open."""

    def __init__(self) -> None:
        self.results: list[tuple[Scope, Any]] = []
        self.loops: list[_Loop] = []


class Statements(Calls):
    """Runs functions statement by statement."""

    def __init__(self, builder: Builder) -> None:
        super().__init__(builder)
        self._activation = _Activation()

    def run_function(self, source: Source, arguments: dict[str, Any], scope: Scope) -> Any:
        """The result of a function for the programs of ``scope``."""
        local = Scope(source, scope.programs)
        for name, value in arguments.items():
            local.bind(name, value)
        outer, self._activation = self._activation, _Activation()
        try:
            rest = self.block(source.body, local)
            results = self._activation.results
        finally:
            self._activation = outer
        if rest is not None:
            results.append((rest, None))
        return self.merged(results, scope)

    def block(self, body: list[ast.stmt], scope: Scope | None) -> Scope | None:
        """Statements one after another."""
        for node in body:
            if scope is None:
                return None
            method = self._methods.get(type(node)) or self.method(type(node), "_run_")
            try:
                scope = method(node, scope)
            except (BadAccess, KernelError, Unsupported):
                raise
            except NotImplementedError as error:
                raise Unsupported(str(error) or "an operation without an implementation") from error
            except Exception as error:
                raise KernelError(f"{scope.source.file}:{node.lineno}: {error or type(error).__name__}") from error
        return scope

    def _run_Expr(self, node: ast.Expr, scope: Scope) -> Scope:
        if not isinstance(node.value, ast.Constant):
            self.evaluate(node.value, scope)
        return scope

    def _run_Pass(self, node: ast.Pass, scope: Scope) -> Scope:
        return scope

    def _run_Assert(self, node: ast.Assert, scope: Scope) -> Scope:
        # a device assert, which only debug builds compile, unless the condition is a constant
        condition = self.evaluate(node.test, scope)
        if not isinstance(condition, tl.tensor) and not condition:
            raise AssertionError(str(self.evaluate(node.msg, scope)) if node.msg else "assertion failed")
        return scope

    def _run_Assign(self, node: ast.Assign, scope: Scope) -> Scope:
        value = self._assignable(self.evaluate(node.value, scope))
        for target in node.targets:
            self._bind(target, value, scope)
        return scope

    def _run_AnnAssign(self, node: ast.AnnAssign, scope: Scope) -> Scope:
        if node.value is not None:
            value = self.evaluate(node.value, scope)
            self._bind(node.target, value if _is_constexpr(node) else self._assignable(value), scope)
        return scope

    def _run_AugAssign(self, node: ast.AugAssign, scope: Scope) -> Scope:
        if not isinstance(node.target, ast.Name):
            raise Unsupported("an assignment to an element or attribute")
        value = self.binary(type(node.op), self._Name(node.target, scope), self.evaluate(node.value, scope))
        scope.bind(node.target.id, self._assignable(value))
        return scope

    def _assignable(self, value: Any) -> Any:
        """A number becomes a tensor when it is assigned, as in the compiler."""
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self._assignable(item) for item in value)
        return self.to_tensor(value) if isinstance(value, bool | int | float) else value

    def _bind(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, value)
        elif isinstance(target, ast.Tuple | ast.List):
            items = list(value)
            if len(items) != len(target.elts):
                raise ValueError(f"{len(items)} values for {len(target.elts)} names")
            for element, item in zip(target.elts, items, strict=True):
                self._bind(element, plain(item), scope)
        else:
            raise Unsupported("an assignment to an element or attribute")

    def _run_Return(self, node: ast.Return, scope: Scope) -> None:
        value = None if node.value is None else self.evaluate(node.value, scope)
        self._activation.results.append((scope, value))

    def _run_Break(self, node: ast.Break, scope: Scope) -> None:
        self._activation.loops[-1].broken.append(scope)

    def _run_Continue(self, node: ast.Continue, scope: Scope) -> None:
        self._activation.loops[-1].continued.append(scope)

    def _run_If(self, node: ast.If, scope: Scope) -> Scope | None:
        answers = self.truth(self.evaluate(node.test, scope))
        if isinstance(answers, bool):
            return self.block(node.body if answers else node.orelse, scope)
        parts = [scope.part(np.flatnonzero(answers)), scope.part(np.flatnonzero(~answers))]
        ends = [self.block(body, part) for body, part in zip((node.body, node.orelse), parts, strict=True)]
        return self._join(scope, ends)

    def _join(self, base: Scope, ends: Iterable[Scope | None]) -> Scope | None:
        in_a_loop = bool(self._activation.loops)
        return join(base, [end for end in ends if end is not None], self.to_tensor, now=in_a_loop)

    def _run_While(self, node: ast.While, scope: Scope) -> Scope | None:
        if len(scope.programs) > 1 and _spins(node):
            raise Unsupported("a while loop that waits for another program")
        finished: list[Scope | None] = []
        current: Scope | None = scope
        for _ in range(_LONGEST):
            if current is None:
                return self._join(scope, finished)
            answers = self.truth(self.evaluate(node.test, current))
            if isinstance(answers, bool):
                if not answers:
                    return self._join(scope, [*finished, current])
                body = current
            else:
                finished.append(current.part(np.flatnonzero(~answers)))
                body = current.part(np.flatnonzero(answers))
            current = self._once(node.body, body, finished)
        raise Unsupported(f"a while loop of more than {_LONGEST} rounds")

    def _once(self, body: list[ast.stmt], scope: Scope, finished: list[Scope | None]) -> Scope | None:
        """One round of a loop; programs that break are finished."""
        loop = _Loop()
        self._activation.loops.append(loop)
        try:
            end = self.block(body, scope)
        finally:
            self._activation.loops.pop()
        finished.extend(loop.broken)
        return self._join(scope, [end, *loop.continued])

    def _run_For(self, node: ast.For, scope: Scope) -> Scope | None:
        if node.orelse:
            raise Unsupported("else after a for loop")
        iterable = node.iter
        name = ""
        if isinstance(iterable, ast.Call):
            name = iterable.func.attr if isinstance(iterable.func, ast.Attribute) else getattr(iterable.func, "id", "")
        if isinstance(iterable, ast.Call) and name in ("range", "static_range"):
            bounds = self._bounds(iterable, scope)
            if name == "range":
                return self._run_range(node, scope, bounds)
            items: Iterable[Any] = range(*(int(plain(bound)) for bound in bounds))
        else:
            items = self.evaluate(iterable, scope)
            if isinstance(items, tl.tensor):
                raise TypeError("a for loop over a tensor")
        finished: list[Scope | None] = []
        current: Scope | None = scope
        for item in items:
            if current is None:
                break
            self._bind(node.target, plain(item), current)
            current = self._once(node.body, current, finished)
        return self._join(scope, [*finished, current])

    def _bounds(self, call: ast.Call, scope: Scope) -> list[Any]:
        """start, stop and step of a range."""
        args = self._items(call.args, scope)
        named = {str(k.arg): self.evaluate(k.value, scope) for k in call.keywords}
        names = ("arg1", "arg2", "step")
        given = {**named, **dict(zip(names, args, strict=False))}
        first, second, step = given.get("arg1"), given.get("arg2"), given.get("step")
        start, stop = (0, first) if second is None else (first, second)
        return [start, stop, 1 if step is None else step]

    def _run_range(self, node: ast.For, scope: Scope, bounds: list[Any]) -> Scope | None:
        """A loop whose variable is a tensor; the number of rounds may differ between programs."""
        tensors = [self.to_tensor(bound) for bound in bounds]
        if any(tensor.type.is_block() or not tensor.dtype.is_int() for tensor in tensors):
            raise TypeError("the bounds and step of a loop must be scalar integers")
        promote = self.semantic.integer_promote_impl
        kind = promote(promote(tensors[0].dtype, tensors[1].dtype), tensors[2].dtype)
        start, stop, step = (tensor.handle.data.astype(np.int64) for tensor in tensors)
        if (step == 0).any():
            raise ValueError("the step of a loop is zero")
        rounds: NDArray[np.int64] = np.maximum(-((start - stop) // step), 0)
        finished: list[Scope | None] = []
        current: Scope | None = scope
        for turn in range(int(rounds.max())):
            if current is None:
                break
            rows = scope.programs.rows_of(current.programs)
            left = turn < (rounds[rows] if len(rounds) > 1 else rounds)
            if not left.all():
                finished.append(current.part(np.flatnonzero(~left)))
                current = current.part(np.flatnonzero(left))
                rows = rows[left]
            value = start + turn * step
            data = (value[rows] if len(value) > 1 else value).astype(held_dtype(kind))
            self._bind(node.target, tl.tensor(Handle(data, kind), kind), current)
            current = self._once(node.body, current, finished)
        return self._join(scope, [*finished, current])


@cache
def _is_constexpr(node: ast.AnnAssign) -> bool:
    return "constexpr" in ast.unparse(node.annotation)


@cache
def _spins(node: ast.While) -> bool:
    names = (getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node))
    return any(name in _SPINS for name in names)
