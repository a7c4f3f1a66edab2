"""Adam as in the released code of skip-thoughts and order embeddings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from ln_zoo.models.base import fused_on_cpu
from ln_zoo.utils.checks import check_choice

AdamBiasCorrection = Literal["standard", "legacy"]

# Without torch's wrapper, which would run the hooks of `LegacyAdam.step` a second time.
_torchs_step = inspect.unwrap(torch.optim.Adam.step)


class LegacyAdam(torch.optim.Adam):
    r"""Adam with wrong powers in its bias correction, as in released code.

    Update t is divided by 1 - (1 - b1)^t and 1 - (1 - b2)^t instead of 1 - b1^t and 1 - b2^t
    (Kingma and Ba 2015):

    .. math:: \begin{aligned}
        m &\leftarrow b_1 m + (1 - b_1)\, g \\
        v &\leftarrow b_2 v + (1 - b_2)\, g^2 \\
        w &\leftarrow w - \text{lr}\, \frac{\sqrt{1 - (1 - b_2)^t}}{1 - (1 - b_1)^t}
            \frac{m}{\sqrt{v} + \text{eps}}
        \end{aligned}

    With (0.9, 0.999) this is almost no correction: update 1 is 3.5 times, update 12 6.6 times,
    update 1,000 1.26 times as long as Adam's. An early draft of Adam wrote 1 - b for b. The code of
    skip-thoughts (Kiros et al. 2015), order embeddings (Vendrov et al. 2016) and layer
    normalisation kept that formula in the published runs.

    Arguments, state and errors as `torch.optim.Adam`. Each parameter counts the updates in which it
    had a gradient.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = LegacyAdam([w], lr=0.1)
        >>> w.grad = torch.ones(1)
        >>> optimizer.step()
        >>> round(w.item(), 3)  # Adam's first step is 0.1
        -0.351
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = [part for group in groups for part in self._parts(group)]
            _torchs_step(self)
        finally:
            self.param_groups = groups
        return loss

    def _parts(self, group: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A group split by update count, with rate and eps for torch's step."""
        by_count: dict[int, list[Tensor]] = {}
        for w in group["params"]:
            if w.grad is not None:
                count = int(self.state[w]["step"]) if w in self.state else 0
                by_count.setdefault(count + 1, []).append(w)
        for t, params in by_count.items():
            first, second = (float(beta) for beta in group["betas"])
            wrong = math.sqrt(1 - (1 - second) ** t) / (1 - (1 - first) ** t)
            root = math.sqrt(1 - second**t)
            rate = group["lr"] * wrong * (1 - first**t) / root
            yield group | {"params": params, "lr": rate, "eps": group["eps"] / root}


def adam(
    module: LightningModule, lr: float, bias_correction: AdamBiasCorrection = "standard"
) -> torch.optim.Adam:
    """Adam over all parameters of a model; `LegacyAdam` if ``bias_correction`` is ``"legacy"``.

    ValueError unless it is ``"standard"`` or ``"legacy"``.
    """
    check_choice("adam_bias_correction", bias_correction, get_args(AdamBiasCorrection))
    cls = LegacyAdam if bias_correction == "legacy" else torch.optim.Adam
    return cls(module.parameters(), lr=lr, fused=fused_on_cpu(module).get("fused"))
