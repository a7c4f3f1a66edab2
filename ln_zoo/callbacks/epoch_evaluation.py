"""Metrics on entire sets after each epoch, for the curves of the paper's figures."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ln_zoo.callbacks.evaluation_loop import data_module, score
from ln_zoo.norms import batch_dependent
from ln_zoo.utils.checks import check_at_least


class EpochEvaluation(Callback):
    """Evaluate the model on entire sets after each epoch and log the curves.

    Logs ``epoch_train_nll`` and ``epoch_train_error`` over the training set, ``epoch_test_*``, and
    ``epoch_seconds``, the wall time of the epoch without this evaluation. Test curves are for
    figures; nothing selects on them. Under batch-dependent norms, ``epoch_train_batch_*`` are the
    same over the training set with batch statistics; batches of one example are omitted. Sums are
    reduced over processes.

    The model must have ``per_example(batch) -> {name: (N,)}``; the data module
    ``train_eval_dataloader()`` and ``test_dataloader()``, which repeat no example.

    Args:
        sets: sets to evaluate, ``"train"`` and ``"test"``; default: both.
        every_n_epochs: evaluate after epochs n, 2n, ...
    """

    def __init__(self, sets: list[str] | None = None, every_n_epochs: int = 1) -> None:
        self.sets = ["train", "test"] if sets is None else sets
        unknown = set(self.sets) - {"train", "test"}
        if unknown:
            raise ValueError(f"sets must be some of 'train' and 'test', got {sorted(unknown)}")
        check_at_least(1, every_n_epochs=every_n_epochs)
        self.every_n_epochs = every_n_epochs
        self._started: float | None = None  # None outside epochs
        self._before = 0.0  # seconds of this epoch in an earlier process

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._data(trainer)  # fails early
        # A run resumed within an epoch does not call on_train_epoch_start.
        self._started = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = self._seconds()
        self._started, self._before = None, 0.0
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        data = self._data(trainer)
        logged = {"epoch_seconds": seconds}
        if "train" in self.sets:
            logged |= score(trainer, data.train_eval_dataloader(), "epoch_train")
            if batch_dependent(pl_module):
                logged |= score(trainer, data.train_eval_dataloader(), "epoch_train_batch", True)
        if "test" in self.sets:
            logged |= score(trainer, data.test_dataloader(), "epoch_test")
        # The values are equal on all processes; with sync_dist every rank can monitor them.
        pl_module.log_dict(logged, batch_size=1, sync_dist=True)

    def _seconds(self) -> float:
        now = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._before + now

    def _data(self, trainer: Trainer) -> Any:
        names = {"train": "train_eval_dataloader", "test": "test_dataloader"}
        return data_module(trainer, self, *(names[each] for each in self.sets))
