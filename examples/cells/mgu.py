"""Minimal gated unit (Zhou et al. 2016, arXiv 1603.09420): one gate, which is used twice."""

from __future__ import annotations

from torch import Tensor

from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites


def mgu_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """The candidate's product needs the gate, so both are normalised separately."""
    (h,) = states
    x_forget, x_candidate = (wx + w.bias).chunk(2, dim=-1)
    to_forget, to_candidate = w.hh.chunk(2)
    f = (x_forget + sites["forget"](linear(h, to_forget), t)).sigmoid()
    n = (x_candidate + sites["candidate"](linear(f * h, to_candidate), t)).tanh()
    return ((1 - f) * h + f * n,)


MGU_CELL = Cell(
    "minimal gated unit",
    mgu_step,
    places=(
        Place("input", (1, 1), weight="ih"),
        Place("recurrent", (1, 1), weight="hh", sums=False),
        Place("forget", (1,), products=("hh",)),
        Place("candidate", (1,), products=("hh",)),
    ),
    candidates=(1,),
)


class MinimalGatedUnit(RecurrentLayer):
    """Layers of minimal gated units."""

    cell = MGU_CELL


class MinimalGatedUnitCell(RecurrentCell):
    """One step of a minimal gated unit."""

    cell = MGU_CELL
