"""Layer-normalised cells as people write them by hand: modules of torch.nn in a loop over time.

Nothing is optimised here, on purpose; the equations are those of `ln_zoo.layers`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class LayerNormLSTMCell(nn.Module):
    """One step of the paper's eq. 20-22; states (h, c), each (N, H)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.recurrent = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.norm_input = nn.LayerNorm(4 * hidden_size)
        self.norm_recurrent = nn.LayerNorm(4 * hidden_size)
        self.norm_cell = nn.LayerNorm(hidden_size)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the weights of a torch.nn cell; its biases become those of the norms."""
        with torch.no_grad():
            self.input.weight.copy_(weights["weight_ih"])
            self.recurrent.weight.copy_(weights["weight_hh"])
            self.norm_input.bias.copy_(weights["bias_ih"])
            self.norm_recurrent.bias.copy_(weights["bias_hh"])

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next states."""
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.hidden_size)
            state = zeros, zeros
        h, c = state
        sums = self.norm_input(self.input(x)) + self.norm_recurrent(self.recurrent(h))
        i, f, g, o = sums.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(self.norm_cell(c))
        return h, c


class LayerNormGRUCell(nn.Module):
    """One step of the paper's eq. 26-28; state h, (N, H)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.recurrent = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.norm_input_gates = nn.LayerNorm(2 * hidden_size)
        self.norm_input_candidate = nn.LayerNorm(hidden_size)
        self.norm_recurrent_gates = nn.LayerNorm(2 * hidden_size)
        self.norm_recurrent_candidate = nn.LayerNorm(hidden_size)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the weights of a torch.nn cell; its biases become those of the norms."""
        sizes = (2 * self.hidden_size, self.hidden_size)
        with torch.no_grad():
            self.input.weight.copy_(weights["weight_ih"])
            self.recurrent.weight.copy_(weights["weight_hh"])
            gates, candidate = weights["bias_ih"].split(sizes)
            self.norm_input_gates.bias.copy_(gates)
            self.norm_input_candidate.bias.copy_(candidate)
            gates, candidate = weights["bias_hh"].split(sizes)
            self.norm_recurrent_gates.bias.copy_(gates)
            self.norm_recurrent_candidate.bias.copy_(candidate)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """The next state."""
        h = x.new_zeros(x.shape[0], self.hidden_size) if state is None else state
        sizes = (2 * self.hidden_size, self.hidden_size)
        input_gates, input_candidate = self.input(x).split(sizes, dim=1)
        recurrent_gates, recurrent_candidate = self.recurrent(h).split(sizes, dim=1)
        gates = self.norm_input_gates(input_gates) + self.norm_recurrent_gates(recurrent_gates)
        r, z = torch.sigmoid(gates).chunk(2, dim=1)
        n = torch.tanh(
            self.norm_input_candidate(input_candidate)
            + r * self.norm_recurrent_candidate(recurrent_candidate)
        )
        return (1 - z) * n + z * h


class BlockGRUCell(nn.Module):
    """One step of a GRU with RMS norm and recurrent weights in blocks; state h, (N, H).

    The product is an einsum over blocks, as in ports of DreamerV3.
    """

    def __init__(self, input_size: int, hidden_size: int, blocks: int) -> None:
        super().__init__()
        self.hidden_size, self.blocks, units = hidden_size, blocks, hidden_size // blocks
        self.input = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.weight = nn.Parameter(torch.randn(blocks, units, 3 * units) / units**0.5)
        self.norms = nn.ModuleList(
            nn.RMSNorm(n * hidden_size, eps=1e-5) for n in (2, 1) for _ in ("input", "recurrent")
        )
        self.bias_ih, self.bias_hh = (nn.Parameter(torch.zeros(3 * hidden_size)) for _ in range(2))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the weights of a `ln_zoo.layers.GRUCell` with blocks."""
        with torch.no_grad():
            self.input.weight.copy_(weights["weight_ih"])
            self.weight.copy_(weights["weight_hh"].mT)
            self.bias_ih.copy_(weights["bias_ih"])
            self.bias_hh.copy_(weights["bias_hh"])

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        """The next state."""
        h = x.new_zeros(x.shape[0], self.hidden_size) if state is None else state
        products = torch.einsum("nki,kio->nko", h.view(len(h), self.blocks, -1), self.weight)
        recurrent = torch.cat([part.flatten(1) for part in products.chunk(3, dim=2)], dim=1)
        sizes = (2 * self.hidden_size, self.hidden_size)
        to_gates, to_candidate = self.input(x).split(sizes, dim=1)
        of_gates, of_candidate = recurrent.split(sizes, dim=1)
        norms = list(self.norms)
        x_gates, x_n = norms[0](to_gates), norms[2](to_candidate)
        h_gates, h_n = norms[1](of_gates), norms[3](of_candidate)
        sums = torch.cat([x_gates, x_n], dim=1) + self.bias_ih
        x_r, x_z, x_n = sums.chunk(3, dim=1)
        h_r, h_z, h_n = (torch.cat([h_gates, h_n], dim=1) + self.bias_hh).chunk(3, dim=1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        return (1 - z) * n + z * h


class Loop(nn.Module):
    """Runs a cell over time.

    Args:
        cell: called as ``cell(x_t, state)``; its state is h, or a tuple that begins with h.
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
        """Outputs (T, N, H) and the final state, for x (T, N, I)."""
        state = None
        outputs = []
        for x_t in x.unbind(0):
            state = self.cell(x_t, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state
