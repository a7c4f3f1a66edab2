"""Lower operations of a joint graph: element-wise ones, constants, views and reductions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ln_zoo.kernels.generated.formulas import Formulas
from ln_zoo.kernels.generated.interpreter import BINARY, UNARY, Cells, Value, shape_of
from ln_zoo.kernels.generated.recorder import Operation
from ln_zoo.kernels.generated.rows import Node
from ln_zoo.kernels.generated.trace import Unsupported


class Lowering(Formulas):
    """Expressions of a joint graph."""

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

    # Constants

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


#: Operations that are lowered as they are.
KNOWN = frozenset(
    {*UNARY, *BINARY}
    | {name.removeprefix("_op_") for name in dir(Lowering) if name.startswith("_op_")}
)
