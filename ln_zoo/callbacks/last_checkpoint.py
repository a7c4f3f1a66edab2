"""Save ``last.ckpt`` every epoch, and on SIGINT or SIGTERM."""

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

from ln_zoo.callbacks.on_update import EveryUpdate
from ln_zoo.utils.signals import signal_handler

#: State of `ModelCheckpoint` that holds paths.
_PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")


class Interrupted(SystemExit):
    """A signal ended a run. The exit code is 128 plus the signal's number: 130 or 143.

    Args:
        number: number of the signal.
        checkpoint: the checkpoint to resume from, if any.
        on_all_processes: whether all processes stop at the same step.
    """

    def __init__(
        self, number: int, checkpoint: str | Path | None = None, on_all_processes: bool = False
    ) -> None:
        super().__init__(128 + number)
        self.number = number
        self.checkpoint = checkpoint
        self.on_all_processes = on_all_processes


class LastCheckpoint(EveryUpdate, ModelCheckpoint):
    """Replace ``last.ckpt`` after each epoch, and save it on SIGINT (Ctrl-C) or SIGTERM.

    After a signal, training stops with `Interrupted` at the end of the update, accumulation,
    validation or epoch end in progress, which cannot be resumed halfway. A resumed run continues
    with the next batch. A second Ctrl-C exits at once and keeps the previous checkpoint. All
    processes stop at the same step. Independent of a user's `ModelCheckpoint`, which under
    ``save_last`` writes only when its score improves; keeps no state in checkpoints.
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
        """No-op: the state of older checkpoints belongs to another run."""

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let each `ModelCheckpoint` keep its best checkpoints when their folder was moved.

        Lightning would forget them, because their paths differ.
        """
        for callback in trainer.checkpoint_callbacks:
            state = checkpoint["callbacks"].get(callback.state_key, {})
            if state.get("best_model_path") and (folder := getattr(callback, "dirpath", None)):
                moved = {a: _moved_to(folder, state[a]) for a in _PATHS if a in state}
                if Path(moved["best_model_path"]).is_file():
                    scores = state.get("best_k_models", {}).items()
                    best = {_moved_to(folder, a): score for a, score in scores}
                    state |= {**moved, "best_k_models": best, "dirpath": folder}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._signal, self._resumed = 0, trainer.ckpt_path
        loop = trainer.fit_loop
        if loop.restarted_on_epoch_end:
            # With max_steps, Lightning would train one more batch of the completed epoch and skip
            # an epoch.
            _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]
            loop.update_restart_stage()
            loop.epoch_progress.increment_completed()
        # Replaces Lightning's handler, which waits for other processes.
        self._handlers.enter_context(signal_handler(self._receive))

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        # A run resumed here would skip the validation or epoch end that is due.
        due = loop.batch_progress.is_last_batch or loop._should_check_val_fx(fetcher)
        if not due and (number := self._received(trainer)):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self._stop(number)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        if number := self._received(trainer):
            self._stop(number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if number := self._received(trainer):
            self._stop(number)
        self._restore()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; a second SIGINT exits. Some programs send SIGTERM twice."""
        if self._signal and number == signal.SIGINT:
            self._restore()
            raise Interrupted(number, self.newest())
        if not self._signal and number == signal.SIGINT:
            rank_zero_info("\nstopping after this update; Ctrl-C again stops at once")
        self._signal = self._signal or number

    def _received(self, trainer: Trainer) -> int:
        if trainer.world_size == 1:
            return self._signal
        received = torch.tensor(self._signal, device=trainer.strategy.root_device)
        return int(trainer.strategy.reduce(received, reduce_op="max"))

    def _stop(self, number: int) -> None:
        self._restore()
        raise Interrupted(number, self.newest(), on_all_processes=True)

    def newest(self) -> str | Path | None:
        """Path of ``last.ckpt``, or of the checkpoint that the run was resumed from."""
        written = Path(self.best_model_path)
        return written if written.is_file() else self._resumed

    def _restore(self) -> None:
        self._handlers.close()


def _moved_to(folder: str, path: str) -> str:
    return path and str(Path(folder, Path(path).name))
