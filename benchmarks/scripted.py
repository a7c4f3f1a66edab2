"""A layer-normalised LSTM for TorchScript, as torch's own example of custom cells has it.

A loop over time in one function that `torch.jit.script` compiles; the equations are those of
`ln_zoo.layers`. No postponed annotations here: the compiler reads the types themselves.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class ScriptedLSTM(nn.Module):
    """All steps of the paper's eq. 20-22, from states of 0."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.norm_input = nn.LayerNorm(4 * hidden_size)
        self.norm_recurrent = nn.LayerNorm(4 * hidden_size)
        self.norm_cell = nn.LayerNorm(hidden_size)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the weights of a torch.nn cell; its biases become those of the norms."""
        with torch.no_grad():
            self.weight_ih.copy_(weights["weight_ih"])
            self.weight_hh.copy_(weights["weight_hh"])
            self.norm_input.bias.copy_(weights["bias_ih"])
            self.norm_recurrent.bias.copy_(weights["bias_hh"])

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs (T, N, H) and the final states, for x (T, N, I)."""
        h = torch.zeros(x.size(1), self.hidden_size, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        outputs: list[Tensor] = []
        for x_t in x.unbind(0):
            sums = self.norm_input(torch.mm(x_t, self.weight_ih.t()))
            sums = sums + self.norm_recurrent(torch.mm(h, self.weight_hh.t()))
            i, f, g, o = sums.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(self.norm_cell(c))
            outputs.append(h)
        return torch.stack(outputs), (h, c)
