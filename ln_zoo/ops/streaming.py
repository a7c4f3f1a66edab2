"""One step of a cell for a few cases and no gradient: what online use needs, and nothing else.

At this size a call into torch costs as much as what it computes, so that few calls are made: one
where the native kernels can be had, else products and norms with all that torch fuses into them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from ln_zoo.ops.cells import Cell, States, Weights
from ln_zoo.ops.fast_path import allowed
from ln_zoo.ops.native.runtime import trouble
from ln_zoo.ops.native.step import NativeStep
from ln_zoo.ops.records import Record, Records, RowNorm
from ln_zoo.ops.spec import refusal

#: Cases up to which reading the weights is what costs, and packing them does not pay.
_FEW = 4


class Stream:
    """Steps of one cell; it remembers what it found out about the last one.

    Streaming is a step without gradients in float32 or float64, at sites that are normalised row by
    row or not at all. ``LN_ZOO_KERNELS`` chooses here as well, of ``native`` and ``aten``.

    Args:
        cell: the cell.

    Example:
        >>> from ln_zoo.ops.cells import CELLS
        >>> x, h, rows = torch.randn(1, 3), torch.randn(1, 2), RowNorm((4, 2), scale=True)
        >>> weights = Weights(torch.randn(6, 3), torch.randn(6, 2, requires_grad=True), None, None)
        >>> records = {"input": rows, "recurrent": rows}
        >>> stream = Stream(CELLS["GRU"])
        >>> stream(records, x, (h,), weights) is None
        True
        >>> with torch.no_grad():
        ...     (h,) = stream(records, x, (h,), weights)
        >>> h.shape
        torch.Size([1, 2])
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self._native: NativeStep | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # What is remembered are addresses in this process.
        return Stream, (self.cell,)

    def __call__(
        self, records: Records, x: Tensor, states: States, weights: Weights
    ) -> States | None:
        """The next states, or ``None`` where this is not for streaming.

        Args:
            records: what happens to summed inputs, by role; a record ``None`` says that only the
                strategy knows.
            x: inputs, (N, I).
            states: states, each (N, H).
            weights: the effective weights.
        """
        if torch.is_grad_enabled() and any(
            a is not None and a.requires_grad for a in (x, *states, *weights)
        ):
            return None
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or torch.is_autocast_enabled(x.device.type)
            or torch.jit.is_tracing()
        ):
            return None
        value = os.environ.get("LN_ZOO_KERNELS", "")
        if self._native is not None and self._native.suits(records, x, states, weights, value):
            return self._native(x, states)
        self._native = None
        names = [kernel.name for kernel in allowed(value)[0]]
        dtype = weights.hh.dtype
        if dtype not in (torch.float32, torch.float64) or x.device.type == "meta":
            return None
        if any(a.dtype != dtype for a in (x, *states)):
            return None
        if refusal(self.cell, [records], [weights]) is not None:
            return None
        if "native" in names and x.shape[0] <= _FEW and trouble() is None:
            self._native = NativeStep.of(self.cell, records, x, states, weights, value)
            if self._native is not None:
                return self._native(x, states)
        return _STEPS[self.cell.name](records, x, states, weights) if "aten" in names else None


# The steps of ``ln_zoo.ops.cells`` once more, in as few calls as torch allows


def _norm(a: Tensor, record: Record, bias: Tensor | None) -> Tensor:
    """Normalises rows, with gain, shift and then a bias; all in one call where groups are one."""
    assert isinstance(record, RowNorm)
    if record.identity:
        return a if bias is None else a + bias
    gain = None if record.gain is None else record.gain.to(a.dtype)
    shift = bias
    if record.shift is not None:
        shift = record.shift.to(a.dtype) if bias is None else record.shift + bias
    if len(record.groups) > 1:
        parts = a.split(record.groups, dim=-1)
        rows = torch.cat([_norm(p, _whole(p, record), None) for p in parts], dim=-1)
        if gain is None:
            return rows if shift is None else rows + shift
        return rows * gain if shift is None else torch.addcmul(shift, rows, gain)
    if record.center:
        return F.layer_norm(a, record.groups, gain, shift, record.eps)
    rows = F.rms_norm(a, record.groups, gain, record.eps)
    return rows if shift is None else rows + shift


def _whole(part: Tensor, record: RowNorm) -> RowNorm:
    return RowNorm((part.shape[-1],), True, record.center, record.eps)


def _terms(records: Records, x: Tensor, h: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    """Input and recurrent term, normalised, each with its own bias."""
    v = _norm(F.linear(x, w.ih), records["input"], w.bias_ih)
    return v, _norm(F.linear(h, w.hh), records["recurrent"], w.bias_hh)


def _lstm(records: Records, x: Tensor, states: States, w: Weights) -> States:
    h, c = states
    v, u = _terms(records, x, h, w)
    i, f, g, o = (v + u).chunk(4, dim=-1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid().mul_(_norm(c, records["cell"], None).tanh()), c


def _gru(records: Records, x: Tensor, states: States, w: Weights) -> States:
    (h,) = states
    v, u = _terms(records, x, h, w)
    hidden = h.shape[-1]
    (v, y), (u, w_h) = (a.split((2 * hidden, hidden), dim=-1) for a in (v, u))
    r, z = (v + u).sigmoid_().chunk(2, dim=-1)
    candidate = torch.addcmul(y, r, w_h).tanh_()
    return (torch.lerp(candidate, h, z),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., States]:
    def step(records: Records, x: Tensor, states: States, w: Weights) -> States:
        sums = F.linear(states[0], w.hh).add_(F.linear(x, w.ih))
        bias = None if w.bias_ih is None or w.bias_hh is None else w.bias_ih + w.bias_hh
        return (activation(_norm(sums, records["sum"], bias)),)

    return step


_STEPS: dict[str, Callable[..., States]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": _rnn(torch.tanh),
    "RNN_RELU": _rnn(torch.relu),
}
