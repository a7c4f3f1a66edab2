"""The light GRU of SpeechBrain, on the generic loop."""

from __future__ import annotations

from torch import Tensor

from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites


def light_gru_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """A GRU without a reset gate (Ravanelli et al. 2018, arXiv 1803.10225), gates a, z."""
    (h,) = states
    a, z = (wx + sites["recurrent"](linear(w.dropped(h), w.hh), t) + w.bias).chunk(2, dim=-1)
    z = z.sigmoid()
    return (z * h + (1 - z) * a.relu(),)


LIGHT_GRU = Cell(
    "light GRU",
    light_gru_step,
    (Place("input", (2,), weight="ih"), Place("recurrent", (2,), weight="hh")),
    candidates=(0,),
    drops=True,
)
