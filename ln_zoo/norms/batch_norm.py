"""Batch normalisation (Ioffe and Szegedy 2015), recurrent too (Cooijmans et al. 2017)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.norms.arguments import check_fields
from ln_zoo.norms.base import Norm, Site
from ln_zoo.norms.processes import extremes, joint_moments, several_processes
from ln_zoo.ops.memory import to_device
from ln_zoo.ops.norm_records import Record, StepNorm


@dataclass(frozen=True)
class BatchNorm(Norm):
    """Mean and variance of each feature over the batch; in recurrent layers, at each time step.

    Training uses batch statistics, with gradients, and updates running averages of mean and
    unbiased variance; evaluation uses the running averages. Recurrent sites have one row of
    averages per time step (Cooijmans et al. 2017, section 3) in buffers ``(max_steps, F)``; steps
    after the last row reached in training use that row. In a packed batch, only the examples active
    at a step count; a step with one example uses the running averages. Each row starts as the plain
    average of its first ``1 / momentum`` batches, independent of its initial value.

    Args:
        gain: initial value of the gain, (F,), in feed-forward layers.
        recurrent_gain: the same in recurrent layers: 0.1, since with 1 gradients vanish over
            hundreds of steps (section 4 there).
        eps: added to the variance, inside the root; default 1e-5.
        momentum: weight of the newest batch in the running averages; default 0.1.
        max_steps: rows of statistics of recurrent sites, default 256; later steps share the last.
        unbiased: normalise batches by the variance with n - 1, as the layer normalisation paper
            does at batch size 4 (section 6.6). ``torch.nn.BatchNorm1d`` uses n.
        sync: in training, use statistics over all processes, with gradients and joint running
            averages. One exchange per site in the forward and one in the backward pass; recurrent
            layers exchange at every time step, on the generic loop. By default each process uses
            its own examples, and DDP keeps the running averages of the first process. Evaluation
            and `batch_statistics` exchange nothing.

    Raises:
        ValueError: for values out of range; in training, for a batch of one example, and with
            ``sync`` for sequences of different lengths.
    """

    gain: float = 1.0
    recurrent_gain: float = 0.1
    eps: float = 1e-5
    momentum: float = 0.1
    max_steps: int = 256
    unbiased: bool = False
    sync: bool = False

    per_timestep: ClassVar[bool] = True
    batch_dependent: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = True
    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {
            "weight_matrix_rescaling",
            "weight_vector_rescaling",
            "dataset_rescaling",
            "dataset_recentering",
        }
    )

    def __post_init__(self) -> None:
        if type(self.momentum) not in (int, float) or not 0 < self.momentum <= 1:
            raise ValueError(f"BatchNorm: momentum must lie in (0, 1], got {self.momentum!r}")
        check_fields(self)
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ValueError(
                f"BatchNorm: max_steps must be a whole number >= 1, got {self.max_steps!r}"
            )

    def init_params(self, site: Site) -> None:
        site.add_affine(self.recurrent_gain if site.recurrent else self.gain)
        rows = (self.max_steps,) if site.recurrent else ()
        site.add_buffer("running_mean", (*rows, site.features), 0.0)
        site.add_buffer("running_var", (*rows, site.features), 1.0)
        site.add_buffer("num_batches_tracked", rows, 0, dtype=torch.int64)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        exact = site.training and (self.unbiased or not self.eps or self._exchanges(site))
        if not (site.recurrent or exact):
            return self._sums_by_torch(site, a)
        if site.training:
            mean, var = self._of_batch(site, a, step)
        else:
            mean, var = self._population(site, a, step)
        return site.affine((a - mean) * torch.rsqrt(var + self.eps))

    def to_spec(self, site: Site) -> Record:
        # Only the generic loop can exchange statistics at each step.
        exchanged = self._exchanges(site)
        if not site.recurrent or type(self).normalize is not BatchNorm.normalize or exchanged:
            return super().to_spec(site)
        return StepNorm(
            features=site.features,
            batch=site.training,
            eps=self.eps,
            correction=int(self.unbiased),
            gain=site.gain,
            shift=site.shift,
            check=self._check,
            population=partial(self._population_of_steps, site),
            track=partial(self._track_steps, site),
        )

    def on_sequence_start(self, site: Site, steps: int) -> None:
        if not self._exchanges(site):
            return
        fewest, most = extremes(steps, site.running_mean.device)
        # All processes raise; otherwise some would wait for the others forever.
        if fewest < most:
            raise ValueError(
                "BatchNorm(sync=True) needs sequences of one length in all processes, got "
                f"{fewest} to {most} steps: pad them, or set sync=False"
            )

    def _sums_by_torch(self, site: Site, a: Tensor) -> Tensor:
        """`normalize` without time steps, fused; in training for biased variance and eps > 0."""
        rows = a if site.axis == 1 else a.reshape(-1, site.features)
        gain, shift = site.gain_and_shift(a)
        if site.training:
            examples = a.numel() // site.features
            self._check(examples)
            # With momentum 1, running averages are the batch's mean and unbiased variance.
            mean, var = a.new_zeros(site.features), a.new_zeros(site.features)
            out = F.batch_norm(rows, mean, var, gain, shift, True, 1.0, self.eps)
            self._track(site, examples, mean, var * ((examples - 1) / examples), None)
        else:
            mean, var = site.running_mean.to(a.dtype), site.running_var.to(a.dtype)
            # torch 2.11 refuses an eps of 0; this one vanishes in the sum with a variance.
            eps = self.eps or sys.float_info.min
            out = F.batch_norm(rows, mean, var, gain, shift, False, 0.0, eps)
        return out.view_as(a)

    def _of_batch(self, site: Site, a: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
        dims = site.example_dims(a)
        if self._exchanges(site):
            examples, mean, var = joint_moments(a, dims)
        else:
            examples = a.numel() // site.features
        # Late steps of a packed batch may have one example.
        if not step:
            self._check(examples)
        if examples < 2:
            return self._population(site, a, step)
        if not self._exchanges(site):
            var, mean = torch.var_mean(a, dims, correction=0, keepdim=True)
        self._track(site, examples, mean, var, step)
        return mean, var * (examples / (examples - 1)) if self.unbiased else var

    def _exchanges(self, site: Site) -> bool:
        return (
            self.sync
            and site.training
            # In `population_statistics`, processes may have different numbers of batches.
            and site.observer is None
            and several_processes()
        )

    def _check(self, examples: int) -> None:
        if examples < 2:
            raise ValueError(
                f"BatchNorm needs at least 2 examples per feature in training, got {examples}: "
                "use a larger batch_size, drop the last small batch, or call .eval()"
            )

    def _track(
        self, site: Site, examples: int, mean: Tensor, var: Tensor, step: int | None
    ) -> None:
        if site.observer is not None:
            rows = (moment.detach().view(1, -1) for moment in (mean, var))
            site.observer(step, (examples,), *rows)
            return
        factor = examples / (examples - 1)
        row = () if step is None else min(step, self.max_steps - 1)
        with torch.no_grad():
            count = site.num_batches_tracked[row].add_(1)
            weight = self._weight(site, count)
            for running, new in ((site.running_mean, mean), (site.running_var, var * factor)):
                running[row].lerp_(new.detach().flatten().to(running.dtype), weight)

    def _track_steps(
        self, site: Site, first: int, sizes: Sequence[int], mean: Tensor, var: Tensor
    ) -> None:
        if site.observer is not None:
            site.observer(first, sizes, mean, var)
            return
        last = self.max_steps - 1
        rows = slice(min(first, last), min(first + len(sizes), last))
        alone = rows.stop - rows.start  # steps with a row of their own
        together = len(sizes) - alone
        with torch.no_grad():
            if sizes[0] == sizes[-1]:
                unbiased = var * (sizes[0] / (sizes[0] - 1))
            else:
                examples = torch.tensor(sizes, dtype=var.dtype, device="cpu")
                examples = to_device(examples, var.device).unsqueeze(1)
                unbiased = var * (examples / (examples - 1))
            news = (mean, unbiased)
            counts = site.num_batches_tracked
            weights = self._weight(site, counts[rows].add_(1)).unsqueeze(1)
            if together:
                after = counts[last] + torch.arange(1, together + 1, device=counts.device)
                counts[last].add_(together)
                shares = self._weight(site, after)
                # Sequential updates of one row, in closed form.
                fading = (1 - shares).flip(0).cumprod(0).flip(0)
                shares = shares * torch.cat([fading[1:], torch.ones_like(fading[:1])])
            for running, new in zip((site.running_mean, site.running_var), news, strict=True):
                new = new.to(running.dtype)
                running[rows].lerp_(new[:alone], weights)
                if together:
                    running[last].mul_(fading[0]).add_(shares @ new[alone:])

    def _weight(self, site: Site, count: Tensor) -> Tensor:
        """Weight of the newest batch, for the number of batches up to it."""
        return count.to(site.running_mean.dtype).reciprocal().clamp(min=self.momentum)

    def _population(self, site: Site, a: Tensor, step: int | None) -> tuple[Tensor, Tensor]:
        if step is None:
            mean, var = site.running_mean, site.running_var
        else:
            mean, var = (rows[0] for rows in self._population_of_steps(site, step, 1))
        return site.along(mean, a), site.along(var, a)

    def _population_of_steps(self, site: Site, first: int, steps: int) -> tuple[Tensor, Tensor]:
        """Running means and variances of steps, one row each, up to the last row."""
        last = self.max_steps - 1
        counts = site.num_batches_tracked
        reached = (counts > 0).sum().sub(1).clamp(min=0)
        rows = torch.arange(min(first, last), min(first + steps, last + 1), device=counts.device)
        rows = rows.clamp(max=reached)
        return site.running_mean.index_select(0, rows), site.running_var.index_select(0, rows)
