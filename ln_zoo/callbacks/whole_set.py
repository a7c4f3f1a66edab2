"""What callbacks share that take a model through a whole set between Lightning's own loops."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from ln_zoo.norms import batch_statistics
from ln_zoo.norms.modes import evaluation_mode


def data_module(trainer: Trainer, callback: Callback, *loaders: str) -> Any:
    """The data module of the run, which must have loaders of these names.

    Raises:
        ValueError: if it lacks one, or where there is no data module; in the callback's name.
    """
    data = trainer.datamodule  # type: ignore[attr-defined]
    missing = [name for name in loaders if not hasattr(data, name)]
    if missing:
        got = "none was given" if data is None else f"{type(data).__name__} lacks {missing}"
        raise ValueError(
            f"{type(callback).__name__} needs a data module with {' and '.join(loaders)}, and "
            f"{got}: give one (datamodule=) like those of ln_zoo.data"
        )
    return data


#: Seconds that modules have been in `evaluating`.
_ASIDE: WeakKeyDictionary[LightningModule, float] = WeakKeyDictionary()


def seconds_aside(module: LightningModule) -> float:
    """Wall time that a module has spent in `evaluating` in this process, in seconds."""
    return _ASIDE.get(module, 0.0)


def now(module: LightningModule) -> float:
    """A clock in seconds, read when all is done that the module's device was given to do."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()


@contextmanager
def evaluating(module: LightningModule) -> Iterator[None]:
    """Evaluation mode without gradients; modes and random number generators are put back after.

    With several processes all then have the buffers of the first, which are those that are saved:
    running statistics of the last training batch are each process's own.
    """
    begin = now(module)
    if module.trainer.world_size > 1:
        for buffer in module.buffers():
            torch.distributed.broadcast(buffer, src=0)
    cards = [module.device.index] if module.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cards), torch.no_grad(), evaluation_mode(module):
            yield
    finally:
        _ASIDE[module] = seconds_aside(module) + now(module) - begin


def batches(trainer: Trainer, loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, with what Lightning's own loops do to them."""
    for batch in loader:
        yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def score(
    trainer: Trainer, loader: Iterable[Any], prefix: str, of_batches: bool = False
) -> dict[str, float]:
    """Mean of each of the model's metrics over the examples of all processes.

    Args:
        trainer: of the model, which must have ``per_example(batch) -> {name: (N,)}``; where a
            metric is not a mean over examples, as nats per token, a pair of (N,) in place of the
            values: the sum of the first is divided by that of the second.
        loader: each process its share of the set, at least a batch.
        prefix: of the names in the answer, ``{prefix}_{name}``.
        of_batches: score with the statistics of each batch, where the norm is batch-dependent;
            batches of a single example are left out.
    """
    module = trainer.lightning_module
    # Of each metric numerators and denominators.
    totals: dict[str, Tensor] = {}
    with evaluating(module), batch_statistics(module) if of_batches else nullcontext():
        for batch in batches(trainer, loader):
            if of_batches and extract_batch_size(batch) < 2:
                continue
            with trainer.precision_plugin.val_step_context():
                scores = module.per_example(batch)  # type: ignore[operator]
            for name, values in scores.items():
                pair = values if isinstance(values, tuple) else (values, torch.ones_like(values))
                sums = torch.stack([part.double().sum() for part in pair])
                totals[name] = totals[name] + sums if name in totals else sums
    summed = {
        name: trainer.strategy.reduce(total, reduce_op="sum") for name, total in totals.items()
    }
    return {f"{prefix}_{name}": float(total[0] / total[1]) for name, total in summed.items()}
