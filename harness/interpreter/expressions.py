"""Expressions of a kernel, evaluated over its syntax tree for all programs of a scope at once.

What Triton's compiler knows at compile time is a plain Python value here, everything else a ``tl.tensor``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.language import core

from .builder import Builder
from .handle import Array, Unsupported
from .language import attribute, ours, pristine
from .scope import ABSENT, MISSING, Scope, merge
from .semantic import Semantic

_BINARY: dict[type[ast.operator | ast.cmpop], tuple[str, str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("__add__", "__radd__", operator.add),
    ast.Sub: ("__sub__", "__rsub__", operator.sub),
    ast.Mult: ("__mul__", "__rmul__", operator.mul),
    ast.Div: ("__truediv__", "__rtruediv__", operator.truediv),
    ast.FloorDiv: ("__floordiv__", "__rfloordiv__", operator.floordiv),
    ast.Mod: ("__mod__", "__rmod__", operator.mod),
    ast.Pow: ("__pow__", "__rpow__", operator.pow),
    ast.LShift: ("__lshift__", "__rlshift__", operator.lshift),
    ast.RShift: ("__rshift__", "__rrshift__", operator.rshift),
    ast.BitAnd: ("__and__", "__rand__", operator.and_),
    ast.BitOr: ("__or__", "__ror__", operator.or_),
    ast.BitXor: ("__xor__", "__rxor__", operator.xor),
    ast.Eq: ("__eq__", "__eq__", operator.eq),
    ast.NotEq: ("__ne__", "__ne__", operator.ne),
    ast.Lt: ("__lt__", "__gt__", operator.lt),
    ast.LtE: ("__le__", "__ge__", operator.le),
    ast.Gt: ("__gt__", "__lt__", operator.gt),
    ast.GtE: ("__ge__", "__le__", operator.ge),
}
_UNARY: dict[type[ast.unaryop], tuple[str, Callable[[Any], Any]]] = {
    ast.USub: ("__neg__", operator.neg),
    ast.Invert: ("__invert__", operator.invert),
}
Mask = NDArray[np.bool_]


class Expressions:
    """Evaluates expressions; calls and statements are in the classes built on it."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.semantic = Semantic(builder)
        self.ours = ours()
        self._methods: dict[type[ast.AST], Any] = {}

    def evaluate(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression. Raises Unsupported for syntax that Triton's compiler does not know either."""
        method = self._methods.get(type(node)) or self.method(type(node), "_")
        return method(node, scope)

    def method(self, kind: type[ast.AST], prefix: str) -> Callable[..., Any]:
        """The method for a kind of syntax."""
        method: Callable[..., Any] | None = getattr(self, prefix + kind.__name__, None)
        if method is None:
            raise Unsupported(f"the syntax {kind.__name__}")
        self._methods[kind] = method
        return method

    def truth(self, value: Any) -> bool | Mask:
        """A condition: one answer for all programs, or (P,) where they differ."""
        if isinstance(value, core.condition):
            value = value.condition
        if not isinstance(value, tl.tensor):
            return bool(plain(value))
        data: Array = value.handle.data
        if data[0].size != 1:
            raise TypeError("a condition is a block of more than one element")
        answers: Mask = data.reshape(len(data)) != 0
        if answers.all():
            return True
        return answers if answers.any() else False

    def to_tensor(self, value: Any) -> Any:
        """A tensor of a plain number, a tensor as it is."""
        return self.semantic.to_tensor(value)

    def binary(self, kind: type[ast.operator | ast.cmpop], lhs: Any, rhs: Any) -> Any:
        """lhs op rhs, as the tensor among them defines it."""
        forward, reflected, operation = _BINARY[kind]
        if isinstance(lhs, tl.tensor) or isinstance(rhs, tl.tensor):
            result = self.semantic.elementwise(kind, lhs, rhs)
            if result is not None:
                return result
        if isinstance(lhs, tl.tensor):
            return pristine(getattr(tl.tensor, forward))(lhs, rhs, _semantic=self.semantic)
        if isinstance(rhs, tl.tensor):
            return pristine(getattr(tl.tensor, reflected))(rhs, lhs, _semantic=self.semantic)
        return plain(operation(plain(lhs), plain(rhs)))

    def _Constant(self, node: ast.Constant, scope: Scope) -> Any:
        return node.value

    def _Name(self, node: ast.Name, scope: Scope) -> Any:
        value = scope.get(node.id)
        if value is MISSING:
            raise NameError(f"{node.id} is not set in every branch that leads here")
        if value is ABSENT:
            value = scope.source.outer(node.id)
        return plain(value)

    def _Tuple(self, node: ast.Tuple, scope: Scope) -> Any:
        return tuple(self._items(node.elts, scope))

    def _List(self, node: ast.List, scope: Scope) -> Any:
        return self._items(node.elts, scope)

    def _items(self, nodes: list[ast.expr], scope: Scope) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                items.extend(plain(item) for item in self.evaluate(node.value, scope))
            else:
                items.append(self.evaluate(node, scope))
        return items

    def _ListComp(self, node: ast.ListComp, scope: Scope) -> Any:
        if len(node.generators) != 1 or node.generators[0].ifs or not isinstance(node.generators[0].target, ast.Name):
            raise Unsupported("a list comprehension with conditions or several loops")
        inner = scope.part(np.arange(len(scope.programs)))
        items = []
        for item in self.evaluate(node.generators[0].iter, scope):
            inner.bind(node.generators[0].target.id, plain(item))
            items.append(self.evaluate(node.elt, inner))
        return tuple(items)

    def _Attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self.evaluate(node.value, scope)
        if isinstance(owner, tl.tensor) and node.attr == "T":
            return self.semantic.permute(owner, (1, 0))
        return plain(attribute(owner, node.attr))

    def _Subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner = self.evaluate(node.value, scope)
        index = self.evaluate(node.slice, scope)
        if isinstance(owner, tl.tensor):
            result = self.semantic.indexed(owner, index)
            if result is not None:
                return result
            return pristine(tl.tensor.__getitem__)(owner, index, _semantic=self.semantic)
        return plain(owner[index])

    def _Slice(self, node: ast.Slice, scope: Scope) -> Any:
        return slice(
            *(None if part is None else self.evaluate(part, scope) for part in (node.lower, node.upper, node.step))
        )

    def _UnaryOp(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.evaluate(node.operand, scope)
        if isinstance(node.op, ast.UAdd):
            return value
        if isinstance(node.op, ast.Not):
            return self._negated(value) if isinstance(value, tl.tensor) else not value
        name, operation = _UNARY[type(node.op)]
        if isinstance(value, tl.tensor):
            return pristine(getattr(tl.tensor, name))(value, _semantic=self.semantic)
        return operation(value)

    def _negated(self, value: Any) -> Any:
        return self.semantic.not_(self.semantic.cast(value, tl.int1))

    def _BinOp(self, node: ast.BinOp, scope: Scope) -> Any:
        return self.binary(type(node.op), self.evaluate(node.left, scope), self.evaluate(node.right, scope))

    def _BoolOp(self, node: ast.BoolOp, scope: Scope) -> Any:
        return self._logical(isinstance(node.op, ast.And), (self.evaluate(part, scope) for part in node.values))

    def _logical(self, conjunction: bool, values: Any) -> Any:
        """and / or as the compiler does them: constants decide at once, tensors are all evaluated and combined."""
        result: Any = None
        last: Any = None
        for value in values:
            last = value
            if not isinstance(value, tl.tensor):
                if bool(value) is not conjunction:
                    return value
                continue
            value = self.semantic.cast(value, tl.int1)
            combine = self.semantic.and_ if conjunction else self.semantic.or_
            result = value if result is None else combine(result, value)
        return last if result is None else result

    def _Compare(self, node: ast.Compare, scope: Scope) -> Any:
        def each() -> Any:
            lhs = self.evaluate(node.left, scope)
            for kind, comparator in zip(node.ops, node.comparators, strict=True):
                rhs = self.evaluate(comparator, scope)
                yield self._compared(kind, lhs, rhs)
                lhs = rhs

        return next(each()) if len(node.ops) == 1 else self._logical(True, each())

    def _compared(self, kind: ast.cmpop, lhs: Any, rhs: Any) -> Any:
        if isinstance(kind, ast.Is | ast.IsNot):
            return (lhs is rhs) is isinstance(kind, ast.Is)
        if isinstance(kind, ast.In | ast.NotIn):
            if isinstance(lhs, tl.tensor):
                raise Unsupported("`in` on a tensor")
            return (lhs in rhs) is isinstance(kind, ast.In)
        return self.binary(type(kind), lhs, rhs)

    def _IfExp(self, node: ast.IfExp, scope: Scope) -> Any:
        test = self.evaluate(node.test, scope)
        answers = self.truth(test)
        if isinstance(answers, bool):
            value = self.evaluate(node.body if answers else node.orelse, scope)
            # chosen at run time, also where all programs choose the same: no constant any more
            number = isinstance(test, tl.tensor) and isinstance(value, bool | int | float)
            return self.to_tensor(value) if number else value
        rows = [np.flatnonzero(answers), np.flatnonzero(~answers)]
        sides = zip((node.body, node.orelse), rows, strict=True)
        values = [self.evaluate(side, scope.part(part)) for side, part in sides]
        return merge(values, rows, self.to_tensor, "a conditional expression")

    def _JoinedStr(self, node: ast.JoinedStr, scope: Scope) -> Any:
        parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        return "".join(str(self.evaluate(part, scope)) for part in parts)


def plain(value: Any) -> Any:
    """A constant without its constexpr."""
    return value.value if type(value) is core.constexpr else value
