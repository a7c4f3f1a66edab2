"""What every data module of the zoo shares: three sets, and the loaders over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from ln_zoo.data.loading import BatchLoader, ResumableLoader, check_at_least, whole_batch


class ZooDataModule(LightningDataModule, ABC):
    """Sets ``"train"``, ``"val"`` and ``"test"``, of which loaders give whole batches.

    Training continues within an epoch after an interruption; evaluation scores each example once,
    on any number of processes. A dataset keeps its sets in ``_sets`` at `setup`, and says what of
    them is seen in training (`training_set`) and in evaluation (`evaluation_set`).

    Args:
        batch_size: training examples per step of one process.
        seed: seed of the order of training examples.
        eval_batch_size: examples per batch in evaluation.
        num_workers: processes that fetch batches.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` examples. A last
            training batch of a single example is always left out.

    Raises:
        ValueError: an empty batch, a negative seed or number of workers.
    """

    name: str

    def __init__(
        self,
        batch_size: int,
        seed: int,
        eval_batch_size: int,
        num_workers: int,
        pin_memory: bool,
        drop_last: bool,
    ) -> None:
        super().__init__()
        check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_at_least(0, seed=seed, num_workers=num_workers)
        self.batch_size = batch_size
        self.seed = seed
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.drop_last = drop_last
        self._sets: dict[str, Any] = {}

    @abstractmethod
    def training_set(self) -> Dataset:
        """The training examples as training sees them."""

    @abstractmethod
    def evaluation_set(self, name: str, examples: int | None = None) -> Dataset:
        """A set as evaluation sees it, in its own order.

        Args:
            name: ``"train"``, ``"val"`` or ``"test"``.
            examples: how many of the examples; default: all.
        """

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.training_set(),
            self.batch_size,
            training=True,
            shuffle=True,
            seed=self.seed,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def train_eval_dataloader(
        self, batch_size: int | None = None, examples: int | None = None
    ) -> BatchLoader:
        """The training set as in evaluation, or part of it.

        Args:
            batch_size: of the batches; default: that of evaluation.
            examples: how many of the examples; which, `evaluation_set` says; default: all.
        """
        return self._evaluation_loader("train", batch_size, examples)

    def val_eval_dataloader(
        self, batch_size: int | None = None, examples: int | None = None
    ) -> BatchLoader:
        """The validation set, or part of it; arguments as for the training set."""
        return self._evaluation_loader("val", batch_size, examples)

    def val_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The test set in its own order; a plain loader, as Lightning then tells prediction writers
        the indices.
        """
        return DataLoader(
            self.evaluation_set("test"),
            batch_size=self.eval_batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            collate_fn=whole_batch,
            generator=torch.Generator(),
        )

    def _evaluation_loader(
        self, name: str, batch_size: int | None = None, examples: int | None = None
    ) -> BatchLoader:
        return BatchLoader(
            self.evaluation_set(name, examples),
            self.eval_batch_size if batch_size is None else batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def _set(self, name: str) -> Any:
        if not self._sets:
            raise RuntimeError("the data are not read yet: call prepare_data() and setup() first")
        return self._sets[name]
