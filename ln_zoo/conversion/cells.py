"""Cells of other libraries that no layer of ours computes; they run on the generic loop."""

from __future__ import annotations

from torch import Tensor

from ln_zoo.ops import CELLS, Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites, gru_step


def carried_lstm_step(
    wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None
) -> States:
    """The LSTM whose normalised cell state is carried on, not only shown to the output."""
    h, c = states
    i, f, g, o = (wx + sites["recurrent"](linear(h, w.hh), t) + w.bias).chunk(4, dim=-1)
    c = sites["cell"](f.sigmoid() * c + i.sigmoid() * g.tanh(), t)
    return o.sigmoid() * c.tanh(), c


def sum_lstm_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """The LSTM that normalises each gate's whole sum, ``W x + U h``, apart from the others."""
    h, c = states
    i, f, g, o = (sites["sum"](wx + linear(h, w.hh), t) + w.bias).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h if w.hr is None else linear(h, w.hr), c


def joint_gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Dreamer's GRU: one norm of ``W [x; h]`` with a bias inside, and the update gate low."""
    (h,) = states
    sums = sites["sum"](wx + linear(h, w.hh) + w.own[0].flatten(), t) + w.bias
    reset, candidate, update = sums.chunk(3, dim=-1)
    n = (reset.sigmoid() * candidate).tanh()
    u = (update - 1).sigmoid()
    return (u * n + (1 - u) * h,)


def prenorm_gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """The GRU whose input term has a further bias, inside the norm."""
    return gru_step(sites["term"](wx + w.own[0].flatten(), t), states, w, sites, t)


_LSTM, _GRU = CELLS["LSTM"], CELLS["GRU"]

CARRIED_LSTM = Cell(
    "LSTM with a normalised carry",
    carried_lstm_step,
    _LSTM.places,
    states=_LSTM.states,
    candidates=_LSTM.candidates,
    forget=_LSTM.forget,
)
SUM_LSTM = Cell(
    "LSTM with normalised sums of gates",
    sum_lstm_step,
    (
        Place("input", (4,), weight="ih", sums=False),
        Place("recurrent", (4,), weight="hh", sums=False),
        Place("sum", (1, 1, 1, 1), products=("ih", "hh")),
    ),
    states=_LSTM.states,
    candidates=_LSTM.candidates,
    forget=_LSTM.forget,
    projects=True,
)
JOINT_GRU = Cell(
    "joint GRU",
    joint_gru_step,
    (
        Place("input", (3,), weight="ih", sums=False),
        Place("recurrent", (3,), weight="hh", sums=False),
        Place("sum", (3,), products=("ih", "hh")),
    ),
    weights=(("prenorm_bias", 3),),
    candidates=(1,),
)
WHOLE_GRU = Cell(
    "GRU with one norm of gates and candidate",
    gru_step,
    (Place("input", (3,), weight="ih"), Place("recurrent", (3,), weight="hh")),
    candidates=_GRU.candidates,
)
PRENORM_GRU = Cell(
    "GRU with a bias inside the norm",
    prenorm_gru_step,
    (
        Place("input", (3,), weight="ih", sums=False),
        Place("recurrent", (2, 1), weight="hh"),
        Place("term", (2, 1), products=("ih",)),
    ),
    weights=(("prenorm_bias", 3),),
    candidates=_GRU.candidates,
)
