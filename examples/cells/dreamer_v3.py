"""The sequence model of DreamerV3 (Hafner et al. 2023, arXiv 2301.04104): a GRU in blocks.

The equations are those of ``RSSM._core`` in the authors' code (github.com/danijar/dreamerv3), with
one hidden layer in blocks. Only what depends on the state is in the step; input layers run for all
time steps at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import Norm, RMSNorm
from ln_zoo.ops import Cell, Place, States, Weights, linear
from ln_zoo.ops.cells import Sites

EPS = 1e-4
NORM = RMSNorm(eps=EPS)


def dreamer_v3_step(wx: Tensor, states: States, w: Weights, sites: Sites, t: int | None) -> States:
    """The state goes through a layer of its own, then through two layers in blocks.

    Biases are added before norms, which have none.
    """
    (h,) = states
    of_state, of_layer, state_bias = w.own
    width = h.shape[-1]
    of_hidden, of_gates = w.hh[:width], w.hh[width:]
    if w.bias_ih is not None and w.bias_hh is not None:
        wx = wx + w.bias_ih + w.bias_hh[:width]
    x = F.silu(sites["state"](linear(h, of_state) + state_bias[0], t))
    hidden = F.silu(sites["hidden"](wx + linear(h, of_hidden) + linear(x, of_layer), t))
    gates = linear(hidden, of_gates)
    if w.bias_hh is not None:
        gates = gates + w.bias_hh[width:]
    reset, candidate, update = gates.chunk(3, dim=-1)
    candidate = (reset.sigmoid() * candidate).tanh()
    update = (update - 1).sigmoid()
    return (update * candidate + (1 - update) * h,)


def dreamer_v3_cell(hidden_size: int) -> Cell:
    """The cell of a layer; two weights of its own are (H, H)."""
    return Cell(
        "DreamerV3's GRU",
        dreamer_v3_step,
        places=(
            Place("input", (1,), weight="ih", sums=False),
            Place("recurrent", (1, 3), weight="hh", sums=False),
            Place("state", (1,)),
            Place("hidden", (1,), products=("ih", "hh")),
        ),
        weights=(("state", hidden_size), ("layer", hidden_size), ("state_bias", 1)),
    )


class DreamerV3GRU(RecurrentLayer):
    """Layers of DreamerV3's GRU; the layer of the state has as many units as the state."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *arguments: Any,
        blocks: int = 8,
        norm: Norm | None = NORM,
        **options: Any,
    ) -> None:
        options |= {"blocks": blocks, "norm": norm, "cell": dreamer_v3_cell(hidden_size)}
        super().__init__(input_size, hidden_size, *arguments, **options)


class SequenceModel(nn.Module):
    """h' = f(h, z, a) over time: stochastic states z (T, N, Z) and actions a (T, N, A).

    Args:
        stochastic: size Z of the stochastic state, flat.
        actions: size A of the actions.
        deterministic: size H of the deterministic state.
        hidden: units of the layers of z and a.
        blocks: number of blocks; must divide H.
    """

    def __init__(
        self, stochastic: int, actions: int, deterministic: int, hidden: int, blocks: int = 8
    ) -> None:
        super().__init__()
        self.of_z, self.of_a = (
            nn.Sequential(nn.Linear(size, hidden), nn.RMSNorm(hidden, eps=EPS), nn.SiLU())
            for size in (stochastic, actions)
        )
        self.recurrence = DreamerV3GRU(2 * hidden, deterministic, blocks=blocks)

    def forward(
        self, z: Tensor, a: Tensor, h: Tensor | None = None, reset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Deterministic states (T, N, H) and the last one (1, N, H).

        ``reset`` (T, N) marks first steps of episodes, before which h is zero.
        """
        a = a / a.detach().abs().clamp(min=1)
        x = torch.cat([self.of_z(z), self.of_a(a)], dim=-1)
        found: tuple[Tensor, Tensor] = self.recurrence(x, h, reset=reset)
        return found


if __name__ == "__main__":
    torch.manual_seed(0)
    model = SequenceModel(32, 6, 64, 16)
    states, last = model(torch.randn(20, 4, 32), torch.randn(20, 4, 6))
    states.square().mean().backward()
    print(tuple(states.shape), tuple(last.shape))
