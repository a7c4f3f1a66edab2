"""Starts weight norm's scales and biases from training data."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from ln_zoo.callbacks.whole_set import data_module
from ln_zoo.layers import data_dependent_init

# What the room has for this callback alone, and names to no user.
from ln_zoo.layers.initialization import has_fresh_scale, scaled_layers


class DataDependentInit(Callback):
    """Sets scales and biases from the first training examples before training begins.

    See `ln_zoo.layers.data_dependent_init` (Salimans and Kingma 2016, section 3). The examples are
    the first ones of the training set in its own order, whatever order training takes, so that all
    processes start from the same values. Where a run is resumed, it goes on with the values of its
    checkpoint.

    The data module must have ``train_eval_dataloader()`` or ``train_dataloader()``, which gives a
    ``DataLoader``. Where a batch is a tuple or list, as (images, labels), its first element is what
    the model is called with; any other batch is passed as it is.

    Args:
        batch_size: number of training examples; the source takes 500.

    Raises:
        ValueError: for a batch of fewer than 2. When training begins: if no layer of the model has
            weight norm; if scales are not their weights' norms any more, as after loading trained
            weights; without a data module.
    """

    def __init__(self, batch_size: int = 500) -> None:
        if batch_size < 2:
            raise ValueError(f"batch_size must be at least 2, got {batch_size}")
        self.batch_size = batch_size

    # In setup, not later: DDP copies the weights of the first process right after it. A run that is
    # resumed loses nothing: its checkpoint is read between here and on_fit_start, which is also the
    # first to know of it.
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != TrainerFn.FITTING:
            return
        layers = scaled_layers(pl_module)
        self._others = [name for name, layer in layers.items() if not has_fresh_scale(layer)]
        if not self._others:
            inputs = move_data_to_device(self._first_examples(trainer), pl_module.device)
            self._done = data_dependent_init(pl_module, [inputs])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is not None:
            return
        if self._others:
            raise ValueError(
                f"the scale of {', '.join(self._others)} is no longer the length of its weight "
                "vector, so the weights were loaded or trained, and DataDependentInit would "
                "overwrite what was learnt: leave it out, or, where weights were re-initialised, "
                "call reset_norm()"
            )
        rank_zero_info(f"data-dependent initialisation of {', '.join(self._done)}")

    def _first_examples(self, trainer: Trainer) -> Any:
        data = data_module(trainer, self, "train_dataloader")
        in_order = getattr(data, "train_eval_dataloader", data.train_dataloader)
        loader = in_order()
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"DataDependentInit takes the training set from a DataLoader, and this "
                f"{type(data).__name__} gives a {type(loader).__name__}"
            )
        # Its own loader, as that one may hold the share of one process, and in another order.
        whole = DataLoader(
            loader.dataset,
            self.batch_size,
            collate_fn=loader.collate_fn,
            generator=torch.Generator(),
        )
        batch = next(iter(whole))
        return batch[0] if isinstance(batch, tuple | list) else batch
