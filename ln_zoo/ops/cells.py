"""Recurrent cells: each is one step, written as data and one pure function.

Everything else about a recurrent layer (time, layers, directions, packing, dropout) is the same for
all of them and is written once, in `ln_zoo.ops.recurrence`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: The states of one or more examples: (h,), or (h, c) in an LSTM.
States = tuple[Tensor, ...]
#: What happens to the summed inputs at each place of a cell, by role; called as ``site(a, step)``.
Sites = Mapping[str, Callable[[Tensor, int | None], Tensor]]


class Weights(NamedTuple):
    """The effective weights of one direction of one layer, in torch's order.

    Attributes:
        ih: input-to-hidden, (G, I), with G the summed inputs of all gates (4H, 3H or H).
        hh: hidden-to-hidden, (G, H), or (G, P) with an LSTM's projection to P features.
        bias_ih: (G,) or ``None``.
        bias_hh: (G,) or ``None``.
        hr: an LSTM's projection, (P, H), or ``None``.
        peephole: an LSTM's diagonal weights from cell states to the gates i, f and o, (3, H), or
            ``None``.
    """

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    hr: Tensor | None = None
    peephole: Tensor | None = None


Step = Callable[[Tensor, States, Weights, Sites, int | None], States]


@dataclass(frozen=True)
class Place:
    """A place in a cell where a strategy may act.

    Args:
        role: its name: ``"input"``, ``"recurrent"``, ``"cell"`` or ``"sum"``.
        groups: the runs of features that share statistics, in units of the hidden size H.
        weight: the weight whose products are summed here, ``"ih"`` or ``"hh"``.
        sums: whether a strategy acts on summed inputs here, or on the weight alone.
        own_shift: whether no bias of the layer is added here.
    """

    role: str
    groups: tuple[int, ...]
    weight: str | None = None
    sums: bool = True
    own_shift: bool = False


@dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    Args:
        name: torch's name of it, the ``mode`` of `torch.nn.RNNBase`.
        step: the function ``step(wx, states, weights, sites, t)`` that gives the next states;
            ``wx`` (n, G) is the input term, normalised where the cell's ``"input"`` place does so,
            and ``t`` the time step.
        places: where strategies act.
        states: names of the states; the first is the output.
    """

    name: str
    step: Step
    places: tuple[Place, ...]
    states: tuple[str, ...] = ("h",)

    @property
    def gates(self) -> int:
        """Summed inputs per hidden unit."""
        return sum(self.places[0].groups)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the places."""
        return tuple(place.role for place in self.places)


def _recurrent_term(h: Tensor, w: Weights) -> Tensor:
    # States are carried in float32 at least; half-precision weights want their own kind.
    return F.linear(h.to(w.hh.dtype), w.hh)


def lstm_step(
    wx: Tensor,
    states: States,
    w: Weights,
    sites: Sites,
    t: int | None,
    derivative_bound: float | None = None,
) -> States:
    """LSTM (paper, eq. 20-22; DRAW's, eq. 29-31), gates i, f, g, o.

    The cell state is normalised on its way to the output only: c itself is carried as it is, and is
    what peepholes see (Graves 2013, eq. 7-10). Derivatives of the loss by the gates' sums are
    clipped to ``derivative_bound`` (there, section 2.1).
    """
    h, c = states
    sums = wx + sites["recurrent"](_recurrent_term(h, w), t)
    if w.bias_ih is not None and w.bias_hh is not None:
        sums = sums + (w.bias_ih + w.bias_hh)

    def bounded(a: Tensor) -> Tensor:
        return a if derivative_bound is None else clip_derivative(a, derivative_bound)

    i, f, g, o = (sums if w.peephole is not None else bounded(sums)).chunk(4, dim=-1)
    if w.peephole is None:
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    else:
        to_i, to_f, to_o = w.peephole
        i, f, g = bounded(i + to_i * c), bounded(f + to_f * c), bounded(g)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        o = bounded(o + to_o * c)
    h = o.sigmoid() * sites["cell"](c, t).tanh()
    if w.hr is not None:
        h = F.linear(h.to(w.hr.dtype), w.hr)
    return h, c


class _ClipDerivative(torch.autograd.Function):
    # In the form that transforms of torch.func take.
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, bound: float) -> Tensor:
        return a.view_as(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d.clamp(-ctx.bound, ctx.bound), None


def clip_derivative(a: Tensor, bound: float) -> Tensor:
    """a itself; on the way back each number of its gradient is clipped to +-bound.

    Example:
        >>> a = torch.zeros(2, requires_grad=True)
        >>> (clip_derivative(a, 10.0) * torch.tensor([3.0, -50.0])).sum().backward()
        >>> a.grad
        tensor([  3., -10.])
    """
    found: Tensor = _ClipDerivative.apply(a, bound)
    return found


def gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """GRU (paper, eq. 26-28), gates r, z, n; the reset gate acts after the product, as in torch."""
    (h,) = states
    uh = sites["recurrent"](_recurrent_term(h, w), t)
    if w.bias_ih is not None and w.bias_hh is not None:
        wx, uh = wx + w.bias_ih, uh + w.bias_hh
    (xr, xz, xn), (hr, hz, hn) = wx.chunk(3, dim=-1), uh.chunk(3, dim=-1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return ((1 - z) * n + z * h,)


def _rnn_sums(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> Tensor:
    sums = sites["sum"](wx + _recurrent_term(states[0], w), t)
    if w.bias_ih is not None and w.bias_hh is not None:
        sums = sums + (w.bias_ih + w.bias_hh)
    return sums


def rnn_tanh_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Simple RNN (paper, eq. 4) with tanh: the sum of both terms is normalised."""
    return (_rnn_sums(wx, states, w, sites, t).tanh(),)


def rnn_relu_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Simple RNN (paper, eq. 4) with ReLU: the sum of both terms is normalised."""
    return (_rnn_sums(wx, states, w, sites, t).relu(),)


_LSTM_PLACES = (
    Place("input", (4,), weight="ih"),
    Place("recurrent", (4,), weight="hh"),
    Place("cell", (1,), own_shift=True),
)
# Both gates share statistics, the candidate has its own: eq. 26-28 normalise them apart.
_GRU_PLACES = (
    Place("input", (2, 1), weight="ih"),
    Place("recurrent", (2, 1), weight="hh"),
)
_RNN_PLACES = (
    Place("input", (1,), weight="ih", sums=False),
    Place("recurrent", (1,), weight="hh", sums=False),
    Place("sum", (1,)),
)


def bounded_lstm(bound: float) -> Cell:
    """The LSTM that clips the derivatives of the loss by its gates' sums to +-bound."""
    step = functools.partial(lstm_step, derivative_bound=bound)
    return replace(CELLS["LSTM"], name="LSTM with clipped derivatives", step=step)


#: All cells, by name.
CELLS = {
    cell.name: cell
    for cell in (
        Cell("LSTM", lstm_step, _LSTM_PLACES, states=("h", "c")),
        Cell("GRU", gru_step, _GRU_PLACES),
        Cell("RNN_TANH", rnn_tanh_step, _RNN_PLACES),
        Cell("RNN_RELU", rnn_relu_step, _RNN_PLACES),
    )
}
