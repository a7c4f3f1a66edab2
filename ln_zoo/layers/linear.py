"""Fully connected layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ln_zoo.norms import Identity, Norm, Site
from ln_zoo.norms.arguments import check_no_norm
from ln_zoo.ops import check_devices


class Linear(nn.Linear):
    r"""``norm(W x) + b``: `torch.nn.Linear` with a norm (paper, eq. 3-4).

    The bias is added after normalisation: it is the paper's b. Further arguments as in
    `torch.nn.Linear`.

    Args:
        norm: the normalisation; default `Identity`, with which this is torch's layer.

    Shapes: input (N, \*, I), output (N, \*, F).

    Parameters: ``weight`` (F, I) and ``bias`` (F,), initialised as torch does; ``site.gain`` (F,)
    with a norm that has a gain; ``site.scale`` (F,) with weight normalisation.

    Raises:
        ValueError: under batch normalisation in training, for a batch of one.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = Linear(784, 1000, norm=LayerNorm())
        >>> layer(torch.randn(2, 784)).shape
        torch.Size([2, 1000])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
    ) -> None:
        check_no_norm(self, bias=bias)
        super().__init__(in_features, out_features, bias, device, dtype)
        norm = Identity() if norm is None else norm
        self.site = Site(norm, "sum", out_features, weight=self.weight, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.site.weight(self.weight)
        check_devices(input, weight=weight, bias=self.bias)
        if not self.site.normalizes:
            return F.linear(input, weight, self.bias)
        sums = F.linear(input, weight)
        output = self.site(sums)
        if self.bias is not None:
            output = output + self.bias
        return output.to(sums.dtype)

    def reset_parameters(self) -> None:
        """Re-initialise weight and bias, as torch does, and the norm."""
        super().reset_parameters()
        if "site" in self._modules:  # torch's constructor calls this first
            self.site.reset_parameters()
            self.reset_norm()

    def reset_norm(self) -> None:
        """Recompute norm parameters that depend on the weight; call it after changing weights."""
        self.site.reset_weight(self.weight)
