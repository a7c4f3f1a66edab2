"""Lower a joint graph to expressions over one row.

Views cost nothing. Sums over examples keep the row's term: everything after them must be linear,
and the kernel adds up the results of all rows.
"""

from __future__ import annotations

import functools
import itertools
import math
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

_UNARY = frozenset(
    {
        "neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "sigmoid", "tanh",
        "relu", "reciprocal", "sign", "sgn", "erf", "sin", "cos", "atan", "tan", "sinh", "cosh",
        "exp2", "log2", "floor", "ceil", "trunc", "round",
    }
)  # fmt: skip
_SAME_NAME = (
    "add", "sub", "mul", "div", "maximum", "minimum", "lt", "gt", "le", "ge", "eq", "ne", "pow",
)  # fmt: skip
_BINARY = dict(zip(_SAME_NAME, _SAME_NAME, strict=True)) | {
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


class Lowering:
    """Interpreter of a joint graph; `outputs` has the blocks of each."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.rows = trace, Rows()
        self._units = [trace.hidden, *(w for w in trace.widths if w % trace.hidden)]
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
        if name in _UNARY:
            return self._map(node, "sign" if name == "sgn" else name, args[0])
        if name in _BINARY:
            if node.kwargs.get("alpha", 1) != 1:
                args = (args[0], self._scaled(node, args[1]))
            if node.kwargs.get("rounding_mode"):
                raise Unsupported("a division that rounds")
            return self._map(node, _BINARY[name], args[0], args[1])
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
        elif plain in _UNARY or plain in _BINARY:
            if node.kwargs.get("alpha", 1) != 1:
                args = (args[0], self._scaled(node, args[1]))
            found = self._map(node, _BINARY.get(plain, plain), *args[:2])
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

    # Element-wise

    def _op_clone(self, node: Operation, a: Value, **kwargs: Any) -> Value:
        return a

    _op_detach = _op_alias = _op_lift_fresh = _op_clone

    def _op__to_copy(self, node: Operation, a: Value, **kwargs: Any) -> Value:
        dtype = kwargs.get("dtype") or torch.float32
        if dtype == torch.bool:
            return self._map(node, "ne", a, 0.0)
        if dtype != torch.float32:
            raise Unsupported(f"it computes in {str(dtype).removeprefix('torch.')}")
        return a

    def _op_convert_element_type(self, node: Operation, a: Value, dtype: torch.dtype) -> Value:
        return self._op__to_copy(node, a, dtype=dtype)

    def _op_where(self, node: Operation, c: Any, a: Any, b: Any) -> Value:
        return self._map(node, "where", c, a, b)

    def _op_masked_fill(self, node: Operation, a: Any, mask: Any, value: Any) -> Value:
        return self._map(node, "where", mask, value, a)

    def _op_logical_not(self, node: Operation, a: Value) -> Value:
        return self._map(node, "not", a)

    _op_bitwise_not = _op_logical_not

    def _op_isinf(self, node: Operation, a: Value) -> Value:
        return self._map(node, "eq", self._map(node, "abs", a), math.inf)

    def _op_isnan(self, node: Operation, a: Value) -> Value:
        return self._map(node, "ne", a, a)

    def _op_clamp(self, node: Operation, a: Any, low: Any = None, high: Any = None) -> Value:
        a = a if low is None else self._map(node, "maximum", a, low)
        return a if high is None else self._map(node, "minimum", a, high)

    def _op_clamp_min(self, node: Operation, a: Any, low: Any) -> Value:
        return self._op_clamp(node, a, low)

    def _op_clamp_max(self, node: Operation, a: Any, high: Any) -> Value:
        return self._op_clamp(node, a, None, high)

    def _op_pow(self, node: Operation, a: Any, p: Any) -> Value:
        if isinstance(p, Value) or not isinstance(a, Value):
            return self._map(node, "pow", a, p)
        if p in (0.5, -0.5):
            return self._map(node, "sqrt" if p > 0 else "rsqrt", a)
        if p == int(p) and 1 <= abs(p) <= 4:
            found = a
            for _ in range(int(abs(p)) - 1):
                found = self._map(node, "mul", found, a)
            return found if p > 0 else self._map(node, "div", 1.0, found)
        return self._map(node, "pow", a, float(p)) if p else self._filled(node, 1.0)

    # Functions and their derivatives

    def _formula(self, node: Operation) -> Callable[..., Value]:
        """`_map` for this operation's shape."""
        return functools.partial(self._map, node)

    def _op_rsub(self, node: Operation, a: Any, b: Any, alpha: float = 1) -> Value:
        f = self._formula(node)
        return f("sub", b, f("mul", a, alpha))

    def _op_lerp(self, node: Operation, a: Value, b: Value, weight: Any) -> Value:
        f = self._formula(node)
        return f("add", a, f("mul", weight, f("sub", b, a)))

    def _op_addcmul(self, node: Operation, a: Value, b: Value, c: Value, value: float = 1) -> Value:
        f = self._formula(node)
        return f("add", a, f("mul", f("mul", b, c), value))

    def _op_sigmoid_backward(self, node: Operation, d: Value, y: Value) -> Value:
        f = self._formula(node)
        return f("mul", d, f("mul", y, f("sub", 1.0, y)))

    def _op_tanh_backward(self, node: Operation, d: Value, y: Value) -> Value:
        f = self._formula(node)
        return f("mul", d, f("sub", 1.0, f("mul", y, y)))

    def _op_threshold_backward(self, node: Operation, d: Value, a: Value, bound: float) -> Value:
        f = self._formula(node)
        return f("where", f("le", a, bound), 0.0, d)

    def _op_silu(self, node: Operation, a: Value) -> Value:
        f = self._formula(node)
        return f("mul", a, f("sigmoid", a))

    def _op_silu_backward(self, node: Operation, d: Value, a: Value) -> Value:
        f = self._formula(node)
        s = f("sigmoid", a)
        inner = f("add", 1.0, f("mul", a, f("sub", 1.0, s)))
        return f("mul", f("mul", d, s), inner)

    def _op_softplus(self, node: Operation, a: Value, beta: float = 1, most: float = 20) -> Value:
        f = self._formula(node)
        scaled = f("mul", a, beta)
        return f("where", f("gt", scaled, most), a, f("div", f("log1p", f("exp", scaled)), beta))

    def _op_softplus_backward(
        self, node: Operation, d: Value, a: Value, beta: float, most: float
    ) -> Value:
        f = self._formula(node)
        scaled = f("mul", a, beta)
        return f("where", f("gt", scaled, most), d, f("mul", d, f("sigmoid", scaled)))

    def _op_log_sigmoid_forward(self, node: Operation, a: Value) -> list[Value]:
        f = functools.partial(self._map, node.args[0])
        rest = f("log1p", f("exp", f("neg", f("abs", a))))
        return [f("sub", f("minimum", a, 0.0), rest), Value(self._array(self.rows.const(0.0)))]

    def _op_log_sigmoid_backward(
        self, node: Operation, d: Value, a: Value, buffer: Any = None
    ) -> Value:
        f = self._formula(node)
        return f("mul", d, f("sigmoid", f("neg", a)))

    def _op__softmax(self, node: Operation, a: Value, dim: int, half: bool = False) -> Value:
        f = self._formula(node)
        top = self._reduced("max", node.args[0], a, dim, True)
        found = f("exp", f("sub", a, top))
        return f("div", found, self._reduced("sum", node.args[0], found, dim, True))

    def _op__softmax_backward_data(
        self, node: Operation, d: Value, y: Value, dim: int, dtype: Any = None
    ) -> Value:
        f = self._formula(node)
        part = f("mul", d, y)
        return f("sub", part, f("mul", y, self._reduced("sum", node, part, dim, True)))

    def _op_native_layer_norm(
        self, node: Operation, a: Value, shape: Any, gain: Any, shift: Any, eps: float
    ) -> list[Value]:
        source, axis = node.args[0], self._normalised(node.args[0], shape)
        f, share = functools.partial(self._map, source), 1 / source.shape[axis]
        lead = (*source.shape[:-1], 1)
        mean = self._map(lead, "mul", self._reduced("sum", source, a, axis, True), share)
        rest = f("sub", a, mean)
        squares = self._reduced("sum", source, f("mul", rest, rest), axis, True)
        deviation = self._map(lead, "add", self._map(lead, "mul", squares, share), eps)
        factor = self._map(lead, "rsqrt", deviation)
        found = f("mul", rest, factor)
        found = found if gain is None else f("mul", found, gain)
        return [found if shift is None else f("add", found, shift), mean, factor]

    def _normalised(self, source: Operation, shape: Any) -> int:
        if len(shape) != 1:
            raise Unsupported(f"a layer norm over the shape {tuple(shape)}")
        return len(source.shape) - 1

    def _op_native_layer_norm_backward(
        self,
        node: Operation,
        d: Value,
        a: Value,
        shape: Any,
        mean: Value,
        factor: Value,
        gain: Any,
        shift: Any,
        wanted: Sequence[bool],
    ) -> list[Value | None]:
        source, axis = node.args[1], self._normalised(node.args[1], shape)
        f, share = functools.partial(self._map, source), 1 / source.shape[axis]
        lead, over = (*source.shape[:-1], 1), list(range(axis))
        y = f("mul", f("sub", a, mean), factor)
        g = d if gain is None else f("mul", d, gain)

        def average(b: Value) -> Value:
            return self._map(lead, "mul", self._reduced("sum", source, b, axis, True), share)

        centred = f("sub", f("sub", g, average(g)), f("mul", y, average(f("mul", g, y))))
        found: list[Value | None] = [f("mul", centred, factor)]
        found.append(self._reduced("sum", source, f("mul", d, y), over, False))
        found.append(self._reduced("sum", source, d, over, False))
        return [b if need else None for b, need in zip(found, wanted, strict=True)]

    # Constants

    def _filled(self, node: Operation, value: float) -> Value:
        shape = shape_of(node)
        unit = self._unit(shape)
        cells = np.empty(self._extent(shape, unit), dtype=object)
        cells[...] = self.rows.const(value)
        return Value(cells, unit)

    def _op_zeros(self, node: Operation, *args: Any, **kwargs: Any) -> Value:
        return self._filled(node, 0.0)

    _op_new_zeros = _op_zeros_like = _op_empty_like = _op_zeros

    def _op_ones(self, node: Operation, *args: Any, **kwargs: Any) -> Value:
        return self._filled(node, 1.0)

    _op_ones_like = _op_new_ones = _op_ones

    def _op_full(self, node: Operation, size: Any, value: float, **kwargs: Any) -> Value:
        return self._filled(node, value)

    _op_full_like = _op_new_full = _op_full

    def _op_scalar_tensor(self, node: Operation, value: float, **kwargs: Any) -> Value:
        return self._filled(node, value)

    # Views

    def _op_view(self, node: Operation, a: Value, *args: Any) -> Value:
        shape = shape_of(node)
        if a.constant is not None:
            return Value(self._laid_out(a, shape, self._unit(shape)), self._unit(shape), a.summed)
        if a.unit and (not shape or shape[-1] % a.unit):
            raise Unsupported(f"a part of a gate (a view of the shape {shape})")
        try:
            return Value(a.cells.reshape(self._extent(shape, a.unit)), a.unit, a.summed)
        except ValueError:
            raise Unsupported(f"a view of the shape {shape}") from None

    _op_reshape = _op__unsafe_view = _op_squeeze = _op_unsqueeze = _op_view

    def _op_expand(self, node: Operation, a: Value, *args: Any, **kwargs: Any) -> Value:
        shape = shape_of(node)
        last = a.cells.shape[-1] if a.cells.ndim else 1
        unit = a.unit if a.unit or last > 1 else self._unit(shape)
        return Value(self._laid_out(a, shape, unit), unit, a.summed)

    def _op_broadcast_in_dim(self, node: Operation, a: Value, shape: Any, dims: Any) -> Value:
        lead = [1] * len(shape)
        for axis, to in enumerate(dims):
            lead[to] = a.cells.shape[axis]
        return self._op_expand(node, Value(a.cells.reshape(lead), a.unit, a.summed))

    def _op_permute(self, node: Operation, a: Value, dims: Sequence[int]) -> Value:
        dims = [d % a.cells.ndim for d in dims]
        if a.unit and dims[-1] != a.cells.ndim - 1:
            raise Unsupported("a permutation of units")
        return Value(a.cells.transpose(dims), a.unit, a.summed)

    def _op_transpose(self, node: Operation, a: Value, first: int, second: int) -> Value:
        dims = list(range(a.cells.ndim))
        dims[first], dims[second] = dims[second], dims[first]
        return self._op_permute(node, a, dims)

    def _along(self, source: Any, a: Value, dim: int, *numbers: int) -> tuple[int, list[int]]:
        """Axis and positions in cells, from an axis and positions in elements of ``source``."""
        shape = shape_of(source)
        dim %= len(shape)
        found = [min(n + shape[dim] if n < 0 else n, shape[dim]) for n in numbers]
        if a.unit and dim == len(shape) - 1:
            if any(n % a.unit for n in found):
                raise Unsupported("a part of a gate")
            return dim, [n // a.unit for n in found]
        if shape[dim] == self.trace.examples:
            if any(n not in (0, shape[dim]) for n in found):
                raise Unsupported("a part of the examples")
            return dim, [min(n, 1) for n in found]
        return dim, found

    def _op_slice(
        self,
        node: Operation,
        a: Value,
        dim: int = 0,
        start: int | None = 0,
        end: int | None = None,
        step: int = 1,
    ) -> Value:
        last = 2**62 if end is None else end
        dim, (first, last) = self._along(node.args[0], a, dim, start or 0, last)
        if step != 1 and a.unit and dim == a.cells.ndim - 1:
            raise Unsupported("a part of a gate")
        cells = a.cells[(slice(None),) * dim + (slice(first, last, step),)]
        return Value(cells, a.unit, a.summed)

    def _op_as_strided(
        self, node: Operation, a: Value, size: Any, stride: Any, offset: int | None = 0
    ) -> Value:
        # torch splits a leaf in this form.
        shape, offset = shape_of(node.args[0]), offset or 0
        rows = len(shape) == 2 and tuple(stride) == (shape[1], 1) and size[0] == shape[0]
        if not rows and not (len(shape) == 1 and tuple(stride) == (1,)):
            raise Unsupported("a strided view")
        return self._op_slice(node, a, len(shape) - 1, offset, offset + size[-1])

    def _op_select(self, node: Operation, a: Value, dim: int, i: int) -> Value:
        shape = shape_of(node.args[0])
        dim %= len(shape)
        if shape[dim] == self.trace.examples or (a.unit and dim == len(shape) - 1):
            raise Unsupported("one of the examples or units")
        return Value(np.take(a.cells, [i], axis=dim).squeeze(dim), a.unit, a.summed)

    def _op_split(self, node: Operation, a: Value, size: Any, dim: int = 0) -> list[Value]:
        total = node.args[0].shape[dim]
        sizes = [size] * math.ceil(total / size) if isinstance(size, int) else list(size)
        ends = list(itertools.accumulate(sizes))[:-1]
        axis, cuts = self._along(node.args[0], a, dim, *ends)
        return [Value(part, a.unit, a.summed) for part in np.split(a.cells, cuts, axis=axis)]

    _op_split_with_sizes = _op_split

    def _op_unbind(self, node: Operation, a: Value, dim: int = 0) -> list[Value]:
        count = node.args[0].shape[dim]
        return [self._op_select(node, a, dim, i) for i in range(count)]

    def _op_getitem(self, node: Operation, parts: Any, i: int) -> Any:
        return parts[i]

    def _op_cat(self, node: Operation, parts: Sequence[Value], dim: int = 0) -> Value:
        shape = shape_of(node)
        dim %= len(shape)
        sources = node.args[0]
        units = [p.unit for p in parts if p.constant is None and p.unit]
        numbers = any(p.constant is None and not p.unit for p in parts)
        unit = units[0] if units else 0 if numbers else self._unit(shape)
        cells = [
            self._laid_out(part, shape_of(source), unit)
            for part, source in zip(parts, sources, strict=True)
        ]
        return Value(np.concatenate(cells, axis=dim), unit, self._all_summed(parts))

    def _op_stack(self, node: Operation, parts: Sequence[Value], dim: int = 0) -> Value:
        dim %= len(shape_of(node))
        units = [p.unit for p in parts]
        if len(set(units)) > 1 or (units[0] and dim == len(shape_of(node)) - 1):
            raise Unsupported("a stack of units")
        cells = np.stack([p.cells for p in parts], axis=dim)
        return Value(cells, units[0], self._all_summed(parts))

    def _all_summed(self, parts: Sequence[Value]) -> bool:
        flags = {p.summed for p in parts if p.constant is None or p.constant.data != 0}
        if len(flags) > 1:
            raise Unsupported("a sum over the examples beside other values")
        return flags == {True}

    def _op_constant_pad_nd(
        self, node: Operation, a: Value, pad: Sequence[int], value: float = 0.0
    ) -> Value:
        shape = shape_of(node)
        cells = np.empty(self._extent(shape, a.unit), dtype=object)
        cells[...] = self.rows.const(value)
        where = [slice(None)] * len(shape)
        for i in range(len(pad) // 2):
            before, after = pad[2 * i], pad[2 * i + 1]
            axis = len(shape) - 1 - i
            _, (first, last) = self._along(node, a, axis, before, shape[axis] - after)
            where[axis] = slice(first, last)
        cells[tuple(where)] = a.cells
        return Value(cells, a.unit, a.summed)

    def _op_slice_scatter(
        self,
        node: Operation,
        a: Value,
        part: Value,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> Value:
        unit = part.unit or a.unit
        last = 2**62 if end is None else end
        like = Value(a.cells, unit)
        dim, (first, last) = self._along(node, like, dim, start or 0, last)
        cells = self._laid_out(a, shape_of(node), unit).copy()
        where = (slice(None),) * dim + (slice(first, last, step),)
        cells[where] = self._laid_out(part, shape_of(node.args[1]), unit)
        return Value(cells, unit, self._all_summed([a, part]))

    def _op_select_scatter(self, node: Operation, a: Value, part: Value, dim: int, i: int) -> Value:
        unit = part.unit or a.unit
        cells = self._laid_out(a, shape_of(node), unit).copy()
        if unit and dim % cells.ndim == cells.ndim - 1:
            raise Unsupported("one of the units")
        place: list[Any] = [slice(None)] * cells.ndim
        place[dim] = i
        cells[tuple(place)] = self._laid_out(part, shape_of(node.args[1]), unit)
        return Value(cells, unit, self._all_summed([a, part]))

    def _op_select_backward(self, node: Operation, d: Value, sizes: Any, dim: int, i: int) -> Value:
        return self._placed(node, d, dim, i)

    def _op_slice_backward(
        self, node: Operation, d: Value, sizes: Any, dim: int, start: int, end: int, step: int
    ) -> Value:
        unit = d.unit or self._unit(shape_of(node))
        like = Value(np.empty((), dtype=object), unit)
        dim, (first, last) = self._along(node, like, dim, start, end)
        return self._placed(node, d, dim, slice(first, last, step))

    def _placed(self, node: Operation, d: Value, dim: int, where: Any) -> Value:
        """A tensor of zeros with the cells of d at these positions of an axis."""
        unit = d.unit or self._unit(shape_of(node))
        cells = np.empty(self._extent(shape_of(node), unit), dtype=object)
        cells[...] = self.rows.const(0.0)
        place: list[Any] = [slice(None)] * cells.ndim
        place[dim] = where
        cells[tuple(place)] = self._laid_out(d, shape_of(node.args[0]), unit)
        return Value(cells, unit, d.summed)

    def _op_flip(self, node: Operation, a: Value, dims: Sequence[int]) -> Value:
        cells = a.cells
        for dim in dims:
            dim %= cells.ndim
            if shape_of(node)[dim] == self.trace.examples:
                raise Unsupported("examples in reverse order")
            cells = np.flip(cells, dim)
            if a.unit and dim == cells.ndim - 1:
                cells = self._each(lambda n: self.rows.op("flip", n), cells)
        return Value(cells, a.unit, a.summed)

    @staticmethod
    def _each(function: Callable[[Node], Node], cells: Cells) -> Cells:
        found = np.empty(cells.shape, dtype=object)
        for index in np.ndindex(cells.shape):
            found[index] = function(cells[index])
        return found

    # Reductions

    def _op_cumsum(self, node: Operation, a: Value, dim: int, **kwargs: Any) -> Value:
        shape = shape_of(node)
        dim %= len(shape)
        if shape[dim] == self.trace.examples:
            raise Unsupported("a cumulative sum over the examples")
        cells = np.moveaxis(a.cells, dim, -1)
        found = np.empty(cells.shape, dtype=object)
        units = a.unit if dim == len(shape) - 1 else 0
        for index in np.ndindex(cells.shape[:-1]):
            found[index] = self._cumulated(list(cells[index]), units)
        return Value(np.moveaxis(found, -1, dim), a.unit, a.summed)

    def _cumulated(self, cells: list[Node], unit: int) -> list[Node]:
        """Sums of all elements up to each, of blocks of this width or of numbers."""
        op, found, before = self.rows.op, [], self.rows.const(0.0)
        for cell in cells:
            if not unit:
                before = op("add", before, cell)
                found.append(before)
                continue
            reverse = cell.op == "flip"
            inner = cell.args[0] if reverse else cell
            within = op("cumsum", inner)
            whole = self.rows.reduce("sum", [inner], unit)
            if reverse:
                # Sums from the end: the whole less what comes before.
                within = op("flip", op("add", op("sub", whole, within), inner))
            found.append(self._shifted(within, before))
            before = op("add", before, whole)
        return found

    def _shifted(self, a: Node, by: Node) -> Node:
        if a.op == "flip":
            return self.rows.op("flip", self.rows.op("add", a.args[0], by))
        return self.rows.op("add", a, by)

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

    def _op_linalg_vector_norm(
        self, node: Operation, a: Value, order: float = 2, dims: Any = None, keep: bool = False
    ) -> Value:
        if order != 2:
            raise Unsupported(f"a norm of order {order}")
        squares = self._map(node.args[0], "mul", a, a)
        return self._map(node, "sqrt", self._reduced("sum", node.args[0], squares, dims, keep))

    def _op_sum(
        self, node: Operation, a: Value, dims: Any = None, keep: bool = False, **kwargs: Any
    ) -> Value:
        return self._reduced("sum", node.args[0], a, dims, keep)

    def _op_amax(self, node: Operation, a: Value, dims: Any = None, keep: bool = False) -> Value:
        return self._reduced("max", node.args[0], a, dims, keep)

    def _op_mean(
        self, node: Operation, a: Value, dims: Any = None, keep: bool = False, **kwargs: Any
    ) -> Value:
        shape, axes = shape_of(node.args[0]), self._axes(node.args[0], dims)
        if any(shape[d] == self.trace.examples for d in axes):
            raise Unsupported("a mean over the examples")
        total = self._reduced("sum", node.args[0], a, dims, keep)
        return self._map(node, "mul", total, 1 / math.prod(shape[d] for d in axes))

    def _op_var(
        self, node: Operation, a: Value, dims: Any = None, correction: Any = 1, **kw: Any
    ) -> Value:
        source = node.args[0]
        shape, axes = shape_of(source), self._axes(source, dims)
        if any(shape[d] == self.trace.examples for d in axes):
            raise Unsupported("a variance over the examples")
        count = math.prod(shape[d] for d in axes)
        total = self._reduced("sum", source, a, dims, True)
        mean = Value(
            self._each(lambda n: self.rows.op("mul", n, self.rows.const(1 / count)), total.cells),
            total.unit,
        )
        rest = self._map(source, "sub", a, mean)
        squares = self._reduced("sum", source, self._map(source, "mul", rest, rest), dims, False)
        return self._map(node, "mul", squares, 1 / (count - float(correction)))


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


#: Operations that are lowered as they are.
KNOWN = frozenset(
    {*_UNARY, *_BINARY}
    | {name.removeprefix("_op_") for name in vars(Lowering) if name.startswith("_op_")}
)
