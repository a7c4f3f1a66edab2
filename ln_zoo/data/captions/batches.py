"""Batches of image features and captions as word indices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.captions.files import CaptionedSet
from ln_zoo.data.loading import BatchSet, DistributedBatches
from ln_zoo.data.ragged import Ragged, pad
from ln_zoo.utils.vocabulary import Vocabulary

CaptionSampling = Literal["one_per_image", "all"]


class CaptionBatch(NamedTuple):
    """N images with C captions each; image i has captions C i to C i + C - 1."""

    images: Tensor  #: features, float32 (N, I)
    captions: Tensor  #: word indices, int64 (C N, T), ended and padded by `EOS`
    lengths: Tensor  #: tokens of each caption with `EOS`, int64 (C N,)
    image_index: Tensor  #: index of each image in its set, int64 (N,)


class CaptionSet(BatchSet):
    """Captioned images with ``each`` captions, indexed by a tensor of indices.

    ``sampling``: None, all captions of each image; ``"one_per_image"``, one of each, indexed by a
    pair of images and captions; ``"all"``, an example is a caption with its image.
    """

    def __init__(
        self,
        images: CaptionedSet,
        vocabulary: Vocabulary,
        each: int,
        sampling: CaptionSampling | None = None,
    ) -> None:
        self.images = images
        self.each = each
        self.sampling = sampling
        self._words = Ragged.of(vocabulary.numbers(words) for words in images.captions)

    @property
    def batches(self) -> type[DistributedBatches]:
        return OneCaptionBatches if self.sampling == "one_per_image" else DistributedBatches

    def __len__(self) -> int:
        return len(self.images) * (self.each if self.sampling == "all" else 1)

    def __getitem__(self, index: Tensor | tuple[Tensor, Tensor]) -> CaptionBatch:
        if isinstance(index, tuple):
            images, which = index
            rows = self.each * images + which
        elif self.sampling == "all":
            images, rows = index // self.each, index
        else:
            images = index
            rows = (self.each * images[:, None] + torch.arange(self.each)).flatten()
        captions, lengths = pad([self._words[i] for i in rows.tolist()], ends=1)
        features = np.asarray(self.images.features[images.numpy()], np.float32)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        return CaptionBatch(torch.from_numpy(features), captions, lengths, images)


class OneCaptionBatches(DistributedBatches):
    """Batches of images with one caption of each, which depends only on (seed, epoch, image).

    Yields (B,) images and (B,) caption numbers; the first caption without ``shuffle``.
    """

    dataset: CaptionSet

    def __iter__(self) -> Iterator[Any]:
        count = len(self.dataset)
        which = torch.zeros(count, dtype=torch.int64)
        if self.shuffle:
            which = torch.randint(self.dataset.each, (count,), generator=self.generator(1))
        for images in super().__iter__():
            yield images, which[images]
