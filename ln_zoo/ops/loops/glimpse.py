"""Where an attentive drawer looks and writes: grids of Gaussian filters (Gregor et al. 2015, 3.2).

Pixels count from 0 here, from 1 in the source: a centre of the source is one more than here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FilterNorm = Literal["softmax", "eps"]


def attention(parameters: Tensor, grid: int, height: int, width: int, log_clamp: float) -> Tensor:
    """Where a grid of filters lies (Gregor et al. 2015, eq. 21-24).

    Args:
        parameters: what a linear map said, (\\*, 5): g~_X, g~_Y, log sigma^2, log delta~ and log
            gamma.
        grid: filters N on a side.
        height: of the image in pixels, B.
        width: A.
        log_clamp: log sigma^2 and log delta~ are clamped to plus and minus it.

    Returns:
        (\\*, 5): x and y of the centre, the stride and sigma, in pixels; and the intensity gamma.
        Of a single filter the stride means nothing.

    Example:
        >>> attention(torch.zeros(5), 5, 28, 28, 10.0)
        tensor([13.5000, 13.5000,  6.7500,  1.0000,  1.0000])
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
    """The filters of a grid, rows over the image's lines and columns (eq. 19, 20, 25, 26).

    Args:
        places: what `attention` gave, (\\*, 5).
        grid: filters N on a side.
        height: B.
        width: A.
        norm: how a filter's weights come to sum to 1: ``"softmax"``, exactly, also where the filter
            lies far outside the image and all of it falls to the nearest edge; ``"eps"``, as in
            released code: divided by their sum plus ``eps``, which leaves nothing of such a filter.
        eps: see there.

    Returns:
        F_Y, (\\*, N, B), and F_X, (\\*, N, A).

    Example:
        >>> f_y, f_x = filterbank(attention(torch.zeros(5), 2, 6, 6, 10.0), 2, 6, 6)
        >>> f_y.shape, torch.allclose(f_x.sum(-1), torch.ones(2))
        (torch.Size([2, 6]), True)
    """
    x, y, stride, sigma, _ = places.unbind(-1)
    steps = torch.arange(grid, dtype=places.dtype, device=places.device) - (grid - 1) / 2

    def along(centre: Tensor, pixels: int) -> Tensor:
        mu = centre.unsqueeze(-1) + steps * stride.unsqueeze(-1)
        a = torch.arange(pixels, dtype=places.dtype, device=places.device)
        # From the nearest pixel: there an exponent of 0 is the largest, however far off mu is.
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
