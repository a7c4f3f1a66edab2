"""The optimizer of Graves 2013 (section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ln_zoo.utils.checks import check_positive, check_probability


class GravesRMSprop(torch.optim.Optimizer):
    r"""RMSprop with centred squares and momentum (Graves 2013, eq. 38-41).

    With gradient e, decay d and momentum m:

    .. math:: \begin{aligned}
        n &\leftarrow d\, n + (1 - d)\, e^2 \\
        g &\leftarrow d\, g + (1 - d)\, e \\
        \Delta &\leftarrow m\, \Delta - \text{lr}\, e / \sqrt{n - g^2 + \text{eps}} \\
        w &\leftarrow w + \Delta
        \end{aligned}

    In `torch.optim.RMSprop` eps is outside the root. Inside, an eps of 1e-4 makes the root at least
    0.01, which bounds the steps of weights with small gradients.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        decay: decay of the averages of gradients and their squares.
        momentum: momentum.
        eps: added to the variance, inside the root.

    Raises:
        ValueError: for values out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        decay: float = 0.95,
        momentum: float = 0.9,
        eps: float = 1e-4,
    ) -> None:
        check_positive(lr=lr, eps=eps)
        check_probability(decay=decay, momentum=momentum)
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": momentum, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
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
                    # No key is "step", which torch does not move to another device when it loads
                    # states.
                    for name in ("square", "mean", "change"):
                        state[name] = torch.zeros_like(w)
                square = state["square"].mul_(group["decay"]).addcmul_(w.grad, w.grad, value=rest)
                mean = state["mean"].mul_(group["decay"]).add_(w.grad, alpha=rest)
                # Constant gradients have variance 0 up to rounding.
                variance = square.addcmul(mean, mean, value=-1).clamp_(min=0)
                root = variance.add_(group["eps"]).sqrt_()
                change = state["change"].mul_(group["momentum"])
                w.add_(change.addcdiv_(w.grad, root, value=-group["lr"]))
        return loss
