"""Ratios of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class Ratio(Metric):
    """Sum of numerators divided by sum of denominators, over batches and processes.

    For metrics such as nats per point, where batches have different numbers of points.

    Example:
        >>> ratio = Ratio()
        >>> ratio.update(torch.tensor([6.0, 2.0]), torch.tensor([2, 1]))
        >>> ratio.update(torch.tensor([4.0]), torch.tensor([3]))
        >>> ratio.compute()
        tensor(2., dtype=torch.float64)
    """

    full_state_update = False
    numerator: Tensor
    denominator: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("numerator", "denominator"):
            zero = torch.zeros((), dtype=torch.float64)
            self.add_state(name, zero, dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Ratio:
        def move(a: Tensor) -> Tensor:
            # Keeps float64 under Module.half(): half precision cannot count.
            moved = fn(a)
            return moved if moved.dtype == a.dtype else a.to(moved.device)

        super()._apply(move, exclude_state)
        return self

    def update(self, numerators: Tensor, denominators: Tensor) -> None:
        """Add to both sums; any shapes."""
        # Not in place: states may be inference tensors of a validation.
        self.numerator = self.numerator + numerators.double().sum()
        self.denominator = self.denominator + denominators.double().sum()

    def compute(self) -> Tensor:
        """The ratio, float64; NaN before the first update."""
        return self.numerator / self.denominator
