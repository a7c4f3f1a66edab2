"""Define your own recurrent cell: a step function, a `Cell`, and two classes of one line each.

Two cells: the minimal gated unit, with separately normalised terms as in the paper's GRU, and the
GRU of Dreamer, which normalises one product ``W [x; h]``. Both support every norm, several layers,
both directions and packed sequences. On CPUs they run on kernels that are generated from the
step, from 16 steps on, and on the generic loop otherwise; the logger ``ln_zoo`` reports which.

    python examples/own_cell.py
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.norms import LayerNorm
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites


def mgu_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """Minimal gated unit (Zhou et al. 2016, arXiv 1603.09420): one gate, which is used twice."""
    (h,) = states
    x_forget, x_candidate = (wx + w.bias).chunk(2, dim=-1)
    to_forget, to_candidate = w.hh.chunk(2)
    f = (x_forget + sites["forget"](linear(w.dropped(h), to_forget), t)).sigmoid()
    n = (x_candidate + sites["candidate"](linear(w.dropped(f * h), to_candidate), t)).tanh()
    return ((1 - f) * h + f * n,)


MGU_CELL = Cell(
    "MGU",
    mgu_step,
    places=(
        Place("input", (1, 1), weight="ih"),
        # The candidate's product needs the gate, so both are normalised separately.
        Place("recurrent", (1, 1), weight="hh", sums=False),
        Place("forget", (1,), products=("hh",)),
        Place("candidate", (1,), products=("hh",)),
    ),
    candidates=(1,),
    drops=True,
)


class MGU(RecurrentLayer):
    """Layers of minimal gated units; arguments as `ln_zoo.layers.RecurrentLayer`."""

    cell = MGU_CELL


class MGUCell(RecurrentCell):
    """One step of a minimal gated unit."""

    cell = MGU_CELL


def joint_gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """The GRU of Dreamer (Hafner et al. 2021, arXiv 2010.02193; their released code).

    One norm over all of ``W [x; h]``; the reset gate acts on the candidate's sum, and the update
    gate starts nearly closed.
    """
    (h,) = states
    sums = sites["sum"](wx + linear(w.dropped(h), w.hh), t) + w.bias
    reset, candidate, update = sums.chunk(3, dim=-1)
    n = (reset.sigmoid() * candidate).tanh()
    u = (update - 1).sigmoid()
    return (u * n + (1 - u) * h,)


JOINT_GRU_CELL = Cell(
    "joint GRU",
    joint_gru_step,
    places=(
        # Norms of weights act here; norms of products act on the sum.
        Place("input", (3,), weight="ih", sums=False),
        Place("recurrent", (3,), weight="hh", sums=False),
        Place("sum", (3,), products=("ih", "hh")),
    ),
    candidates=(1,),
    drops=True,
)


class JointGRU(RecurrentLayer):
    """Layers of Dreamer's GRU."""

    cell = JOINT_GRU_CELL


class JointGRUCell(RecurrentCell):
    """One step of Dreamer's GRU."""

    cell = JOINT_GRU_CELL


def main() -> None:
    """Run both on packed sequences."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    sequences = [torch.randn(length, 3) for length in (7, 4, 2)]
    for layer in (
        MGU(3, 5, num_layers=2, bidirectional=True, norm=LayerNorm()),
        JointGRU(3, 5, norm=LayerNorm(eps=1e-3)),
    ):
        output, h = layer(pack_sequence(sequences))
        output.data.square().mean().backward()
        print(layer.cell.name, tuple(output.data.shape), tuple(h.shape))


if __name__ == "__main__":
    main()
