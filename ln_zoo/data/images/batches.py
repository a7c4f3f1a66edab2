"""Sets and batches of binary and grey images without labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from math import prod, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.loading import BatchSet, DistributedBatches, rows

Images = tuple[Tensor]

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
