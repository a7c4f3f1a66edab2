"""Batch statistics for measuring, and population statistics of whole sets.

A model whose norm mixes examples can be measured in two ways: with its running averages, as
evaluation does, or with the statistics of each batch. For final numbers the averages of the last
few training batches give way to population statistics: one pass over the training set with frozen
weights (Ioffe and Szegedy 2015, Algorithm 2; Cooijmans et al. 2017, section 3, for each time step).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, distributed, nn

from ln_zoo.norms.base import Observer, Site
from ln_zoo.norms.processes import several_processes


def batch_dependent(module: nn.Module) -> bool:
    """Whether, in training mode, outputs of one example depend on the rest of the batch.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import BatchNorm, LayerNorm
        >>> [batch_dependent(Linear(2, 3, norm=norm)) for norm in (BatchNorm(), LayerNorm())]
        [True, False]
    """
    return any(site.norm.batch_dependent and site.normalizes for site in _sites(module))


def keeps_statistics(module: nn.Module) -> bool:
    """Whether there are running averages that `population_statistics` can replace.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import BatchNorm
        >>> keeps_statistics(Linear(2, 3, norm=BatchNorm())), keeps_statistics(Linear(2, 3))
        (True, False)
    """
    return bool(_keepers(module))


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """Within it, the norms of a module use batch statistics, and no running average changes.

    Its sites are in training mode, whatever the modes of the layers around them; afterwards modes
    are as before, and so are all buffers of the sites, under any norm, and torch's random
    number generators. A step of a packed batch that only one example reaches uses the running
    averages, as in training. With several processes each batch is that of one process.

    Args:
        module: the module; usually in evaluation mode.

    Raises:
        ValueError: within it, for a batch of one example under batch norm.

    Example:
        >>> from ln_zoo.layers import Linear
        >>> from ln_zoo.norms import BatchNorm
        >>> layer = Linear(5, 4, norm=BatchNorm()).eval()
        >>> with batch_statistics(layer):
        ...     output = layer(torch.randn(100, 5))
        >>> bool((output - layer.bias).mean(0).abs().max() < 1e-5)
        True
        >>> int(layer.site.num_batches_tracked)
        0
    """
    with _observed(module, {}):
        yield


@contextmanager
def population_statistics(module: nn.Module, method: str = "average") -> Iterator[None]:
    """Sets the statistics of a module to those of all batches that go through it in the block.

    In the block, weights must not change, gradients are off, and sites use the statistics of each
    batch (see `batch_statistics`). At the end every site that batches went through gets new
    ``running_mean``, ``running_var`` and ``num_batches_tracked``, and nothing else has changed,
    neither modes nor torch's random number generators. If the block raises, the old statistics
    stay. Sums are float64. With several processes, all of which must enter, each takes batches of
    its own, and all get the statistics of all batches.

    In recurrent layers each time step has its own; steps from ``max_steps`` on share the last row,
    where each counts as a batch of its own. Steps that no batch reaches with at least 2 examples
    become unreached: they use the last row before them.

    Args:
        module: the module; usually in evaluation mode, so that nothing is dropped out.
        method: how the statistics of the batches are combined.

            - ``"average"``: the averages of batch means and of biased batch variances, each
              weighted by its number of examples (at each step, of those that reach it). For batches
              of equal size these are the plain averages of Cooijmans et al. 2017; a small last
              batch, whose variance is too small, weighs little. The spread of the batch means is
              left out: 1 / n of the variance for batches of n independent examples. Where lengths
              differ, the series of each batch is continued by its last entry, with that entry's
              examples, up to the longest one, so that late steps do not rest on few batches.
            - ``"total_variance"``: mean and biased variance of all examples together, by the law of
              total variance: that within batches, weighted by their examples, plus that of the
              batch means. A step counts the examples that reach it.

    Raises:
        ValueError: for another method; if no site keeps statistics; under ``"average"``, if the
            time steps of a sequence are out of order; at the end, if no batch of
            at least 2 examples went through the module.

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
    if method not in _METHODS:
        raise ValueError(f"method must be one of {sorted(_METHODS)}, got {method!r}")
    collectors = {site: _METHODS[method](site) for site in _keepers(module)}
    if not collectors:
        raise ValueError(
            f"no norm in this {type(module).__name__} keeps statistics that could be "
            "estimated (BatchNorm does)"
        )
    with torch.no_grad():
        with _observed(module, {site: each.observe for site, each in collectors.items()}):
            yield
        # In inference mode, so that it does not matter whether batches went through in it.
        with torch.inference_mode():
            found = {site: each.population() for site, each in collectors.items()}
        if all(population.batches.numel() == 0 for population in found.values()):
            raise ValueError(
                "no batch of at least 2 examples went through the module: there is nothing to take "
                "population statistics of"
            )
        for site, population in found.items():
            _write(site, population)


def _sites(module: nn.Module) -> list[Site]:
    return [m for m in module.modules() if isinstance(m, Site)]


def _keepers(module: nn.Module) -> list[Site]:
    sites = _sites(module)
    return [site for site in sites if site.norm.keeps_statistics and site.normalizes]


def _ignore(step: int | None, sizes: Sequence[int], mean: Tensor, var: Tensor) -> None:
    """Observes nothing: where a site has an observer, its running averages stay."""


@contextmanager
def _observed(module: nn.Module, observers: Mapping[Site, Observer]) -> Iterator[None]:
    """Sites in training mode, each with its observer; everything is restored afterwards."""
    sites = _sites(module)
    modes = {m: m.training for site in sites for m in site.modules()}
    former = [site.observer for site in sites]
    # Buffers are copied as well: a user's own norm need not know of observers.
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
        # Models may draw random numbers: measuring must not change those that training draws.
        with torch.random.fork_rng(devices=sorted(cards)):
            yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        for site, observer in zip(sites, former, strict=True):
            site.observer = observer
        with torch.no_grad():
            for owner, name, buffer, before in buffers:
                # The tensor itself as well, in case the norm has put another in its place.
                setattr(owner, name, buffer.copy_(before))


# Collecting


class _Population(NamedTuple):
    """Statistics of the rows up to the last that was reached.

    Attributes:
        mean: (rows, F), float64.
        var: (rows, F), float64.
        batches: number of batches behind each, (rows,), int64.
    """

    mean: Tensor
    var: Tensor
    batches: Tensor


def _write(site: Site, population: _Population) -> None:
    """Puts statistics on a site; the rows after them are as if never reached."""
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
        """Takes the statistics of consecutive steps, as an `Observer`."""

    def population(self) -> _Population:
        """Their result over all processes."""


class _Average:
    """Averages over batches, weighted by examples; a shorter one is continued by its last entry."""

    def __init__(self, site: Site) -> None:
        like = site.running_mean
        self.rows = len(like) if site.recurrent else 1
        self.batches = 0
        self.longest = 0
        # Means and variances, times the number of examples, which is one more feature after all
        # others: summed over the batches so far for each row, and over their last entries.
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
        """Continues the batches so far up to that many steps."""
        more = longest - self.longest
        if more > 0:
            rows = min(longest, self.rows) - self.sums.shape[1]
            self.sums = nn.functional.pad(self.sums, (0, 0, 0, rows))
            self._add(self.longest, self.last.unsqueeze(1).expand(-1, more, -1))
            self.longest = longest

    def _add(self, first: int, entries: Tensor) -> None:
        """Adds (2, steps, F + 1) to the rows of these steps."""
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
        # A row that was passed over is as if never reached.
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
    """Examples (1, 1), mean and sum of squared deviations (1, F) of several rows together."""
    total = examples.sum(0, keepdim=True)
    joint = (mean * (examples / total)).sum(0, keepdim=True)
    spread = squares + examples * (mean - joint).square()
    return total, joint, spread.sum(0, keepdim=True)


def _over_processes(a: Tensor, operation: str) -> Tensor:
    """The sum or maximum over all processes."""
    result = a.clone()
    if result.numel() == 0:
        return result  # of a site that nothing went through, in any process
    kinds = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
    distributed.all_reduce(result, kinds[operation])
    return result


_METHODS: dict[str, type[_Collector]] = {"average": _Average, "total_variance": _TotalVariance}
