"""A block of xLSTM (Beck et al. 2024, arXiv 2405.04517): causal convolution, sLSTM, group norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo.layers import SLSTM


class SLSTMBlock(nn.Module):
    """Sequences (N, T, F) to (N, T, F), without the block's feed-forward network.

    Gates i and f see the convolution, z and o the block's input; the heads are separate.

    Args:
        features: size F.
        heads: number of heads, a divisor of F.
        kernel: steps of the convolution.
    """

    def __init__(self, features: int, heads: int, kernel: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features, bias=False)
        padding = kernel - 1  # on both sides; the steps at the end are cut
        self.convolution = nn.Conv1d(features, features, kernel, padding=padding, groups=features)
        self.gates = nn.ModuleList(
            nn.Conv1d(features, features, 1, groups=heads, bias=False) for _ in "ifzo"
        )
        self.slstm = SLSTM(0, features, batch_first=True, blocks=heads)
        self.group_norm = nn.GroupNorm(heads, features)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(x).transpose(1, 2)
        seen = F.silu(self.convolution(a)[..., : x.shape[1]])
        inputs = (seen, seen, a, a)
        terms = [gate(of) for gate, of in zip(self.gates, inputs, strict=True)]
        output, _ = self.slstm(torch.cat(terms, 1).transpose(1, 2))
        return x + self.group_norm(output.flatten(0, 1)).view_as(x)
