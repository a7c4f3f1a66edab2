"""Batch normalisation (Ioffe and Szegedy 2015), recurrent too (Cooijmans et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ln_zoo.norms.base import Norm, Site
from ln_zoo.norms.checks import check_eps


@dataclass(frozen=True)
class BatchNorm(Norm):
    """Mean and variance of each feature over the batch; in recurrent layers, at each time step.

    In training the batch's own statistics are used (gradients flow through them) and running
    averages of mean and unbiased variance are kept; in evaluation the running averages are used.
    Recurrent sites keep one row of averages per time step (Cooijmans et al. 2017, section 3) in
    buffers ``(max_steps, F)``; steps beyond the last row that training has reached use that row. Of
    a packed batch only the cases active at a step count, so padding never does; a step at which one
    case alone is left uses the running averages. Each row begins as a plain average of its first
    ``1 / momentum`` batches, so that rows which few sequences reach hold no trace of their start.

    Args:
        gain: initial value of the gain, (F,), in feed-forward layers.
        recurrent_gain: the same in recurrent layers: 0.1, since with 1 gradients vanish along
            hundreds of steps (section 4 there).
        eps: added to the variance, inside the root.
        momentum: weight of the newest batch in the running averages.
        max_steps: rows of statistics that recurrent sites keep; the last one serves all later
            steps, in training too.
        unbiased: whether batches are normalised by the variance with n - 1 in place of n, as the
            layer normalisation paper does at batch size 4 (section 6.6). Needs it be said:
            ``torch.nn.BatchNorm1d`` never does.

    Raises:
        ValueError: for values out of range; in training, for a batch of one case.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> layer = Linear(5, 4, norm=BatchNorm())
        >>> layer(torch.randn(8, 5)).shape, layer.eval()(torch.randn(1, 5)).shape
        (torch.Size([8, 4]), torch.Size([1, 4]))
        >>> layer.train()(torch.randn(1, 5))
        Traceback (most recent call last):
            ...
        ValueError: BatchNorm needs at least 2 cases per feature in training, got 1: ...
    """

    gain: float = 1.0
    recurrent_gain: float = 0.1
    eps: float = 1e-5
    momentum: float = 0.1
    max_steps: int = 256
    unbiased: bool = False

    reads_step: ClassVar[bool] = True
    mixes_cases: ClassVar[bool] = True
    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {
            "weight_matrix_rescaling",
            "weight_vector_rescaling",
            "dataset_rescaling",
            "dataset_recentering",
        }
    )

    def __post_init__(self) -> None:
        check_eps(self)
        if not 0 < self.momentum <= 1:
            raise ValueError(f"BatchNorm: momentum must lie in (0, 1], got {self.momentum!r}")
        if not (isinstance(self.max_steps, int) and self.max_steps >= 1):
            raise ValueError(
                f"BatchNorm: max_steps must be a whole number >= 1, got {self.max_steps!r}"
            )

    def init_sums(self, site: Site) -> None:
        site.add_affine(self.recurrent_gain if site.recurrent else self.gain)
        rows = (self.max_steps,) if site.recurrent else ()
        site.add_buffer("running_mean", (*rows, site.features), 0.0)
        site.add_buffer("running_var", (*rows, site.features), 1.0)
        site.add_buffer("num_batches_tracked", rows, 0, dtype=torch.int64)

    def sums(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        if site.training and self._enough(site, a, step):
            dims = site.case_dims(a)
            var, mean = torch.var_mean(a, dims, correction=int(self.unbiased), keepdim=True)
            self._track(site, a, mean, var, step)
        else:
            mean, var = self._population(site, a, step)
        return site.affine((a - mean) * torch.rsqrt(var + self.eps))

    def _enough(self, site: Site, a: Tensor, step: int | None) -> bool:
        cases = a.numel() // site.features
        if cases >= 2:
            return True
        if step:
            return False  # the longest sequence of a packed batch outlives the others
        raise ValueError(
            f"BatchNorm needs at least 2 cases per feature in training, got {cases}: "
            "use a larger batch_size, drop the last small batch, or call .eval()"
        )

    def _track(self, site: Site, a: Tensor, mean: Tensor, var: Tensor, step: int | None) -> None:
        """Moves the running averages towards this batch's mean and unbiased variance."""
        cases = a.numel() // site.features
        factor = 1.0 if self.unbiased else cases / (cases - 1)
        row = () if step is None else min(step, self.max_steps - 1)
        with torch.no_grad():
            count = site.num_batches_tracked[row].add_(1)
            weight = count.to(site.running_mean.dtype).reciprocal().clamp(min=self.momentum)
            for running, new in ((site.running_mean, mean), (site.running_var, var * factor)):
                running[row].lerp_(new.detach().flatten().to(running.dtype), weight)

    def _population(self, site: Site, a: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
        """Running mean and variance in the shape of a's feature axis."""
        mean, var = site.running_mean, site.running_var
        if step is not None:
            reached = (site.num_batches_tracked > 0).sum().sub(1).clamp(min=0)
            row = reached.clamp(max=step)
            mean, var = mean.index_select(0, row.view(1))[0], var.index_select(0, row.view(1))[0]
        return site.along(mean, a), site.along(var, a)
