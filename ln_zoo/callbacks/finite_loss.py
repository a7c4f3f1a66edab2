"""Stops training at the first loss that is not a number."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor


class NonFiniteLossError(ArithmeticError):
    """The training loss became NaN or infinite."""


class FiniteLoss(Callback):
    """Raises `NonFiniteLossError` before a NaN or infinite loss reaches the weights.

    The message names the step and the newest checkpoint, which was written before the loss went
    wrong and is left alone.

    Args:
        every_n_steps: how often to look. A look waits for the device: on a GPU a larger number
            keeps its queue full, and a checkpoint is still never written after a bad loss.

    Raises:
        NonFiniteLossError: from `on_before_backward` or `on_save_checkpoint`.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._first_bad: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_bad = torch.full((), -1, device=pl_module.device)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        assert self._first_bad is not None
        bad = ~torch.isfinite(loss.detach()).all() & (self._first_bad < 0)
        self._first_bad.masked_fill_(bad, trainer.global_step)
        if trainer.global_step % self.every_n_steps == 0:
            self._look(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        step = -1 if self._first_bad is None else int(self._first_bad)
        if step < 0:
            return
        saved = [
            path
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(callback, Checkpoint)
            for path in (
                getattr(callback, "last_model_path", ""),
                getattr(callback, "best_model_path", ""),
            )
            if path
        ]
        kept = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was written yet"
        raise NonFiniteLossError(
            f"the training loss is not finite at step {step} (epoch {trainer.current_epoch}); "
            f"training stopped before the weights took it, and {kept}. Try a smaller learning "
            "rate, --trainer.gradient_clip_val, or --trainer.precision 32-true"
        )
