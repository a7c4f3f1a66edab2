"""What checkpoints of a LightningModule that is no `ZooModule` store, so that commands find it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from ln_zoo.callbacks import Normalize
from ln_zoo.models.base import RUNS, ZooModule
from ln_zoo.models.run_counter import RunCounter
from ln_zoo.norms import to_config


class StoreModule(Callback):
    """Store class and arguments of a module, and the training runs behind its weights.

    Args:
        class_path: import path of the class.
        init_args: arguments of the class, as plain data.
    """

    def __init__(self, class_path: str, init_args: dict[str, Any]) -> None:
        self._stored = {**init_args, "_class_path": class_path}
        self._counter = RunCounter()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._counter = RunCounter.restored(checkpoint.get(RUNS))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path is None:  # those of --weights
            self._counter = RunCounter(getattr(pl_module, "training_runs", ()))
        self._counter.begin(trainer, trainer.ckpt_path is not None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counter.end(trainer)
        pl_module.__dict__["training_runs"] = self._counter.runs(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning's own, if the module calls save_hyperparameters.
        own = checkpoint.get("hyper_parameters") or {}
        checkpoint["hyper_parameters"] = self._stored | own
        checkpoint[RUNS] = self._counter.stored(trainer)


def is_late(module: LightningModule) -> bool:
    """Whether a module may make its layers after ``__init__``."""
    hooks = () if isinstance(module, ZooModule) else ("setup", "configure_model")
    return any(is_overridden(hook, module) for hook in hooks)


def norm_of(module: LightningModule, callbacks: Sequence[Callback] = ()) -> dict[str, Any]:
    """The norm as plain data: the module's argument, or that of `Normalize`; empty without one."""
    own = module.hparams.get("norm")
    if isinstance(own, dict) and "class_path" in own:
        return own
    return next((to_config(c.norm) for c in callbacks if isinstance(c, Normalize)), {})
