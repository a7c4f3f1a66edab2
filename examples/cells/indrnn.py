"""IndRNN (Li et al. 2018, arXiv 1803.04831): each unit sees its own past alone."""

from __future__ import annotations

from torch import Tensor

from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.ops import Cell, Place, States, Weights
from ln_zoo.ops.cells import Sites


def indrnn_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """The recurrent weight is a vector, the first of the cell's own; ``weight_hh`` is unused."""
    (h,) = states
    return ((wx + w.own[0] * h + w.bias).relu(),)


INDRNN_CELL = Cell(
    "IndRNN",
    indrnn_step,
    places=(
        Place("input", (1,), weight="ih"),
        Place("recurrent", (1,), weight="hh", sums=False),
    ),
    weights=(("recurrent", 1),),
    candidates=(0,),
)


class IndRNN(RecurrentLayer):
    """Layers of IndRNN."""

    cell = INDRNN_CELL


class IndRNNCell(RecurrentCell):
    """One step of IndRNN."""

    cell = INDRNN_CELL
