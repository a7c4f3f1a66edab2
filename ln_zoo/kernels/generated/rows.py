"""Expressions over one row, the language of generated kernels.

A row (k * W) is k blocks of W units, so chunks and concatenations of gates only select blocks. A
node is a vector over the units of a block, a number of the row, or a constant; equal nodes are one
object.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ln_zoo.kernels.generated.trace import Unsupported

UNIT, ROW, CONST = "unit", "row", "const"
#: Operations whose results are conditions.
COMPARISONS = frozenset({"lt", "gt", "le", "ge", "eq", "ne"})
CONDITIONS = COMPARISONS | {"and", "or", "not", "flag"}
#: Reductions of a row to a number.
REDUCTIONS = frozenset({"sum", "max"})


class Node:
    """An expression, compared by identity.

    ``data`` is the value of a constant, or name and block of a load. ``width`` is the number of
    units of a vector, 0 for numbers.
    """

    __slots__ = ("args", "data", "kind", "number", "op", "width")

    def __init__(
        self, op: str, args: tuple[Node, ...], data: Any, kind: str, width: int, number: int
    ) -> None:
        self.op, self.args, self.data = op, args, data
        self.kind, self.width, self.number = kind, width, number

    @property
    def condition(self) -> bool:
        return self.op in CONDITIONS

    def __repr__(self) -> str:
        return f"{self.op}{self.data or ''}({', '.join(map(repr, self.args))})"


def _divided(a: float, b: float) -> float:
    return a / b if b else math.nan if a == 0 or a != a else math.copysign(math.inf, a)


_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _divided,
    "neg": operator.neg, "abs": abs, "sqrt": math.sqrt, "exp": math.exp, "maximum": max,
    "minimum": min, "lt": operator.lt, "gt": operator.gt, "eq": operator.eq, "le": operator.le,
    "ge": operator.ge, "ne": operator.ne, "and": operator.and_, "or": operator.or_,
    "not": operator.not_,
}  # fmt: skip
_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "and", "or", "eq", "ne"})


class Rows:
    """Builder of nodes."""

    def __init__(self) -> None:
        self._nodes: dict[Any, Node] = {}

    def _node(self, op: str, args: tuple[Node, ...], data: Any, kind: str, width: int) -> Node:
        key = (op, tuple(map(id, args)), data, type(data))
        if key not in self._nodes:
            self._nodes[key] = Node(op, args, data, kind, width, len(self._nodes))
        return self._nodes[key]

    def const(self, value: float) -> Node:
        value = float(value)
        return self._node("const", (), math.nan if value != value else value, CONST, 0)

    def load(self, name: str, block: int, width: int, flag: bool = False) -> Node:
        """Block of a vector, or a number of the row if ``width`` is 0."""
        op = "flag" if flag else "load"
        return self._node(op, (), (name, block), UNIT if width else ROW, width)

    def reduce(self, op: str, blocks: Sequence[Node], width: int) -> Node:
        """Sum or maximum over the units of all blocks of this width."""
        units = [self.number(b) for b in blocks if b.kind == UNIT]
        parts = [self._node(op, tuple(units), None, ROW, 0)] if units else []
        for b in blocks:
            if b.kind != UNIT:
                b = self.number(b)
                parts.append(b if op == "max" else self.op("mul", b, self.const(width)))
        found = parts[0]
        for part in parts[1:]:
            found = self.op("maximum" if op == "max" else "add", found, part)
        return found

    def number(self, node: Node) -> Node:
        """A condition as 0 or 1; other nodes as they are."""
        if not node.condition:
            return node
        return self.op("where", node, self.const(1.0), self.const(0.0))

    def test(self, node: Node) -> Node:
        """A number as a condition: whether it is not 0."""
        return node if node.condition else self.op("ne", node, self.const(0.0))

    def op(self, name: str, *args: Node) -> Node:
        if name in ("and", "or", "not"):
            args = tuple(map(self.test, args))
        elif name == "where":
            args = (self.test(args[0]), *map(self.number, args[1:]))
        else:
            args = tuple(map(self.number, args))
        values: list[Any] = [a.data if a.kind == CONST else None for a in args]
        if None not in values and name in _NUMBERS:
            return self._folded(name, values)
        simple = self._simplified(name, args, values)
        if simple is not None:
            return simple
        if name in _COMMUTATIVE:
            args = tuple(sorted(args, key=lambda a: (a.kind == CONST, a.number)))
        widths = {a.width for a in args if a.kind == UNIT}
        if len(widths) > 1:
            raise Unsupported(f"{name} of rows of different widths")
        kinds = {a.kind for a in args}
        kind = UNIT if UNIT in kinds else ROW if ROW in kinds else CONST
        return self._node(name, args, None, kind, max(widths, default=0))

    def _folded(self, name: str, values: Sequence[float]) -> Node:
        try:
            return self.const(_NUMBERS[name](*values))
        except (ValueError, OverflowError):
            raise Unsupported(f"{name} of the constants {values}") from None

    def _simplified(self, name: str, args: tuple[Node, ...], values: list[Any]) -> Node | None:
        if name == "add":
            return args[1] if values[0] == 0 else args[0] if values[1] == 0 else None
        if name == "sub":
            if values[1] == 0:
                return args[0]
            return self.op("neg", args[1]) if values[0] == 0 else None
        if name == "mul":
            # Zeros come from gradients that are absent.
            if 0 in values:
                return self.const(0.0)
            return args[1] if values[0] == 1 else args[0] if values[1] == 1 else None
        if name == "div" and values[0] == 0:
            return self.const(0.0)
        if name == "div" and values[1]:
            return self.op("mul", args[0], self.const(1 / values[1]))
        if name in ("neg", "flip") and args[0].op == name:
            return args[0].args[0]
        if name == "flip" and args[0].kind != UNIT:
            return args[0]
        if name == "where":
            if values[0] is not None:
                return args[1] if values[0] else args[2]
            return args[1] if args[1] is args[2] else None
        return None


class Rewrite:
    """Copy expressions, replacing those for which ``choose`` returns a node."""

    def __init__(self, rows: Rows, choose: Callable[[Node], Node | None]) -> None:
        self._rows, self._choose = rows, choose
        self._done: dict[Node, Node] = {}

    def __call__(self, node: Node) -> Node:
        left = [(node, False)]
        while left:
            now, ready = left.pop()
            if now in self._done:
                continue
            if ready:
                self._done[now] = self._copy(now)
                continue
            found = self._choose(now)
            if found is not None:
                self._done[now] = found
                continue
            left.append((now, True))
            left += [(a, False) for a in now.args]
        return self._done[node]

    def _copy(self, node: Node) -> Node:
        args = [self._done[a] for a in node.args]
        if all(a is b for a, b in zip(args, node.args, strict=True)):
            return node
        if node.op in REDUCTIONS:
            return self._rows.reduce(node.op, args, node.args[0].width)
        return self._rows.op(node.op, *args)


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """These nodes and all below them, arguments first."""
    found: dict[Node, None] = {}
    left = [(node, False) for node in nodes]
    while left:
        node, ready = left.pop()
        if node in found:
            continue
        if ready:
            found[node] = None
        else:
            left.append((node, True))
            left += [(a, False) for a in node.args]
    return list(found)


def loads(nodes: Iterable[Node]) -> set[Node]:
    """Loads below these nodes."""
    return {node for node in in_order(nodes) if node.op in ("load", "flag")}
