"""Whole-set metrics after each epoch: the curves of the paper's figures."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ln_zoo.callbacks.whole_set import data_module, score
from ln_zoo.norms import batch_dependent


class EpochEvaluation(Callback):
    """Scores the model on whole sets in evaluation mode after each epoch, and logs the curves.

    Logs ``epoch_train_nll`` and ``epoch_train_error`` over the whole training set (as Figure 6 must
    do: its values reach 1e-7), ``epoch_test_*``, and ``epoch_seconds``, the wall time
    since the epoch began: training with all that happens within it, validation and the scoring of
    `StepEvaluation` too, but not the scoring here. Test curves are for figures: nothing selects on
    them. Where the norm is batch-dependent (batch norm) the training set is scored a second
    time with the statistics of each batch in place of the running averages, as
    ``epoch_train_batch_*``; a batch of a single example has no such statistics and is left out
    there, and if all are of a single example, so are these names. Modes, running averages and
    random numbers are put back.

    With several processes each scores its share, and the sums are added up: the numbers are those
    of one process.

    The model must have ``per_example(batch) -> {name: (N,)}``; the data module
    ``train_eval_dataloader()`` and ``test_dataloader()``, whose loaders repeat no example.

    Args:
        sets: which sets to score: ``"train"``, ``"test"``. Default: both.
        every_n_epochs: score after epochs n, 2n, ...

    Raises:
        ValueError: for an unknown set, or ``every_n_epochs`` below 1; when training begins, without
            a data module of that kind.
    """

    def __init__(self, sets: list[str] | None = None, every_n_epochs: int = 1) -> None:
        self.sets = ["train", "test"] if sets is None else sets
        unknown = set(self.sets) - {"train", "test"}
        if unknown:
            raise ValueError(f"sets may hold 'train' and 'test', got {sorted(unknown)}")
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        self.every_n_epochs = every_n_epochs
        self._started: float | None = None  # None between epochs
        self._before = 0.0  # seconds of this epoch before the run was resumed within it

    def state_dict(self) -> dict[str, float]:
        return {"seconds": self._seconds()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._before = state_dict["seconds"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._data(trainer)  # if there is none, now and not after an epoch
        # A run that is resumed within an epoch does not start one.
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
        # The scores are those of all processes already, and their mean is the same number; without
        # the exchange Lightning would warn, and with rank 0 alone no callback could monitor them.
        pl_module.log_dict(logged, batch_size=1, sync_dist=True)

    def _seconds(self) -> float:
        """Wall time since the epoch began, in all processes that have worked on it."""
        now = 0.0 if self._started is None else time.perf_counter() - self._started
        return self._before + now

    def _data(self, trainer: Trainer) -> Any:
        names = {"train": "train_eval_dataloader", "test": "test_dataloader"}
        return data_module(trainer, self, *(names[each] for each in self.sets))
