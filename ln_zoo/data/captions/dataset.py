"""Captioned images: image features and captions as word indices."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import BatchSet, DistributedBatches
from ln_zoo.data.ragged import Ragged, pad
from ln_zoo.utils.checks import check_at_least, check_choice
from ln_zoo.utils.vocabulary import Vocabulary

CaptionSampling = Literal["one_per_image", "all"]
VocabularyFrom = Literal["train", "train_val"]

_ROWS = 8192  # rows of features to check at a time
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def caption_words(caption: str) -> list[str]:
    """Split a caption into lower-case words without punctuation (Karpathy and Fei-Fei 2015)."""
    return caption.lower().translate(_PUNCTUATION).split()


class CaptionBatch(NamedTuple):
    """N images with C captions each; image i has captions C i to C i + C - 1."""

    images: Tensor  #: features, float32 (N, I)
    captions: Tensor  #: word indices, int64 (C N, T), ended and padded by `EOS`
    lengths: Tensor  #: tokens of each caption with `EOS`, int64 (C N,)
    image_index: Tensor  #: index of each image in its set, int64 (N,)


@dataclass(frozen=True)
class CaptionedSet:
    """N images: features (N, I), words of C N captions, names; ``where`` is for errors."""

    features: np.ndarray
    captions: Sequence[Sequence[str]]
    names: Sequence[str]
    where: str

    def __len__(self) -> int:
        return len(self.features)

    def first(self, images: int) -> CaptionedSet:
        each = len(self.captions) // max(1, len(self))
        return CaptionedSet(
            self.features[:images], self.captions[: each * images], self.names[:images], self.where
        )

    def check(self, each: int) -> None:
        if self.features.ndim != 2 or not np.issubdtype(self.features.dtype, np.floating):
            raise ValueError(
                f"{self.where}: features must be a matrix (images, features) of floating point, "
                f"got {self.features.dtype} {self.features.shape}"
            )
        if not len(self):
            raise ValueError(f"{self.where}: there are no images")
        if len(self.captions) != each * len(self):
            raise ValueError(
                f"{self.where}: {len(self.captions):,} captions of {len(self):,} images, expected "
                f"{each} an image, {each * len(self):,}: a file is incomplete, or captions and "
                "features are of different sets"
            )
        for start in range(0, len(self), _ROWS):
            rows = self.features[start : start + _ROWS]
            with np.errstate(over="ignore"):
                finite = np.isfinite(rows.astype(np.float32)).all(1)
            for good, what in ((finite, "that are not finite"), (rows.any(1), "of zeros alone")):
                if not good.all():
                    row = start + int(np.flatnonzero(~good)[0])
                    raise ValueError(
                        f"{self.where}: image {row} ({self.names[row]}) has float32 features "
                        f"{what}: extract them again"
                    )
        empty = [i for i, words in enumerate(self.captions) if not words]
        if empty:
            rank_zero_warn(
                f"{self.where}: {len(empty):,} captions have no word, the first is caption "
                f"{empty[0] % each} of {self.names[empty[0] // each]}"
            )


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


class CaptionedData(ZooDataModule, ABC):
    """Image features with captions, as `CaptionBatch`.

    Features are normalised to unit length. Evaluation uses all captions of each image. A subclass
    states its name and implements `read`.

    Args:
        caption_sampling: captions in training: ``one_per_image``, a random one of each image per
            epoch, or ``all``, each caption with its image as an example. With ``all``, epochs are C
            times as long, and batches may have false negatives: other captions of an image.
        vocabulary: the known words, or a text file with one per line; default: those of the
            captions.
        vocabulary_from: captions to count: ``train``, or ``train_val`` as in the released code of
            Vendrov et al. (2016), where words of validation captions only are never trained.
        min_count: minimum count of a word.
        drop_last: drop the last training batch if it is smaller than ``batch_size``. A last
            training batch of one example is always dropped.
    """

    batch_kind = "captioned images"
    captions_per_image: ClassVar[int] = 5

    def __init__(
        self,
        batch_size: int = 128,
        caption_sampling: CaptionSampling = "one_per_image",
        vocabulary: list[str] | str | None = None,
        vocabulary_from: VocabularyFrom = "train",
        min_count: int = 1,
        eval_batch_size: int = 100,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size, eval_batch_size=eval_batch_size, drop_last=drop_last, **options
        )
        check_choice("caption_sampling", caption_sampling, get_args(CaptionSampling))
        check_choice("vocabulary_from", vocabulary_from, get_args(VocabularyFrom))
        check_at_least(1, min_count=min_count)
        self.caption_sampling = caption_sampling
        self.vocabulary_from = vocabulary_from
        self.min_count = min_count
        self._given = None if vocabulary is None else Vocabulary.of(vocabulary)

    @abstractmethod
    def read(self) -> Mapping[str, CaptionedSet]:
        """Read the sets ``"train"``, ``"val"`` and ``"test"``."""

    @property
    def readable(self) -> bool:
        """Whether the folder has a known layout."""
        return True

    @property
    def vocabulary(self) -> list[str] | None:
        """The known words in order of their indices; None without captions."""
        if self._given is None and not self.readable:
            return None
        return list(self._words)

    @property
    def image_features(self) -> int | None:
        """Features I of an image; None without images."""
        return self._images["train"].features.shape[1] if self.readable else None

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {
            "captions": "lower case, without punctuation, ended by EOS",
            "features": "rows of unit length",
        }

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = super().metadata | {"test_split": self.test_split}
        metadata |= {f"{name}_size": len(images) for name, images in self._images.items()}
        return metadata | {
            "captions_per_image": self.captions_per_image,
            "caption_sampling": self.caption_sampling,
            "words": len(self._words),
            "vocabulary_from": "given" if self._given else self.vocabulary_from,
            "min_count": self.min_count,
        }

    def prepare_data(self) -> None:
        _ = self._images

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            for images in self._images.values():
                images.check(self.captions_per_image)
            self._sets = dict(self._images)

    def captioned(self, name: Literal["train", "val", "test"]) -> CaptionedSet:
        """The images of a set with words and names."""
        images: CaptionedSet = self._set(name)
        return images

    def thumbnail(self, name: str) -> np.ndarray | None:
        """Thumbnail of an image by name, uint8 (B, A, 3), or None."""
        return None

    def training_set(self) -> CaptionSet:
        return CaptionSet(
            self._set("train"), self._words, self.captions_per_image, self.caption_sampling
        )

    def evaluation_set(self, name: str, examples: int | None = None) -> CaptionSet:
        images: CaptionedSet = self._set(name)
        if examples is not None:
            images = images.first(examples)
        return CaptionSet(images, self._words, self.captions_per_image)

    @cached_property
    def _images(self) -> dict[str, CaptionedSet]:
        return dict(self.read())

    @cached_property
    def _words(self) -> Vocabulary:
        if self._given is not None:
            return self._given
        sets = ("train", "val") if self.vocabulary_from == "train_val" else ("train",)
        captions = (words for name in sets for words in self._images[name].captions)
        found = Vocabulary.count(captions, min_count=self.min_count)
        if not len(found):
            raise ValueError(f"no word of the captions occurs min_count={self.min_count} times")
        return found
