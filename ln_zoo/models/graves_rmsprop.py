"""The optimizer of Graves 2013 (section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class GravesRMSprop(torch.optim.Optimizer):
    """RMSprop with centred squares and momentum, as Graves has it (2013, eq. 38-41)::

        n = decay n + (1 - decay) e^2
        g = decay g + (1 - decay) e
        d = momentum d - lr e / sqrt(n - g^2 + eps)
        w = w + d

    `torch.optim.RMSprop` is the same but for eps, which stands outside the root there: of 1e-4
    inside, as here, the root is 0.01, which bounds the steps of weights whose gradients are small.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        decay: of the averages of gradients and their squares.
        momentum: share of the step before.
        eps: added to the variance, inside the root.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = GravesRMSprop([w], lr=0.1)
        >>> w.square().sum().backward()
        >>> optimizer.step()
        >>> bool((w < 1).all())
        True
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        decay: float = 0.95,
        momentum: float = 0.9,
        eps: float = 1e-4,
    ) -> None:
        if not lr > 0 or not eps > 0:
            raise ValueError(f"lr and eps must be positive, got {lr!r} and {eps!r}")
        if not 0 <= decay < 1 or not 0 <= momentum < 1:
            raise ValueError(
                f"decay and momentum must lie in [0, 1), got {decay!r} and {momentum!r}"
            )
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rest = 1 - group["decay"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                state = self.state[w]
                if not state:
                    # None is called "step": torch takes that for a count and leaves it where it
                    # is when states are loaded for another device.
                    for name in ("square", "mean", "change"):
                        state[name] = torch.zeros_like(w)
                square = state["square"].mul_(group["decay"]).addcmul_(w.grad, w.grad, value=rest)
                mean = state["mean"].mul_(group["decay"]).add_(w.grad, alpha=rest)
                # Of gradients that never change the variance is 0 but for rounding.
                variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
                root = variance.add_(group["eps"]).sqrt_()
                change = state["change"].mul_(group["momentum"])
                w.add_(change.addcdiv_(w.grad, root, value=-group["lr"]))
        return loss
