"""A sum over a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class Ratio(Metric):
    """The sum of all numerators divided by the sum of all denominators, over all processes.

    Nats per point are such a ratio: a mean over batches would weigh short lines as long ones.

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
            # To other devices, but not with a module to half precision, which cannot count.
            moved = fn(a)
            return moved if moved.dtype == a.dtype else a.to(moved.device)

        super()._apply(move, exclude_state)
        return self

    def update(self, numerators: Tensor, denominators: Tensor) -> None:
        """Adds to both sums.

        Args:
            numerators: any shape.
            denominators: any shape.
        """
        # Not in place: states that the inference mode of a validation made refuse that in training.
        self.numerator = self.numerator + numerators.double().sum()
        self.denominator = self.denominator + denominators.double().sum()

    def compute(self) -> Tensor:
        """The ratio so far, float64; NaN before the first update."""
        return self.numerator / self.denominator
