"""A hook after each update."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class EveryUpdate(Callback):
    """Call `on_update` after each update; with accumulated gradients not every batch is one."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._updates = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.global_step != self._updates:
            self._updates = trainer.global_step
            self.on_update(trainer, batch_idx)

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        """Called after update number ``trainer.global_step``."""
        raise NotImplementedError
