"""Classified images in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import Any, ClassVar

from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import Tensors
from ln_zoo.utils.checks import check_at_least


class ImageData(ZooDataModule, ABC):
    """Images of one shape.

    Args:
        train_size: number of training images.
        val_size: number of validation images.
    """

    image_shape: tuple[int, int, int]
    scale: int
    """The pixel value that becomes 1.0."""
    test_size: int

    def __init__(self, batch_size: int, train_size: int, val_size: int, **options: Any) -> None:
        super().__init__(batch_size, **options)
        check_at_least(1, train_size=train_size, val_size=val_size)
        self.train_size = train_size
        self.val_size = val_size

    @property
    def in_features(self) -> int:
        """Number of inputs of a flattened image, I = C H W."""
        return prod(self.image_shape)

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {"scale": self.scale, "image_shape": list(self.image_shape)}

    @property
    def metadata(self) -> dict[str, Any]:
        test_size = len(self._sets["test"]) if self._sets else self.test_size
        return super().metadata | {
            "train_size": self.train_size,
            "val_size": self.val_size,
            "test_size": test_size,
            "eval_batch_size": self.eval_batch_size,
        }


class ImageClassificationData(ImageData, ABC):
    """Images of one shape with labels 0 to K - 1, in memory as uint8.

    A batch is (images, labels): float32 (N, C, H, W) in [0, 1] and int64 (N,). A subclass states
    its name and the attributes below and implements `read`.

    Args:
        val_size: number of validation images, held out of the training images of the source.
        eval_batch_size: images per batch in evaluation; changes results only under norms that use
            batch statistics: ``val_batch_*``, ``epoch_train_batch_*`` and the estimates of
            `ln_zoo.callbacks.PopulationStatistics`.
    """

    batch_kind = "labelled images"
    num_classes: ClassVar[int]
    source_size: ClassVar[int]
    """Number of images for training and validation."""
    _sets: dict[str, Tensors]

    def __init__(
        self,
        batch_size: int,
        train_size: int,
        val_size: int,
        eval_batch_size: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size, train_size, val_size, eval_batch_size=eval_batch_size, **options
        )
        self._check_split(self.source_size)

    @abstractmethod
    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Read the three sets by name: images, uint8 (N, C, H, W), and labels, int64 (N,)."""

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            sets = self.read()
            self._sets = {
                name: Tensors(images, labels, self.scale) for name, (images, labels) in sets.items()
            }

    def training_set(self) -> Tensors:
        return self._set("train")

    def evaluation_set(self, name: str, examples: int | None = None) -> Tensors:
        whole = self._set(name)
        return Tensors(whole.inputs[:examples], whole.labels[:examples], whole.scale)

    def _check_split(self, available: int) -> None:
        if self.train_size + self.val_size > available:
            raise ValueError(
                f"train_size {self.train_size} + val_size {self.val_size} exceed the {available} "
                f"images of {self.name} that are not test images: lower one of them"
            )
