"""The penalty of order embeddings for all pairs, without a tensor of all differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Differences in memory at a time, by device type; on CPUs they fit the cache.
_DIFFERENCES = {"cpu": 2**18, "cuda": 2**26}


def order_violation(above: Tensor, below: Tensor) -> Tensor:
    """Order violation of points above (M, D) and below (N, D), (M, N) (Vendrov et al. 2016, eq. 2).

    The sum over k of max(0, above_k - below_k)^2: 0 if no coordinate of the upper, more abstract
    point is larger. Forward and backward pass hold only some rows of the (M, N, D) differences,
    which are computed twice.

    Raises:
        ValueError: unless these are two matrices of points of one size.

    Example:
        >>> order_violation(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.5], [1.0, 2.0]]))
        tensor([[2.2500, 0.0000]])
    """
    if above.dim() != 2 or below.dim() != 2 or above.shape[1] != below.shape[1]:
        raise ValueError(
            f"above and below must be (M, D) and (N, D), got {tuple(above.shape)} and "
            f"{tuple(below.shape)}"
        )
    violation: Tensor = _OrderViolation.apply(above, below)
    return violation


class _OrderViolation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, above: Tensor, below: Tensor) -> Tensor:
        ctx.save_for_backward(above, below)
        violation = above.new_empty(len(above), len(below))
        for rows, violated in _violated(above, below):
            torch.sum(violated.square_(), -1, out=violation[rows])
        return violation

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        above, below = ctx.saved_tensors
        gradient = 2 * gradients[0]
        of_above, of_below = torch.empty_like(above), torch.zeros_like(below)
        for rows, violated in _violated(above, below):
            violated.mul_(gradient[rows].unsqueeze(-1))
            torch.sum(violated, 1, out=of_above[rows])
            of_below -= violated.sum(0)
        return of_above, of_below


def _violated(above: Tensor, below: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """max(0, above - below), (m, N, D), for m rows at a time; memory is reused."""
    count = max(1, _DIFFERENCES.get(above.device.type, 2**18) // max(1, below.numel()))
    held = above.new_empty(min(count, len(above)), *below.shape)
    for first in range(0, len(above), count):
        rows = slice(first, first + count)
        part = held[: len(above[rows])]
        torch.sub(above[rows].unsqueeze(1), below, out=part)
        yield rows, part.clamp_(min=0)
