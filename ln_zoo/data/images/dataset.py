"""Data modules of labelled images."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.folders import local_folder
from ln_zoo.data.images.digits import load_digits, stratified_split
from ln_zoo.data.images.files import LocalImages, load_from_hub, to_arrays
from ln_zoo.data.loading import Tensors
from ln_zoo.utils.checks import check_at_least

#: Side of an original image of `Digits`, pixels.
DIGIT_SIDE = 8
#: Grey levels of enlarged digits: 15 times the original 16, for interpolation.
ENLARGED_SCALE = 240
#: Suffix of the names of datasets with other images in the published format.
UNPUBLISHED = "-unpublished"

_BOX = 5 / 7  # side of an enlarged digit relative to the image, 20 / 28 as in MNIST
#: SHA-256 of MNIST's published labels of each set, one byte each.
_LABELS = {
    "train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}


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


class Digits(ImageClassificationData):
    """The 1,797 handwritten digits of scikit-learn, grey levels 0 to 16, 8 x 8 pixels; shipped.

    They are the test part of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin and
    Kaynak, 1998). The 300 test images are fixed; every split is stratified. With ``image_size=28``
    they have MNIST's shape: enlarged (bilinear) to 20 x 20 in the centre, grey levels 0 to 240;
    tables list this version under another name.

    Args:
        image_size: side of an image, pixels: 8 for the original, or more; a digit fills 5/7 of it.

    Example:
        >>> data = Digits(batch_size=32)
        >>> data.setup()
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    name = "digits"
    num_classes = 10
    image_shape = (1, 8, 8)
    scale = 16
    source_size = 1497
    test_size = 300

    def __init__(
        self,
        batch_size: int = 32,
        train_size: int = 1297,
        val_size: int = 200,
        eval_batch_size: int = 100,
        image_size: int = DIGIT_SIDE,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size, train_size, val_size, eval_batch_size=eval_batch_size, **options
        )
        check_at_least(DIGIT_SIDE, image_size=image_size)
        if image_size != DIGIT_SIDE:
            self.name = f"{self.name}-{image_size}"
            self.image_shape = (1, image_size, image_size)
            self.scale = ENLARGED_SCALE
        if min(val_size, self.source_size - val_size) < self.num_classes:
            raise ValueError(
                f"val_size must leave at least {self.num_classes} images, one of each class, on "
                f"either side of the {self.source_size} images, got {val_size}"
            )

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        grey, numbers = load_digits()
        grey = grey[:, None]
        if self.image_shape[-1] != DIGIT_SIDE:
            grey = enlarge(grey, self.image_shape[-1])
        images = torch.from_numpy(grey)
        labels = torch.from_numpy(numbers.astype(np.int64))
        rest, test = stratified_split(numbers, self.test_size)
        train, val = stratified_split(numbers[rest], self.val_size)
        parts = {"train": rest[train][: self.train_size], "val": rest[val], "test": test}
        return {name: (images[part], labels[part]) for name, part in parts.items()}


def digit_size(side: int) -> int:
    """Side of the digit in an image, pixels."""
    return max(DIGIT_SIDE, round(_BOX * side))


def enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Enlarge digits (N, 1, 8, 8) of 16 levels to images uint8 (N, 1, side, side) of 240."""
    size = digit_size(side)
    levels = torch.from_numpy(images * np.uint8(ENLARGED_SCALE // 16)).double()
    digits = torch.nn.functional.interpolate(
        levels, (size, size), mode="bilinear", align_corners=False
    )
    before = (side - size) // 2
    after = side - size - before
    around = [(0, 0), (0, 0), (before, after), (before, after)]
    return np.pad(digits.round().to(torch.uint8).numpy(), around)


class MNIST(ImageClassificationData):
    """The 60,000 training and 10,000 test images of MNIST, 28 x 28 grey levels 0 to 255.

    Training takes the first ``train_size`` training images, validation the last ``val_size``:
    55,000/5,000/10,000 by default; 50,000/10,000/10,000 is also in use.

    ``root`` has the four IDX files (gzipped or not; ``train-images-idx3-ubyte`` or
    ``train-images.idx3-ubyte``), a ``DatasetDict`` written by ``save_to_disk``, or parquet files
    ``train*`` and ``test*`` with columns ``image`` (PNG or JPEG files as bytes, or uint8 lists) and
    ``label``. Tables list data with other labels, such as Fashion-MNIST, as ``mnist-unpublished``.

    Args:
        root: folder of a local copy; default: the folder ``mnist`` in ``$LN_ZOO_DATA``.
        repo_id: the dataset on the hub, used without a local copy.
    """

    name = "mnist"
    num_classes = 10
    image_shape = (1, 28, 28)
    scale = 255
    source_size = 60_000
    test_size = 10_000

    def __init__(
        self,
        root: str | None = None,
        repo_id: str = "ylecun/mnist",
        batch_size: int = 128,
        train_size: int = 55_000,
        val_size: int = 5_000,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, train_size, val_size, **options)
        self.repo_id = repo_id
        self._folder = local_folder(root, self.name)
        self.source = None if self._folder is None else LocalImages(self._folder)

    def prepare_data(self) -> None:
        if self.source is None:
            load_from_hub(self.repo_id)

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self.source is None:
            where, source = self.repo_id, to_arrays(load_from_hub(self.repo_id), self.repo_id)
        else:
            where, source = str(self.source.root), self.source.load()
        sets = {name: self._tensors(*source[name], f"{name} set of {where}") for name in source}
        images, labels = sets["train"]
        published = {name: _digest(sets[name][1]) for name in _LABELS} == _LABELS
        self.name = MNIST.name if published else f"{MNIST.name}{UNPUBLISHED}"
        self._check_split(len(labels))
        start = len(labels) - self.val_size
        return {
            "train": (images[: self.train_size], labels[: self.train_size]),
            "val": (images[start:], labels[start:]),
            "test": sets["test"],
        }

    def _tensors(self, images: np.ndarray, labels: np.ndarray, where: str) -> tuple[Tensor, Tensor]:
        if images.shape[1:] != self.image_shape[1:]:
            raise ValueError(
                f"{where}: images of {images.shape[1:]} pixels, expected {self.image_shape[1:]}"
            )
        unknown = set(np.unique(labels).tolist()) - set(range(self.num_classes))
        if unknown:
            raise ValueError(
                f"{where}: labels {sorted(unknown)}, expected 0 to {self.num_classes - 1}"
            )
        return torch.from_numpy(images)[:, None], torch.from_numpy(labels)


def _digest(labels: Tensor) -> str:
    return hashlib.sha256(labels.numpy().astype(np.uint8).tobytes()).hexdigest()
