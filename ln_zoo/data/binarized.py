"""What the data modules of binarized images share: sets without labels, and how they are drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from math import prod, sqrt
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import (
    DistributedBatches,
    check_at_least,
    check_choice,
    evenly_spaced,
)

Binarization = Literal["fixed", "dynamic", "threshold", "grey"]
Images = tuple[Tensor]

SETS = ("train", "val", "test")
_STRETCH = 1 << 32
"""Random numbers between those of one image and of the next, more than an image takes."""


class ImageSet(Dataset[Images], ABC):
    """N images without labels, indexed by a tensor of indices.

    A batch is a tuple of one tensor, float32 (B, C, H, W) in [0, 1].

    Args:
        rows: the images as they are stored, one a row; may be mapped from a file.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.numbers = np.arange(len(rows))

    @property
    def batches(self) -> type[DistributedBatches]:
        """How `BatchLoader` takes batches."""
        return ImageBatches

    def pick(self, indices: Sequence[int] | np.ndarray) -> ImageSet:
        """Some of the images, in the order given; what is stored is shared."""
        part = copy(self)
        part.numbers = self.numbers[np.asarray(indices, np.int64)]
        return part

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Tensor) -> Images:
        return (torch.from_numpy(self.images(self._numbers(index))),)

    def __getitems__(self, indices: list[int]) -> Images:
        """One batch for a list of indices: what a ``DataLoader`` with a batch size asks for."""
        return self[torch.tensor(indices)]

    @abstractmethod
    def images(self, numbers: np.ndarray) -> np.ndarray:
        """The images of some rows, float32 (B, C, H, W)."""

    def _numbers(self, index: Any) -> np.ndarray:
        """The rows that a tensor of indices, or a single index, stands for."""
        return self.numbers[np.asarray(index).reshape(-1)]


class PackedImages(ImageSet):
    """Binary images, eight pixels to a byte.

    Args:
        rows: uint8 (N, ceil(C H W / 8)), as ``numpy.packbits`` packs the pixels of an image.
        shape: (C, H, W) of an image.

    Example:
        >>> data = PackedImages.pack(np.eye(4).reshape(2, 1, 2, 4) > 0)
        >>> data.rows.tolist(), data[torch.tensor([1])]
        ([[132], [33]], (tensor([[[[0., 0., 1., 0.],
                                   [0., 0., 0., 1.]]]]),))
    """

    def __init__(self, rows: np.ndarray, shape: tuple[int, int, int]) -> None:
        super().__init__(rows)
        self.shape = shape

    @classmethod
    def pack(cls, images: np.ndarray) -> PackedImages:
        """Packs images, bool (N, C, H, W)."""
        channels, height, width = images.shape[1:]
        rows = np.packbits(images.reshape(len(images), -1), axis=1)
        return cls(rows, (channels, height, width))

    def images(self, numbers: np.ndarray) -> np.ndarray:
        pixels = np.unpackbits(self.rows[numbers], axis=1, count=prod(self.shape))
        return pixels.reshape(-1, *self.shape).astype(np.float32)


class GreyImages(ImageSet):
    """Grey levels as probabilities.

    Args:
        rows: uint8 (N, C, H, W).
        scale: the level that becomes 1.0.
    """

    def __init__(self, rows: np.ndarray, scale: int) -> None:
        super().__init__(rows)
        self.scale = scale

    def images(self, numbers: np.ndarray) -> np.ndarray:
        return self.rows[numbers].astype(np.float32) / np.float32(self.scale)


class ResampledImages(ImageSet):
    """Binary images, each pixel a Bernoulli variable with its grey level as probability.

    Training draws every image anew in every epoch, evaluation always takes the same draw. A draw
    depends on the seed, the set, the epoch and the row of the image only: not on the batch, on the
    process that fetches it, or on the epochs before.

    Args:
        rows: uint8 (N, C, H, W).
        scale: the level that is always 1.
        binarization_seed: seed of the draws.
        stream: number of the set, so that those of one seed differ in their draws.

    Example:
        >>> grey = np.full((2, 1, 2, 2), 8, np.uint8)
        >>> data = ResampledImages(grey, scale=16, binarization_seed=0, stream=0)
        >>> (first,), (again,), (epoch_1,) = data[[0]], data[[0]], data[[0], 2]
        >>> torch.equal(first, again), torch.equal(first, epoch_1), first.unique().tolist()
        (True, False, [0.0, 1.0])
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
        """A batch: of the draw of evaluation, or of draw number n, from 1."""
        indices, draw = index if isinstance(index, tuple) else (index, 0)
        return (torch.from_numpy(self.images(self._numbers(indices), draw)),)

    def images(self, numbers: np.ndarray, draw: int = 0) -> np.ndarray:
        grey = self.rows[numbers]
        bits = np.random.Philox(np.random.SeedSequence((self.binarization_seed, self.stream, draw)))
        rng, start = np.random.Generator(bits), bits.state
        uniform = np.empty(grey.shape, np.float32)
        for place, number in enumerate(numbers.tolist()):
            # Each row has a stretch of the sequence to itself, whatever rows come before.
            bits.state = start
            bits.advance(number * _STRETCH)
            rng.random(dtype=np.float32, out=uniform[place])
        return (self.scale * uniform < grey).astype(np.float32)


class ImageBatches(DistributedBatches):
    """Batches of images, in evaluation spread over the set.

    Files of images are often sorted, by digit or by writer: so the first batches of an evaluation,
    with ``limit_test_batches`` for one, stand for the whole.
    """

    def permutation(self, n: int, *stream: int) -> Tensor:
        return super().permutation(n, *stream) if self.shuffle else torch.from_numpy(spread(n))


class DrawnBatches(ImageBatches):
    """Batches of `ResampledImages`: indices, in training with the number of the draw."""

    dataset: ResampledImages

    def __iter__(self) -> Iterator[Any]:
        for indices in super().__iter__():
            yield (indices, self.epoch + 1) if self.training else indices

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"binarization_seed": self.dataset.binarization_seed}


def spread(n: int) -> np.ndarray:
    """The numbers 0 to n - 1 in an order whose beginnings are spread evenly over them, int64.

    They are sorted by the fraction of their multiple of the golden section. Those whose fraction
    lies below a bound, however low, follow one another at most at three distances (Slater 1967).

    Example:
        >>> spread(10).tolist()
        [0, 5, 2, 7, 4, 9, 1, 6, 3, 8]
    """
    return np.argsort(np.arange(n) * ((sqrt(5) - 1) / 2) % 1)


class BinarizedImageData(ZooDataModule, ABC):
    """Binary images of one shape, for models of their likelihood.

    A batch is a tuple of one tensor, ``(images,)``: float32 (N, C, H, W) of 0 and 1, in [0, 1] with
    ``binarization="grey"``. There are no labels. A dataset states its name, its facts below and
    where its three sets come from (`read`).

    How images are binarized changes a likelihood by whole nats. So every way but ``fixed`` gives
    the dataset another name in tables, and scores are not compared with those of the fixed one:

    * ``fixed``: every pixel drawn once and kept.
    * ``dynamic``: sampled again in each epoch of training, with the grey level as probability;
      evaluation takes one draw, the same for every epoch, model and run.
    * ``threshold``: 1 above half of the highest grey level.
    * ``grey``: grey levels as they are, as probabilities.

    In evaluation images come in an order spread over the set, in prediction in that of the file.

    Args:
        binarization: ``fixed``, ``dynamic``, ``threshold`` or ``grey``, see above.
        binarization_seed: seed of what is drawn here.
        batch_size: training images per step of one process.
        train_size: number of training images.
        val_size: number of validation images.
        seed: seed of the order of training images.
        eval_batch_size: images per batch in evaluation.
        num_workers: processes that fetch batches.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` images. A last
            training batch of a single image is always left out.

    Raises:
        ValueError: an empty batch or set, a negative seed or number of workers, or a binarization
            that is none of those above.
    """

    #: What a batch holds, for models that say what they take.
    gives: ClassVar[str] = "images"
    image_shape: tuple[int, int, int]
    scale: int
    """The grey level that becomes 1.0."""
    test_size: int
    _sets: dict[str, ImageSet]

    def __init__(
        self,
        binarization: Binarization,
        binarization_seed: int,
        batch_size: int,
        train_size: int,
        val_size: int,
        seed: int,
        eval_batch_size: int,
        num_workers: int,
        pin_memory: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(batch_size, seed, eval_batch_size, num_workers, pin_memory, drop_last)
        check_choice("binarization", binarization, get_args(Binarization))
        check_at_least(0, binarization_seed=binarization_seed)
        check_at_least(1, train_size=train_size, val_size=val_size)
        self.binarization = binarization
        self.binarization_seed = binarization_seed
        self.train_size = train_size
        self.val_size = val_size
        if binarization != "fixed":
            self.name = f"{self.name}-{binarization}"

    @abstractmethod
    def read(self) -> dict[str, ImageSet]:
        """Reads the three sets, by name, that `prepare_data` made available."""

    @property
    def resampled(self) -> bool:
        """Whether the images are binarized here, so that they depend on ``binarization_seed``."""
        return self.binarization in ("fixed", "dynamic")

    @property
    def in_features(self) -> int:
        """Number of inputs of a flattened image, I = C H W."""
        return prod(self.image_shape)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What an image goes through before the model, as plain data."""
        return {
            "binarization": self.binarization,
            "scale": self.scale,
            "image_shape": list(self.image_shape),
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        facts = {
            "dataset": self.name,
            "binarization": self.binarization,
            "train_size": self.train_size,
            "val_size": self.val_size,
            "test_size": len(self._sets["test"]) if self._sets else self.test_size,
            "batch_size": self.batch_size,
            "eval_batch_size": self.eval_batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }
        return facts | ({"binarization_seed": self.binarization_seed} if self.resampled else {})

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            self._sets = self.read()

    def training_set(self) -> ImageSet:
        return self._set("train")

    def evaluation_set(self, name: str, examples: int | None = None) -> ImageSet:
        """A set in its own order, or evenly spaced images of it, as files may be sorted."""
        images = self._set(name)
        if examples is not None and examples < len(images):
            images = images.pick(evenly_spaced(len(images), examples))
        return images

    def binarize(self, grey: Mapping[str, np.ndarray]) -> dict[str, ImageSet]:
        """The three sets of grey images, uint8 (N, C, H, W) up to ``scale``, binarized as asked."""
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
