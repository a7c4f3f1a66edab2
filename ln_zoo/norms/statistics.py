"""Batch statistics in evaluation, and population statistics of a data set.

For final results, population statistics replace running averages: one pass over the training set
with frozen weights (Ioffe and Szegedy 2015, Algorithm 2; Cooijmans et al. 2017, section 3, for each
time step).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, distributed, nn

from ln_zoo.norms.base import Observer, Site
from ln_zoo.norms.processes import several_processes
from ln_zoo.utils.checks import check_choice


def batch_dependent(module: nn.Module) -> bool:
    """Whether, in training, the output of an example depends on the rest of its batch."""
    return any(site.norm.batch_dependent and site.normalizes for site in _sites(module))


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module has running averages that `population_statistics` can replace."""
    return bool(_keepers(module))


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Use batch statistics in all norms of a module, without updating running averages.

    Sites are in training mode, other modules keep their mode; modes, buffers of sites and random
    number generators are restored. A time step of a packed batch with one example uses running
    averages, as in training. Each process uses its own batches.

    Raises:
        ValueError: in the block, for a batch of one example under batch norm.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import BatchNorm
        >>> layer = Linear(5, 4, norm=BatchNorm()).eval()
        >>> with batch_statistics(layer):
        ...     output = layer(torch.randn(100, 5))
        >>> bool((output - layer.bias).mean(0).abs().max() < 1e-5)
        True
    """
    with _observed(module, {}):
        yield


@contextmanager
def population_statistics(module: nn.Module, method: str = "average") -> Iterator[None]:
    """Replace running statistics of a module by statistics of all batches in the block.

    In the block, weights must not change, gradients are disabled, and sites use batch statistics
    (see `batch_statistics`). At its end, every site that saw batches gets new ``running_mean``,
    ``running_var`` and ``num_batches_tracked``, accumulated in float64. If the block raises,
    statistics are unchanged. All processes must enter the block; each runs its own batches, and all
    get the joint statistics.

    In recurrent layers each time step has its own statistics; steps from ``max_steps`` on share the
    last row, as separate batches. Steps that no batch reaches with at least 2 examples use the row
    before them.

    Args:
        module: the module; usually in evaluation mode, without dropout.
        method: how batches are combined.

            - ``"average"``: averages of batch means and biased batch variances, weighted by
              examples (at each step, the active ones). With equal batch sizes, the averages of
              Cooijmans et al. 2017. The variance of batch means is ignored: 1 / n of the variance
              for batches of n independent examples. Shorter sequences are extended by their last
              entry, with its number of examples, so late steps do not rest on few batches.
            - ``"total_variance"``: mean and biased variance of all examples, by the law of total
              variance: the mean variance within batches plus the variance of batch means.

    Raises:
        ValueError: for an unknown method; if no site keeps statistics; with ``"average"``, if time
            steps are out of order; at the end, if no batch had at least 2 examples.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import BatchNorm
        >>> layer = Linear(5, 4, norm=BatchNorm()).eval()
        >>> x = torch.randn(100, 5)
        >>> with population_statistics(layer, "total_variance"):
        ...     for batch in x.split(30):
        ...         _ = layer(batch)
        >>> sums = x @ layer.weight.T
        >>> torch.allclose(layer.site.running_var, sums.var(0, correction=0), atol=1e-5)
        True
    """
    check_choice("method", method, _METHODS)
    collectors = {site: _METHODS[method](site) for site in _keepers(module)}
    if not collectors:
        raise ValueError(
            f"no norm in this {type(module).__name__} keeps statistics (BatchNorm does)"
        )
    with torch.no_grad():
        with _observed(module, {site: each.observe for site, each in collectors.items()}):
            yield
        # Inference mode accepts statistics that were made in inference mode.
        with torch.inference_mode():
            found = {site: each.population() for site, each in collectors.items()}
        if all(population.batches.numel() == 0 for population in found.values()):
            raise ValueError(
                "no batch of at least 2 examples went through the module: run batches in the block"
            )
        for site, population in found.items():
            _write(site, population)


def _sites(module: nn.Module) -> list[Site]:
    return [m for m in module.modules() if isinstance(m, Site)]


def _keepers(module: nn.Module) -> list[Site]:
    sites = _sites(module)
    return [site for site in sites if site.norm.keeps_statistics and site.normalizes]


def _ignore(step: int | None, sizes: Sequence[int], mean: Tensor, var: Tensor) -> None:
    """A no-op observer, which keeps running averages unchanged."""


@contextmanager
def _observed(module: nn.Module, observers: Mapping[Site, Observer]) -> Iterator[None]:
    sites = _sites(module)
    modes = {m: m.training for site in sites for m in site.modules()}
    former = [site.observer for site in sites]
    # Users' norms may ignore observers, so buffers are restored too.
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for site in sites
        for owner in site.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    for site in sites:
        site.train()
        site.observer = observers.get(site, _ignore)
    cards = {t.get_device() for t in (*module.parameters(), *module.buffers()) if t.is_cuda}
    try:
        # The block must not change random numbers of training.
        with torch.random.fork_rng(devices=sorted(cards)):
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        for site, observer in zip(sites, former, strict=True):
            site.observer = observer
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                # The norm may have replaced the tensor.
                setattr(owner, name, buffer.copy_(before))


# Collecting


class _Population(NamedTuple):
    """Statistics of the reached rows: mean and var, (rows, F), float64; batches, (rows,), int64."""

    mean: Tensor
    var: Tensor
    batches: Tensor


def _write(site: Site, population: _Population) -> None:
    rows = len(population.batches)
    if rows == 0:
        return
    for name, found, fill in (
        ("running_mean", population.mean, 0),
        ("running_var", population.var, 1),
        ("num_batches_tracked", population.batches, 0),
    ):
        buffer = site.get_buffer(name).fill_(fill)
        kept = buffer if site.recurrent else buffer.unsqueeze(0)
        kept[:rows].copy_(found)


class _Collector(Protocol):
    """Combines the statistics of batches into one for each row."""

    def __init__(self, site: Site) -> None: ...

    def observe(self, step: int | None, sizes: Sequence[int], mean: Tensor, var: Tensor) -> None:
        """Collect statistics of consecutive steps; an `Observer`."""

    def population(self) -> _Population:
        """The result over all processes."""


class _Average:
    """Average over batches, weighted by examples; shorter series are extended."""

    def __init__(self, site: Site) -> None:
        like = site.running_mean
        self.rows = len(like) if site.recurrent else 1
        self.batches = 0
        self.longest = 0
        # Means and variances times the number of examples, which is the last feature: sums over
        # batches of each row, and of last entries.
        self.sums = like.new_zeros(2, 0, site.features + 1, dtype=torch.float64)
        self.last = like.new_zeros(2, site.features + 1, dtype=torch.float64)
        self.series: list[Tensor] = []
        self.steps = 0

    @torch.inference_mode()
    def observe(self, step: int | None, sizes: Sequence[int], mean: Tensor, var: Tensor) -> None:
        if not step:
            self._finish_series()
        elif step != self.steps:
            raise ValueError(
                f'population statistics by "average" need the time steps in order: got step '
                f'{step}, expected step {self.steps}; use "total_variance", which needs no order'
            )
        entries = torch.stack([mean, var]).double()
        examples = entries.new_tensor(sizes).unsqueeze(1)
        self.series.append(nn.functional.pad(entries, (0, 1), value=1.0) * examples)
        self.steps += len(sizes)

    def population(self) -> _Population:
        self._finish_series()
        sums, batches = self.sums, self.batches
        if several_processes():
            self._pad(int(_over_processes(self.last.new_tensor(self.longest), "max")))
            sums = _over_processes(self.sums, "sum")
            batches = int(_over_processes(self.last.new_tensor(batches), "sum"))
        counts = torch.full((sums.shape[1],), batches, device=sums.device)
        if self.longest > self.rows:
            counts[-1] *= self.longest - self.rows + 1
        mean, var = sums[..., :-1] / sums[..., -1:]
        return _Population(mean, var, counts)

    def _finish_series(self) -> None:
        if not self.series:
            return
        entries = torch.cat(self.series, dim=1)
        self.series, self.steps = [], 0
        self._pad(entries.shape[1])
        self._add(0, entries)
        last = entries[:, -1:]
        self._add(entries.shape[1], last.expand(-1, self.longest - entries.shape[1], -1))
        self.last += last.squeeze(1)
        self.batches += 1

    def _pad(self, longest: int) -> None:
        more = longest - self.longest
        if more > 0:
            rows = min(longest, self.rows) - self.sums.shape[1]
            self.sums = nn.functional.pad(self.sums, (0, 0, 0, rows))
            self._add(self.longest, self.last.unsqueeze(1).expand(-1, more, -1))
            self.longest = longest

    def _add(self, first: int, entries: Tensor) -> None:
        steps = torch.arange(first, first + entries.shape[1], device=entries.device)
        self.sums.index_add_(1, steps.clamp_(max=self.rows - 1), entries)


class _TotalVariance:
    """Mean and variance of all examples, by the formula of Chan, Golub and LeVeque (1979)."""

    def __init__(self, site: Site) -> None:
        like = site.running_mean
        self.rows = len(like) if site.recurrent else 1
        # Examples, batches, means and summed squared deviations of each row.
        self.examples = like.new_zeros(0, 1, dtype=torch.float64)
        self.batches = like.new_zeros(0, 1, dtype=torch.float64)
        self.mean = like.new_zeros(0, site.features, dtype=torch.float64)
        self.squares = like.new_zeros(0, site.features, dtype=torch.float64)

    @torch.inference_mode()
    def observe(self, step: int | None, sizes: Sequence[int], mean: Tensor, var: Tensor) -> None:
        first = step or 0
        self._reserve(min(first + len(sizes), self.rows))
        examples = torch.tensor(sizes, dtype=torch.float64, device=mean.device).unsqueeze(1)
        mean, squares = mean.double(), var.double() * examples
        alone = max(0, min(len(sizes), self.rows - 1 - first))
        self._merge(slice(first, first + alone), examples[:alone], mean[:alone], squares[:alone], 1)
        if alone < len(sizes):
            together = _combined(examples[alone:], mean[alone:], squares[alone:])
            self._merge(slice(self.rows - 1, self.rows), *together, len(sizes) - alone)

    def population(self) -> _Population:
        examples, batches, mean, squares = self.examples, self.batches, self.mean, self.squares
        if several_processes():
            self._reserve(int(_over_processes(mean.new_tensor(len(mean)), "max")))
            examples = _over_processes(self.examples, "sum")
            batches = _over_processes(self.batches, "sum")
            mean = _over_processes(self.mean * (self.examples / examples.clamp(min=1)), "sum")
            deviations = self.examples * (self.mean - mean).square()
            squares = _over_processes(self.squares + deviations, "sum")
        # Rows without examples count as unreached.
        var = torch.where(examples > 0, squares / examples, 1.0)
        return _Population(mean, var, batches.long().squeeze(1))

    def _reserve(self, rows: int) -> None:
        more = rows - len(self.mean)
        if more > 0:
            for name in ("examples", "batches", "mean", "squares"):
                setattr(self, name, nn.functional.pad(getattr(self, name), (0, 0, 0, more)))

    def _merge(
        self, rows: slice, examples: Tensor, mean: Tensor, squares: Tensor, batches: int
    ) -> None:
        total = self.examples[rows] + examples
        away = mean - self.mean[rows]
        self.squares[rows] += squares + away.square() * (self.examples[rows] * examples / total)
        self.mean[rows] += away * (examples / total)
        self.examples[rows] = total
        self.batches[rows] += batches


def _combined(examples: Tensor, mean: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number of examples (1, 1), mean and squared deviations (1, F) of several rows combined."""
    total = examples.sum(0, keepdim=True)
    joint = (mean * (examples / total)).sum(0, keepdim=True)
    spread = squares + examples * (mean - joint).square()
    return total, joint, spread.sum(0, keepdim=True)


def _over_processes(a: Tensor, operation: str) -> Tensor:
    result = a.clone()
    if result.numel() == 0:
        return result  # no process saw batches at this site
    kinds = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
    distributed.all_reduce(result, kinds[operation])
    return result


_METHODS: dict[str, type[_Collector]] = {"average": _Average, "total_variance": _TotalVariance}
