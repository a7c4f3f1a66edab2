"""sLSTM (Beck et al. 2024, xLSTM): exponential gates, a normaliser n and a stabiliser m."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.layers import RecurrentCell, RecurrentLayer
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites


def slstm_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """One head without block structure; the output gate multiplies the normalised state."""
    h, c, n, m = states
    i, f, z, o = (wx + sites["recurrent"](linear(h, w.hh), t) + w.bias).chunk(4, dim=-1)
    log_f = F.logsigmoid(f) + m
    m = torch.maximum(log_f, i)
    i, f = (i - m).exp(), (log_f - m).exp()
    c, n = f * c + i * z.tanh(), f * n + i
    return o.sigmoid() * sites["cell"](c / n, t), c, n, m


SLSTM_CELL = Cell(
    "sLSTM",
    slstm_step,
    places=(
        Place("input", (4,), weight="ih"),
        Place("recurrent", (4,), weight="hh"),
        Place("cell", (1,), own_shift=True),
    ),
    states=("h", "c", "n", "m"),
    candidates=(2,),
    forget=(1,),
)


class SLSTM(RecurrentLayer):
    """Layers of sLSTM."""

    cell = SLSTM_CELL


class SLSTMCell(RecurrentCell):
    """One step of sLSTM."""

    cell = SLSTM_CELL
