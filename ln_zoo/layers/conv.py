"""Two-dimensional convolution."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ln_zoo.norms import Identity, Norm, Site
from ln_zoo.norms.arguments import check_no_norm
from ln_zoo.ops import check_devices


class Conv2d(nn.Conv2d):
    """``norm(W * x) + b``: `torch.nn.Conv2d` with a norm (paper, section 6.7).

    Layer normalisation uses statistics over channels and positions of one example (see its
    ``convolution``), batch normalisation over examples and positions of one channel; both have one
    gain per channel. The bias is added after normalisation: it is the paper's b.

    Arguments up to ``dtype`` as in `torch.nn.Conv2d`; statistics ignore ``groups``.

    Args:
        norm: the normalisation; default `Identity`, with which this is torch's layer.
        positions: size (H', W') of the output, required by norms with a gain for each position
            (``LayerNorm(convolution="unit")``), checked if given.

    Shapes: input (N, C, H, W) or (C, H, W), output (N, F, H', W') or (F, H', W').

    Parameters: ``weight`` (F, C / groups, k, k) and ``bias`` (F,), initialised as in torch; with a
    norm, ``site.gain`` (F,), ``site.gain`` and ``site.shift`` (F, H', W'), or ``site.scale`` (F,).

    Raises:
        ValueError: under batch normalisation in training, for one value per channel; for a norm
            that requires positions, if they are missing or not the output's.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: Norm | None = None,
        positions: tuple[int, int] | None = None,
    ) -> None:
        check_no_norm(self, stride=stride, bias=bias)
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation
        super().__init__(*sizes, groups, bias, padding_mode, device, dtype)
        norm = Identity() if norm is None else norm
        factory: dict[str, Any] = {"weight": self.weight, "device": device, "dtype": dtype}
        self.site = Site(norm, "sum", out_channels, axis=1, positions=positions, **factory)

    def forward(self, input: Tensor) -> Tensor:
        weight = self.site.weight(self.weight)
        check_devices(input, weight=weight, bias=self.bias)
        if not self.site.normalizes:
            return self._conv_forward(input, weight, self.bias)
        sums = self._conv_forward(input, weight, None)
        batched = sums.dim() == 4
        output = self.site(sums if batched else sums.unsqueeze(0))
        if self.bias is not None:
            # `view` refuses a bias of another size, which would broadcast.
            output = output + self.bias.view(self.out_channels, 1, 1)
        return (output if batched else output.squeeze(0)).to(sums.dtype)

    def reset_parameters(self) -> None:
        """Re-initialise weight and bias, as torch does, and the norm."""
        super().reset_parameters()
        if "site" in self._modules:  # torch's constructor calls this first
            self.site.reset_parameters()
            self.reset_norm()

    def reset_norm(self) -> None:
        """Recompute norm parameters that depend on the weight; call it after changing weights."""
        self.site.reset_weight(self.weight)
