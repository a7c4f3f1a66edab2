"""Stop training at the first non-finite loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from ln_zoo.utils.checks import check_at_least

_NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(ArithmeticError):
    """The training loss or a weight is NaN or infinite."""


class FiniteLoss(Callback):
    """Raise `NonFiniteLossError` before a non-finite loss changes the weights.

    The message names the step and the newest checkpoint, which precedes the loss: no checkpoint is
    written after it, or with non-finite weights. All processes stop at the same step.

    Args:
        every_n_steps: steps between checks. Each check synchronises the device and all processes.
            With a number above 1 the weights may change before training stops, and a checkpoint
            with ``save_weights_only`` may contain them.
    """

    def __init__(self, every_n_steps: int = 1) -> None:
        check_at_least(1, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._first_bad: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_bad = torch.full((), _NEVER, device=pl_module.device)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        assert self._first_bad is not None
        bad = ~torch.isfinite(loss.detach()).all() & (self._first_bad == _NEVER)
        self._first_bad.masked_fill_(bad, trainer.global_step)
        if trainer.global_step % self.every_n_steps == 0:
            self._check(trainer)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._check(trainer)
        # A finite loss can have an infinite gradient.
        for name, value in checkpoint["state_dict"].items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                self._stop(trainer, f"{name} is not finite after step {trainer.global_step - 1}")

    def _check(self, trainer: Trainer) -> None:
        if self._first_bad is None:
            return
        step = int(trainer.strategy.reduce(self._first_bad.clone(), reduce_op="min"))
        if step != _NEVER:
            self._first_bad.fill_(step)
            self._stop(trainer, f"the training loss is not finite at step {step}")

    def _stop(self, trainer: Trainer, what: str) -> None:
        raise NonFiniteLossError(
            f"{what} (epoch {trainer.current_epoch}): training stopped, and {_kept(trainer)}. Try "
            "a smaller learning rate, --trainer.gradient_clip_val, or --trainer.precision 32-true"
        )


def _kept(trainer: Trainer) -> str:
    saved = [
        Path(path)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, Checkpoint)
        for name in ("last_model_path", "best_model_path")
        if (path := getattr(callback, name, ""))
    ]
    saved = [path for path in saved if path.is_file()]
    if not saved:
        return "no checkpoint was written yet"
    return f"the last good checkpoint is {max(saved, key=lambda path: path.stat().st_mtime_ns)}"
