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
from ln_zoo.ops.checks import check_parameters
from ln_zoo.ops.fast_path import allowed
from ln_zoo.ops.native.runtime import trouble
from ln_zoo.ops.native.step import NativeStep, step_key
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
        #: What the step in functions of torch was found to be right for.
        self._key: tuple[object, ...] | None = None

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
        native = self._native  # another thread may change it
        if native is not None and native.suits(records, x, weights, value):
            return native(x, states)
        key = (*step_key(records, x, weights, value), *(s.dtype for s in states))
        if key == self._key:
            return _STEPS[self.cell.name](records, x, states, weights)
        self._native = self._key = None
        hidden = states[-1].shape[-1]
        sizes = x.shape[-1], hidden, states[0].shape[-1]
        check_parameters(self.cell, records, weights, x, sizes)
        names = [kernel.name for kernel in allowed(value)[0]]
        dtype = weights.hh.dtype
        if dtype not in (torch.float32, torch.float64) or x.device.type == "meta":
            return None
        if any(a.dtype != dtype for a in (x, *states)):
            return None
        if refusal(self.cell, [records], [weights]) is not None:
            return None
        if "native" in names and x.shape[0] <= _FEW and trouble() is None:
            self._native = native = NativeStep.of(self.cell, records, x, states, weights, value)
            if native is not None:
                return native(x, states)
        if "aten" not in names:
            return None
        self._key = key
        return _STEPS[self.cell.name](records, x, states, weights)


# The steps of ``ln_zoo.ops.cells`` once more, in as few calls as torch allows


def _norms(a: Tensor, record: Record, bias: Tensor | None) -> list[Tensor]:
    """Rows normalised, with gain, shift and then a bias: the groups of features apart."""
    assert isinstance(record, RowNorm)
    if record.identity:
        return [a if bias is None else a + bias]
    gain = None if record.gain is None else record.gain.to(a.dtype)
    shift = bias
    if record.shift is not None:
        shift = record.shift.to(a.dtype) if bias is None else record.shift + bias
    if len(record.groups) == 1:
        return [_rows(a, record, gain, shift)]
    gains, shifts = (
        [None] * len(record.groups) if vector is None else vector.split(record.groups)
        for vector in (gain, shift)
    )
    parts = a.split(record.groups, dim=-1)
    return [_rows(*part) for part in zip(parts, [record] * len(parts), gains, shifts, strict=True)]


def _rows(a: Tensor, record: RowNorm, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """Rows of one group."""
    if record.center:
        return torch.layer_norm(a, a.shape[-1:], gain, shift, record.eps)
    rows = F.rms_norm(a, a.shape[-1:], gain, record.eps)
    return rows if shift is None else rows + shift


def _norm(a: Tensor, record: Record, bias: Tensor | None = None) -> Tensor:
    found = _norms(a, record, bias)
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def _lstm(records: Records, x: Tensor, states: States, w: Weights) -> States:
    h, c = states
    sums = _norm(F.linear(x, w.ih), records["input"], w.bias_ih)
    sums = sums + _norm(F.linear(h, w.hh), records["recurrent"], w.bias_hh)
    i, f, g, o = sums.chunk(4, dim=-1)
    c = torch.addcmul(f.sigmoid().mul_(c), i.sigmoid(), g.tanh())
    return _norm(c, records["cell"]).tanh().mul_(o.sigmoid()), c


def _gru(records: Records, x: Tensor, states: States, w: Weights) -> States:
    (h,) = states
    hidden = h.shape[-1]

    def terms(a: Tensor, record: Record, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of both gates and of the candidate."""
        assert isinstance(record, RowNorm)
        found = _norms(a, record, bias)
        if not record.identity and record.groups == (2 * hidden, hidden):
            return found[0], found[1]
        both, n = torch.cat(found, dim=-1).split((2 * hidden, hidden), dim=-1)
        return both, n

    v, y = terms(F.linear(x, w.ih), records["input"], w.bias_ih)
    u, candidate = terms(F.linear(h, w.hh), records["recurrent"], w.bias_hh)
    r, z = (v + u).sigmoid_().chunk(2, dim=-1)
    return (torch.lerp(torch.addcmul(y, r, candidate).tanh_(), h, z),)


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
