"""Keeps the newest state of a run, also of one that is told to stop."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import rank_zero_info

from ln_zoo.callbacks.updates import UpdateCallback
from ln_zoo.signals import handling


class Interrupted(SystemExit):
    """A signal ended a run. Its exit code is 128 plus the signal's number: 130 or 143.

    Args:
        number: of the signal.
        checkpoint: the state to go on from, if one was written.
        agreed: whether all processes of the run stop at the same step.
    """

    def __init__(
        self, number: int, checkpoint: str | Path | None = None, agreed: bool = False
    ) -> None:
        super().__init__(128 + number)
        self.number = number
        self.checkpoint = checkpoint
        self.agreed = agreed


class LastCheckpoint(UpdateCallback, ModelCheckpoint):
    """Writes ``last.ckpt`` after each epoch, in place of the one before, and when told to stop.

    At Ctrl-C (SIGINT) or SIGTERM training stops after the update under way: ``last.ckpt`` then
    holds that step, and a run that goes on from there sees the batches that were left. Gradients
    that are being accumulated are completed first. Validation, and what else is due at the end of
    an epoch, is completed too, since none of it can be resumed halfway; a second Ctrl-C does not
    wait, and leaves the checkpoint before. With several processes all stop at the same step,
    whichever had the signal.

    Apart from a user's own `ModelCheckpoint`: with ``save_last`` that one writes ``last.ckpt`` only
    when its monitored score improves, and a resumed run would fall back to that epoch. It keeps no
    state in checkpoints: a resumed run writes to a folder of its own.

    Raises:
        Interrupted: in training, after a signal. It ends the process without a traceback.
    """

    def __init__(self) -> None:
        super().__init__(
            filename="last", save_on_train_epoch_end=True, enable_version_counter=False
        )
        self._signal = 0
        self._resumed: str | Path | None = None
        self._handlers = contextlib.ExitStack()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing: checkpoints written before hold what another run had."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._signal, self._resumed = 0, trainer.ckpt_path
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            # That epoch is over. With max_steps Lightning would go back into it, train one batch
            # more, and begin the next epoch but one; without, it goes on as here.
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
            loop.update_restart_stage()
            loop.epoch_progress.increment_completed()
        # In place of Lightning's own, which waits for the other processes within the handler.
        self._handlers.enter_context(handling(self._receive))

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        # A run that goes on from here would leave out what is due between this batch and the next.
        due = loop.batch_progress.is_last_batch or loop._should_check_val_fx(fetcher)
        if not due and (number := self._told(trainer)):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self._stop(number)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if number := self._told(trainer):
            self._stop(number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if number := self._told(trainer):
            self._stop(number)
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal. Some programs send SIGTERM twice; Ctrl-C twice is a person who waits."""
        if self._signal and number == signal.SIGINT:
            self._restore()
            raise Interrupted(number, self.newest())
        if not self._signal and number == signal.SIGINT:
            rank_zero_info("\nstopping after this update; Ctrl-C again stops at once")
        self._signal = self._signal or number

    def _told(self, trainer: Trainer) -> int:
        """The signal that one of the processes had, else 0."""
        if trainer.world_size == 1:
            return self._signal
        told = torch.tensor(self._signal, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(told, reduce_op="max"))

    def _stop(self, number: int) -> None:
        self._restore()
        raise Interrupted(number, self.newest(), agreed=True)

    def newest(self) -> str | Path | None:
        """Where the newest state lies: in ``last.ckpt``, or where the run was resumed from."""
        written = Path(self.best_model_path)
        return written if written.is_file() else self._resumed

    def _restore(self) -> None:
        self._handlers.close()
