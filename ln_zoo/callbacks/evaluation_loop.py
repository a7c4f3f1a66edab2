"""Evaluation of a model on a set, between Lightning's loops."""

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
    """The data module of the run; ValueError if there is none, or it lacks a named loader."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    missing = [name for name in loaders if not hasattr(data, name)]
    if missing:
        got = "none" if data is None else f"{type(data).__name__} without {', '.join(missing)}"
        raise ValueError(
            f"{type(callback).__name__} needs a data module (datamodule=) with "
            f"{' and '.join(loaders)}, got {got}: use one of ln_zoo.data"
        )
    return data


def check_model(callback: Callback, module: LightningModule, example: str, *names: str) -> None:
    """Raise ValueError unless the model has these attributes, as ``ln_zoo.models.<example>``."""
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"{type(callback).__name__} needs a model such as ln_zoo.models.{example}, "
            f"{type(module).__name__} lacks {', '.join(missing)}: remove the callback"
        )


#: Seconds in `evaluating`, by module.
_ASIDE: WeakKeyDictionary[LightningModule, float] = WeakKeyDictionary()


def seconds_aside(module: LightningModule) -> float:
    """Seconds that a module has spent in `evaluating` in this process."""
    return _ASIDE.get(module, 0.0)


def now(module: LightningModule) -> float:
    """A clock in seconds, read after synchronising the module's device."""
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    return time.perf_counter()


@contextmanager
def evaluating(module: LightningModule) -> Iterator[None]:
    """Evaluation mode without gradients; modes and random generators are restored.

    Buffers of the first process, which checkpoints contain, are broadcast: running statistics
    differ between processes.
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
    """Batches of a loader, converted and moved as in Lightning's loops."""
    for batch in loader:
        yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def score(
    trainer: Trainer, loader: Iterable[Any], prefix: str, of_batches: bool = False
) -> dict[str, float]:
    """Means of the model's metrics over the examples of all processes, as ``{prefix}_{name}``.

    The model must have ``per_example(batch) -> {name: (N,)}``; a pair of (N,) is a ratio of sums,
    such as nats per token. ``loader`` is this process's share of the set, at least one batch.
    ``of_batches`` uses batch statistics and omits batches of one example.
    """
    module = trainer.lightning_module
    # Numerator and denominator of each metric.
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
