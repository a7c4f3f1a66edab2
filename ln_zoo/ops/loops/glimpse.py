"""Attention of DRAW: grids of Gaussian filters (Gregor et al. 2015, section 3.2).

Pixels count from 0 here, from 1 in the paper, so centres are smaller by 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FilterNorm = Literal["softmax", "eps"]


def attention(parameters: Tensor, grid: int, height: int, width: int, log_clamp: float) -> Tensor:
    r"""Position of a grid of N filters per axis (Gregor et al. 2015, eq. 21-24).

    ``parameters``, (\*, 5), are g~_X, g~_Y, log sigma^2, log delta~ and log gamma; log sigma^2 and
    log delta~ are clamped to +-``log_clamp``. Images have B x A pixels (``height``, ``width``).

    Returns:
        (\*, 5): x and y of the centre, stride (unused if N = 1) and sigma, in pixels, and the
        intensity gamma.
    """
    x, y, log_variance, log_stride, log_intensity = parameters.unbind(-1)
    whole = (max(height, width) - 1) / max(grid - 1, 1)
    return torch.stack(
        [
            (width + 1) / 2 * (x + 1) - 1,
            (height + 1) / 2 * (y + 1) - 1,
            whole * log_stride.clamp(-log_clamp, log_clamp).exp(),
            (0.5 * log_variance.clamp(-log_clamp, log_clamp)).exp(),
            log_intensity.exp(),
        ],
        -1,
    )


def filterbank(
    places: Tensor,
    grid: int,
    height: int,
    width: int,
    norm: FilterNorm = "softmax",
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    r"""Filters F_Y, (\*, N, B), and F_X, (\*, N, A), of a grid (eq. 19, 20, 25, 26).

    ``places`` are from `attention`, with the same arguments. ``norm="softmax"`` (the paper's):
    weights of a filter sum to 1; far outside the image, all weight is on the nearest edge.
    ``"eps"``, as in released code: weights are divided by their sum plus ``eps``, so a filter
    outside the image vanishes.
    """
    x, y, stride, sigma, _ = places.unbind(-1)
    steps = torch.arange(grid, dtype=places.dtype, device=places.device) - (grid - 1) / 2

    def along(centre: Tensor, pixels: int) -> Tensor:
        mu = centre.unsqueeze(-1) + steps * stride.unsqueeze(-1)
        a = torch.arange(pixels, dtype=places.dtype, device=places.device)
        # Relative to the nearest pixel, whose exponent 0 is the largest even if mu is far away.
        nearest = mu.detach().round().clamp(0, pixels - 1)
        shift, distance = (mu - nearest).unsqueeze(-1), a - nearest.unsqueeze(-1)
        gap = distance - shift
        square = distance * (gap - shift) if norm == "softmax" else gap.square()
        exponent = -0.5 * square / sigma[..., None, None].square()
        if norm == "softmax":
            return exponent.softmax(-1)
        weights = exponent.exp()
        return weights / (weights.sum(-1, keepdim=True) + eps)

    return along(y, height), along(x, width)
