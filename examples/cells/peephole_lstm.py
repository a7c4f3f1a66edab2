"""LSTM with peepholes (Gers and Schmidhuber 2000), whose sums are layer-normalised."""

from __future__ import annotations

from torch import Tensor

from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites


def peephole_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Gates i and f see the previous cell state, o the new one."""
    h, c = states
    i, f, g, o = (wx + sites["recurrent"](linear(h, w.hh), t) + w.bias).chunk(4, dim=-1)
    to_i, to_f, to_o = w.own[0]
    c = (f + to_f * c).sigmoid() * c + (i + to_i * c).sigmoid() * g.tanh()
    return (o + to_o * c).sigmoid() * sites["cell"](c, t).tanh(), c


PEEPHOLE_CELL = Cell(
    "peephole LSTM",
    peephole_step,
    places=(
        Place("input", (4,), weight="ih"),
        Place("recurrent", (4,), weight="hh"),
        Place("cell", (1,), own_shift=True),
    ),
    states=("h", "c"),
    weights=(("peephole", 3),),
    candidates=(2,),
    forget=(1,),
)


class PeepholeLSTM(RecurrentLayer):
    """Layers of LSTMs with peepholes."""

    cell = PEEPHOLE_CELL


class PeepholeLSTMCell(RecurrentCell):
    """One step of an LSTM with peepholes."""

    cell = PEEPHOLE_CELL
