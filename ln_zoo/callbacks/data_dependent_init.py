"""Data-dependent initialisation of weight norm."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from ln_zoo.callbacks.evaluation_loop import data_module
from ln_zoo.layers import data_dependent_init
from ln_zoo.layers.initialization import has_fresh_scale, scaled_layers
from ln_zoo.utils.checks import check_at_least


class DataDependentInit(Callback):
    """Initialise scales and biases from the first training examples, before training.

    See `ln_zoo.layers.data_dependent_init` (Salimans and Kingma 2016, section 3). Examples are in
    the order of the training set, so all processes get the same values. No-op in a resumed run. The
    data module must have ``train_eval_dataloader()`` or ``train_dataloader()``, which returns a
    ``DataLoader``. The model is called with the batch, or the first element of a tuple or list.

    Args:
        batch_size: number of training examples; 500 in the paper.

    Raises:
        ValueError: if no layer has weight norm, or weights are trained or loaded.
    """

    def __init__(self, batch_size: int = 500) -> None:
        check_at_least(2, batch_size=batch_size)
        self.batch_size = batch_size

    # In setup: DDP broadcasts the weights right after it. A resumed run loads its checkpoint later,
    # before on_fit_start.
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
                f"DataDependentInit would overwrite {', '.join(self._others)}: the scales are "
                "not the norms of the weights, so these are trained or loaded. Remove the "
                "callback, or call reset_norm() after re-initialising weights"
            )
        rank_zero_info(f"data-dependent initialisation of {', '.join(self._done)}")

    def _first_examples(self, trainer: Trainer) -> Any:
        data = data_module(trainer, self, "train_dataloader")
        in_order = getattr(data, "train_eval_dataloader", data.train_dataloader)
        loader = in_order()
        if not isinstance(loader, DataLoader):
            raise ValueError(
                f"DataDependentInit needs a DataLoader, got a {type(loader).__name__} from "
                f"{type(data).__name__}"
            )
        # A new loader: the given one may be a share of the set, in another order.
        whole = DataLoader(
            loader.dataset,
            self.batch_size,
            collate_fn=loader.collate_fn,
            generator=torch.Generator(),
        )
        batch = next(iter(whole))
        return batch[0] if isinstance(batch, tuple | list) else batch
