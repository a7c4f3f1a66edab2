"""What the data modules of classified images share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import Tensors, check_at_least


class ImageClassificationData(ZooDataModule, ABC):
    """Images of one shape with labels 0 to K - 1, held in memory as uint8.

    A batch is (images, labels): float32 (N, C, H, W) in [0, 1] and int64 (N,). A dataset states its
    name, its facts below and where its three sets come from (`read`).

    Args:
        batch_size: training examples per step of one process.
        train_size: number of training images.
        val_size: number of validation images, held out of the training images of the source.
        seed: seed of the order of training examples; the splits do not depend on it.
        eval_batch_size: images per batch in evaluation; changes no result but those that use batch
            statistics, under batch-dependent norms: ``val_batch_*``, ``epoch_train_batch_*``
            and what `ln_zoo.callbacks.PopulationStatistics` estimates.
        num_workers: processes that fetch batches; the data are in memory, 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` examples. A last
            training batch of a single example is always left out, for batch norm's sake.

    Raises:
        ValueError: an empty batch or split, a negative seed or number of workers, or splits that
            would overlap.
    """

    #: What a batch holds, for models that say what they take.
    gives: ClassVar[str] = "labelled images"
    num_classes: ClassVar[int]
    image_shape: tuple[int, int, int]
    scale: int
    """The pixel value that becomes 1.0."""
    source_size: ClassVar[int]
    """Number of images of the source from which training and validation are taken."""
    test_size: ClassVar[int]
    _sets: dict[str, Tensors]

    def __init__(
        self,
        batch_size: int,
        train_size: int,
        val_size: int,
        seed: int = 0,
        eval_batch_size: int = 1000,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, eval_batch_size, num_workers, pin_memory, drop_last)
        check_at_least(1, train_size=train_size, val_size=val_size)
        self.train_size = train_size
        self.val_size = val_size
        self._check_split(self.source_size)

    @property
    def in_features(self) -> int:
        """Number of inputs of a flattened image, I = C H W."""
        return prod(self.image_shape)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What an image goes through before the model, as plain data."""
        return {"scale": self.scale, "image_shape": list(self.image_shape)}

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        test_size = len(self._sets["test"]) if self._sets else self.test_size
        return {
            "dataset": self.name,
            "train_size": self.train_size,
            "val_size": self.val_size,
            "test_size": test_size,
            "batch_size": self.batch_size,
            "eval_batch_size": self.eval_batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    @abstractmethod
    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Reads the sets ``"train"``, ``"val"`` and ``"test"`` that `prepare_data` made available.

        Returns:
            Images, uint8 (N, C, H, W), and labels, int64 (N,), of each set.
        """

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            sets = self.read()
            self._sets = {
                name: Tensors(images, labels, self.scale) for name, (images, labels) in sets.items()
            }

    def training_set(self) -> Tensors:
        return self._set("train")

    def evaluation_set(self, name: str, examples: int | None = None) -> Tensors:
        """A set in order, or its first examples."""
        whole = self._set(name)
        return Tensors(whole.inputs[:examples], whole.labels[:examples], whole.scale)

    def _check_split(self, available: int) -> None:
        if self.train_size + self.val_size > available:
            raise ValueError(
                f"train_size {self.train_size} + val_size {self.val_size} exceed the {available} "
                f"images of {self.name} that are not test images: lower one of them"
            )
