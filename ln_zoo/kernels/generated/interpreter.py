"""Interpret a joint graph as expressions over one row.

Views cost nothing. Sums over examples keep the row's term: everything after them must be linear,
and the kernel adds up the results of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ln_zoo.kernels.generated.recorder import Operation
from ln_zoo.kernels.generated.rows import CONST, Node, Rows
from ln_zoo.kernels.generated.trace import Trace, Unsupported

Shape = tuple[int, ...]
#: Nodes, as an object array.
Cells = Any

UNARY = frozenset(
    {
        "neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "sigmoid", "tanh",
        "relu", "reciprocal", "sign", "sgn", "erf", "sin", "cos", "atan", "tan", "sinh", "cosh",
        "exp2", "log2", "floor", "ceil", "trunc", "round",
    }
)  # fmt: skip
_SAME_NAME = (
    "add", "sub", "mul", "div", "maximum", "minimum", "lt", "gt", "le", "ge", "eq", "ne", "pow",
)  # fmt: skip
BINARY = dict(zip(_SAME_NAME, _SAME_NAME, strict=True)) | {
    "logical_and": "and", "logical_or": "or", "bitwise_and": "and", "bitwise_or": "or",
}  # fmt: skip
_VIEWS = frozenset(
    {
        "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "expand", "broadcast_in_dim",
        "slice", "select", "split", "split_with_sizes", "permute", "transpose", "t", "detach",
        "alias", "getitem", "as_strided",
    }
)  # fmt: skip
#: Largest number of single numbers that a parameter may have.
_MOST_NUMBERS = 64


@dataclass
class Value:
    """A tensor as an array of nodes; the examples are one row, an axis of units is in blocks."""

    cells: Cells
    unit: int = 0  # width of a block of the last axis; 0: its elements are numbers
    summed: bool = False  # whether it is a row's term of a sum over examples

    @property
    def constant(self) -> Node | None:
        """The only node, if it is a constant."""
        first = self.cells.flat[0]
        same = first.kind == CONST and all(c is first for c in self.cells.flat)
        return first if same else None


class Interpreter:
    """Runs ``_op_NAME`` for each operation; `outputs` has the blocks of each."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.rows = trace, Rows()
        self._units = trace.units
        self._values: dict[Operation, Any] = {}
        self._viewed: set[Operation] = set()  # tensors whose memory others share
        self.outputs: dict[str, list[Node]] = {}
        self._run()

    def _run(self) -> None:
        names = {operation: name for name, operation in self.trace.inputs.items()}
        needed = _needed(self.trace)
        for operation in self.trace.operations:
            if operation in names:
                self._values[operation] = self._input(names[operation], operation.shape)
            elif operation in needed and operation.constant is None:
                self._values[operation] = self._call(operation)
        for name, out in self.trace.outputs.items():
            self.outputs[name] = self._output(name, out)

    def _input(self, name: str, shape: Shape) -> Value:
        flag = name == "reset" or name.startswith("held")
        unit = 0 if name == "reset" else self._unit(shape)
        cells = np.empty(self._extent(shape, unit), dtype=object)
        if not unit and cells.size > _MOST_NUMBERS:
            raise Unsupported(f"a parameter of {cells.size} numbers, which are not units")
        for i, index in enumerate(np.ndindex(cells.shape)):
            cells[index] = self.rows.load(name, i, unit, flag)
        return Value(cells, unit)

    def _output(self, name: str, out: Operation) -> list[Node]:
        value, shape = self._value(out), out.shape
        if value.summed != name.startswith("d_p"):
            raise Unsupported("a sum over the examples")
        return list(self._laid_out(value, shape, self._unit(shape)).flat)

    # Shapes

    def _unit(self, shape: Shape) -> int:
        """Width of the blocks of a last axis of this size, or 0."""
        if not shape or shape[-1] == self.trace.examples:
            return 0
        return next((unit for unit in self._units if shape[-1] % unit == 0), 0)

    def _extent(self, shape: Shape, unit: int) -> Shape:
        found = [1 if size == self.trace.examples else size for size in shape]
        if unit:
            found[-1] //= unit
        return tuple(found)

    def _laid_out(self, value: Value, shape: Shape, unit: int) -> Cells:
        """Cells of a tensor of this shape, with blocks of this width."""
        constant = value.constant
        if constant is not None:
            return np.broadcast_to(self._array(constant), self._extent(shape, unit))
        cells = value.cells
        if (
            value.unit != unit
            and cells.ndim
            and cells.shape[-1] != 1
            and 1 not in (value.unit, unit)
        ):
            raise Unsupported(f"numbers of a row as units, in a tensor of the shape {shape}")
        if unit and value.unit != unit and value.unit and cells.flat[0].width:
            raise Unsupported("rows of different widths")
        try:
            return np.broadcast_to(cells, self._extent(shape, unit))
        except ValueError:
            raise Unsupported(f"a part of a gate, in a tensor of the shape {shape}") from None

    @staticmethod
    def _array(node: Node) -> Cells:
        found = np.empty((), dtype=object)
        found[()] = node
        return found

    # Operations

    def _call(self, node: Operation) -> Any:
        name = node.name
        if node.target is not None:
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise Unsupported(f"it draws random numbers (aten.{name})")
            if node.mutable:
                return self._in_place(node, name)
        if name in _VIEWS:
            self._viewed.update((node, *node.inputs))
        method: Callable[..., Any] | None = getattr(self, f"_op_{name}", None)
        args = self._given(node)
        if name in _VIEWS and isinstance(args[0], Value):
            constant = args[0].constant
            if constant is not None and isinstance(node.shape, tuple) and not _has_parts(name):
                found = self._filled(node, constant.data)
                return Value(found.cells, found.unit, args[0].summed)
        if method is not None:
            return method(node, *args, **node.kwargs)
        if name in UNARY:
            return self._map(node, "sign" if name == "sgn" else name, args[0])
        if name in BINARY:
            if node.kwargs.get("alpha", 1) != 1:
                args = (args[0], self._scaled(node, args[1]))
            if node.kwargs.get("rounding_mode"):
                raise Unsupported("a division that rounds")
            return self._map(node, BINARY[name], args[0], args[1])
        raise Unsupported(f"the operation aten.{name}")

    def _given(self, node: Operation) -> tuple[Any, ...]:
        """Arguments, with values in place of operations."""

        def value(a: Any) -> Any:
            if isinstance(a, Operation):
                return self._literal(a) if node.name == "lift_fresh" else self._value(a)
            return [value(b) for b in a] if isinstance(a, list | tuple) else a

        return tuple(value(a) for a in node.args)

    def _value(self, a: Operation) -> Any:
        if a.constant is not None:
            raise Unsupported("it reads a tensor that is neither weight nor state")
        return self._values[a]

    def _literal(self, a: Operation) -> Value:
        """A number in the code of the step, which is made at each call."""
        if a.constant is None or a.constant.numel() != 1:
            raise Unsupported("it makes a tensor of several numbers")
        return self._number(a.constant.item())

    def _in_place(self, node: Operation, name: str) -> Any:
        """On a tensor of its own that nothing else views."""
        target = node.args[0]
        if target.target is None or target in self._viewed:
            raise Unsupported(f"it changes an input or a view in place (aten.{name})")
        value = self._values[target]
        args = self._given(node)
        plain = name.removesuffix("_")
        if plain in ("fill", "copy", "zero"):
            other = args[1] if len(args) > 1 else 0.0
            found = self._map(node, "add", other, 0.0)
        elif (method := getattr(self, f"_op_{plain}", None)) is not None:
            found = method(node, *args, **node.kwargs)
        elif plain in UNARY or plain in BINARY:
            if node.kwargs.get("alpha", 1) != 1:
                args = (args[0], self._scaled(node, args[1]))
            found = self._map(node, BINARY.get(plain, plain), *args[:2])
        else:
            raise Unsupported(f"the operation aten.{name}")
        cells = self._laid_out(found, shape_of(target), value.unit or found.unit)
        self._values[target] = Value(cells, value.unit or found.unit, found.summed)
        return self._values[target]

    def _scaled(self, node: Operation, a: Any) -> Any:
        """The second operand of an addition times its factor ``alpha``."""
        alpha, source = node.kwargs["alpha"], node.args[1]
        if not isinstance(source, Operation):
            return a * alpha
        return self._map(source, "mul", a, alpha)

    def _map(self, node: Any, name: str, *args: Any) -> Value:
        """An element-wise operation."""
        shape = shape_of(node)
        values = [a if isinstance(a, Value) else self._number(a) for a in args]
        summed = self._summed(name, values)
        there = [v for v in values if v.constant is None]
        units = [v.unit for v in there if v.unit]
        unit = units[0] if units else 0 if there else self._unit(shape)
        cells = [self._adapted(v, unit) for v in values]
        try:
            arrays: Any = np.broadcast_arrays(*cells)
        except ValueError:
            raise Unsupported(f"{name} of a gate and numbers of a row") from None
        found = np.empty(arrays[0].shape, dtype=object)
        for index in np.ndindex(found.shape):
            found[index] = self.rows.op(name, *(a[index] for a in arrays))
        value = Value(found, unit, summed)
        return Value(self._laid_out(value, shape, unit), unit, summed)

    def _adapted(self, value: Value, unit: int) -> Cells:
        constant = value.constant
        if constant is not None:
            return self._array(constant)
        if value.unit == unit or 1 in (value.unit, unit):
            return value.cells
        if not value.cells.ndim or value.cells.shape[-1] == 1:
            if value.unit and value.cells.flat[0].width:
                raise Unsupported("rows of different widths")
            return value.cells
        raise Unsupported("numbers of a row and units in one operation")

    def _number(self, a: Any) -> Value:
        if isinstance(a, bool | int | float):
            return Value(self._array(self.rows.const(a)))
        raise Unsupported(f"an operand {a!r}")

    def _summed(self, name: str, values: Sequence[Value]) -> bool:
        """Whether the result is a row's term of a sum; only linear operations keep that."""
        flags = [v.summed for v in values]
        if not any(flags):
            return False
        if name in ("add", "sub", "neg"):
            zeros = [v.constant is not None and v.constant.data == 0 for v in values]
            linear = all(f or z for f, z in zip(flags, zeros, strict=True))
        else:
            linear = (name == "mul" and flags.count(True) == 1) or (name == "div" and not flags[1])
        if not linear:
            raise Unsupported(f"{name} of a sum over the examples")
        return True

    # For operations

    def _filled(self, node: Operation, value: float) -> Value:
        shape = shape_of(node)
        unit = self._unit(shape)
        cells = np.empty(self._extent(shape, unit), dtype=object)
        cells[...] = self.rows.const(value)
        return Value(cells, unit)

    def _axes(self, node: Any, dims: Any) -> list[int]:
        shape = shape_of(node)
        if isinstance(dims, int):
            dims = [dims]
        return sorted({d % len(shape) for d in (dims or range(len(shape)))}, reverse=True)

    def _reduced(self, name: str, source: Any, a: Value, dims: Any, keep: bool) -> Value:
        """Sum or maximum over these axes; over the examples, the row's term of a sum."""
        shape, cells, unit, summed = shape_of(source), a.cells, a.unit, a.summed
        if a.constant is not None and unit != self._unit(shape):
            unit = self._unit(shape)
            cells = self._laid_out(a, shape, unit)
        pair = "maximum" if name == "max" else "add"
        for d in self._axes(source, dims):
            if shape[d] == self.trace.examples and d == 0:
                if name == "max":
                    raise Unsupported("a maximum over the examples")
                summed = True
                found = cells
            elif unit and d == len(shape) - 1:
                found = np.empty((*cells.shape[:-1], 1), dtype=object)
                for index in np.ndindex(cells.shape[:-1]):
                    found[(*index, 0)] = self.rows.reduce(name, list(cells[index]), unit)
                unit = 0
            else:
                found = np.take(cells, [0], axis=d)
                for i in range(1, cells.shape[d]):
                    found = self._pairs(pair, found, np.take(cells, [i], axis=d))
            cells = found if keep else found.squeeze(d)
        return Value(cells, unit, summed)

    def _pairs(self, name: str, a: Cells, b: Cells) -> Cells:
        found = np.empty(a.shape, dtype=object)
        for index in np.ndindex(a.shape):
            found[index] = self.rows.op(name, a[index], b[index])
        return found


def _has_parts(name: str) -> bool:
    return name in ("split", "split_with_sizes", "unbind", "getitem")


def shape_of(node: Any) -> Shape:
    """Shape of an operation, or of itself."""
    found: Shape = node.shape if isinstance(node, Operation) else node
    return found


def _needed(trace: Trace) -> set[Operation]:
    """Operations that outputs depend on, and those that change tensors."""
    found = set(trace.outputs.values())
    for operation in reversed(trace.operations):
        if operation in found or operation.mutable:
            found.add(operation)
            found.update(operation.inputs)
    return found
