"""Binarized images without labels, and ways to binarize them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from math import prod, sqrt
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.images.dataset import ImageData
from ln_zoo.data.loading import BatchSet, DistributedBatches, rows, subset
from ln_zoo.utils.checks import check_at_least, check_choice

Binarization = Literal["fixed", "dynamic", "threshold", "grey"]
Images = tuple[Tensor]

SETS = ("train", "val", "test")
_STRETCH = 1 << 32  # stride in the random stream between images; larger than any image needs


class ImageSet(BatchSet, ABC):
    """N images in rows, as batches ``(images,)``: float32 (B, C, H, W) in [0, 1]."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.numbers = np.arange(len(rows))

    @property
    def batches(self) -> type[DistributedBatches]:
        return ImageBatches

    def pick(self, indices: Sequence[int] | np.ndarray) -> ImageSet:
        part = copy(self)
        part.numbers = self.numbers[np.asarray(indices, np.int64)]
        return part

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Tensor) -> Images:
        return (torch.from_numpy(self.images(self.numbers[rows(index)])),)

    @abstractmethod
    def images(self, numbers: np.ndarray) -> np.ndarray:
        """The images of some rows, float32 (B, C, H, W)."""


class PackedImages(ImageSet):
    """Binary images of a shape (C, H, W), rows packed by ``numpy.packbits``."""

    def __init__(self, rows: np.ndarray, shape: tuple[int, int, int]) -> None:
        super().__init__(rows)
        self.shape = shape

    @classmethod
    def pack(cls, images: np.ndarray) -> PackedImages:
        channels, height, width = images.shape[1:]
        rows = np.packbits(images.reshape(len(images), -1), axis=1)
        return cls(rows, (channels, height, width))

    def images(self, numbers: np.ndarray) -> np.ndarray:
        pixels = np.unpackbits(self.rows[numbers], axis=1, count=prod(self.shape))
        return pixels.reshape(-1, *self.shape).astype(np.float32)


class GreyImages(ImageSet):
    """Grey levels, uint8 (N, C, H, W), as probabilities level / ``scale``."""

    def __init__(self, rows: np.ndarray, scale: int) -> None:
        super().__init__(rows)
        self.scale = scale

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows[numbers].astype(np.float32) / np.float32(self.scale)


class ResampledImages(ImageSet):
    """Bernoulli samples of grey levels, uint8 (N, C, H, W), with probabilities level / ``scale``.

    Training samples each image in each epoch, evaluation uses one sample. A sample depends only on
    the seed, the set (``stream``), the epoch and the row of the image.
    """

    def __init__(self, rows: np.ndarray, scale: int, binarization_seed: int, stream: int) -> None:
        super().__init__(rows)
        self.scale = scale
        self.binarization_seed = binarization_seed
        self.stream = stream

    @property
    def batches(self) -> type[DistributedBatches]:
        return DrawnBatches

    def __getitem__(self, index: Tensor | tuple[Tensor, int]) -> Images:
        """A batch of sample n, from 1, or of the sample for evaluation."""
        indices, draw = index if isinstance(index, tuple) else (index, 0)
        return (torch.from_numpy(self.images(self.numbers[rows(indices)], draw)),)

    def images(self, numbers: np.ndarray, draw: int = 0) -> np.ndarray:
        grey = self.rows[numbers]
        bits = np.random.Philox(np.random.SeedSequence((self.binarization_seed, self.stream, draw)))
        rng, start = np.random.Generator(bits), bits.state
        uniform = np.empty(grey.shape, np.float32)
        for place, number in enumerate(numbers.tolist()):
            # Each row has its own section of the random stream.
            bits.state = start
            bits.advance(number * _STRETCH)
            rng.random(dtype=np.float32, out=uniform[place])
        return (self.scale * uniform < grey).astype(np.float32)


class ImageBatches(DistributedBatches):
    """Batches of images; in evaluation each is spread over the set, which may be sorted."""

    def permutation(self, n: int, *stream: int) -> Tensor:
        return (
            super().permutation(n, *stream) if self.shuffle else torch.from_numpy(golden_order(n))
        )


class DrawnBatches(ImageBatches):
    """Batches of `ResampledImages`: indices, in training with the number of the sample."""

    dataset: ResampledImages

    def __iter__(self) -> Iterator[Any]:
        for indices in super().__iter__():
            yield (indices, self.epoch + 1) if self.training else indices

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"binarization_seed": self.dataset.binarization_seed}


def golden_order(n: int) -> np.ndarray:
    """A permutation of 0 to n - 1 whose prefixes are spread evenly, int64 (Slater 1967)."""
    return np.argsort(np.arange(n) * ((sqrt(5) - 1) / 2) % 1)


class BinarizedImageData(ImageData, ABC):
    """Binary images of one shape, for models of their likelihood.

    A batch is ``(images,)``: float32 (N, C, H, W) of 0 and 1, in [0, 1] with
    ``binarization="grey"``. A subclass states its name and the attributes below and implements
    `read`. Evaluation is in an order spread over the set, prediction in the order of the file.

    The binarization changes a likelihood by several nats, so tables list all but ``fixed`` under
    another name:

    * ``fixed``: each pixel sampled once.
    * ``dynamic``: sampled in each epoch of training, with the grey level as probability; evaluation
      uses one sample, the same for every epoch, model and run.
    * ``threshold``: 1 above half of the highest grey level.
    * ``grey``: the grey levels as probabilities.

    Args:
        binarization: ``fixed``, ``dynamic``, ``threshold`` or ``grey``.
        binarization_seed: seed of the samples.
    """

    batch_kind = "images"
    _sets: dict[str, ImageSet]

    def __init__(
        self,
        batch_size: int,
        train_size: int,
        val_size: int,
        binarization: Binarization = "fixed",
        binarization_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, train_size, val_size, **options)
        check_choice("binarization", binarization, get_args(Binarization))
        check_at_least(0, binarization_seed=binarization_seed)
        self.binarization = binarization
        self.binarization_seed = binarization_seed
        if binarization != "fixed":
            self.name = f"{self.name}-{binarization}"

    @abstractmethod
    def read(self) -> dict[str, ImageSet]:
        """Read the three sets by name."""

    @property
    def resampled(self) -> bool:
        """Whether the images depend on ``binarization_seed``."""
        return self.binarization in ("fixed", "dynamic")

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {"binarization": self.binarization} | super().preprocessing

    @property
    def metadata(self) -> dict[str, Any]:
        seed = {"binarization_seed": self.binarization_seed} if self.resampled else {}
        return super().metadata | {"binarization": self.binarization} | seed

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            self._sets = self.read()

    def training_set(self) -> ImageSet:
        return self._set("train")

    def evaluation_set(self, name: str, examples: int | None = None) -> ImageSet:
        return subset(self._set(name), examples)

    def binarize(self, grey: Mapping[str, np.ndarray]) -> dict[str, ImageSet]:
        """Binarize the three sets of grey images, uint8 (N, C, H, W) up to ``scale``."""
        return {name: self._binarized(grey[name], stream) for stream, name in enumerate(SETS)}

    def _binarized(self, grey: np.ndarray, stream: int) -> ImageSet:
        if self.binarization == "grey":
            return GreyImages(grey, self.scale)
        if self.binarization == "threshold":
            return PackedImages.pack(grey > self.scale / 2)
        drawn = ResampledImages(grey, self.scale, self.binarization_seed, stream)
        if self.binarization == "dynamic":
            return drawn
        return PackedImages.pack(drawn.images(drawn.numbers) > 0)
