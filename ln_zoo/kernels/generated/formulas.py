"""Functions and their derivatives, as expressions over one row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ln_zoo.kernels.generated.interpreter import Interpreter, Value
from ln_zoo.kernels.generated.recorder import Operation
from ln_zoo.kernels.generated.trace import Unsupported


class Formulas(Interpreter):
    """Operations that are a formula of others."""

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
