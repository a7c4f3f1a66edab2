"""What the data modules of captioned images share: features and words, in whole batches."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.loading import DistributedBatches, check_at_least, check_choice
from ln_zoo.vocabulary import EOS, Vocabulary

CaptionSampling = Literal["one_per_image", "all"]
VocabularyFrom = Literal["train", "train_val"]

#: Rows of features that are checked at a time.
_ROWS = 8192
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def caption_words(caption: str) -> list[str]:
    """The words of a raw caption: in lower case, without punctuation.

    This is what was done to the captions of COCO, Flickr8k and Flickr30k that are in circulation
    (Karpathy and Fei-Fei 2015).

    Example:
        >>> caption_words("A tri-colored dog's ball .")
        ['a', 'tricolored', 'dogs', 'ball']
    """
    return caption.lower().translate(_PUNCTUATION).split()


class CaptionBatch(NamedTuple):
    """N images with C captions each.

    Args:
        images: features, float32 (N, I).
        captions: numbers of words, int64 (C N, T), each caption ended and filled up by `EOS`; those
            of image i are rows C i to C i + C - 1.
        lengths: tokens of each caption, the `EOS` that ends it among them, int64 (C N,).
        image_index: the number of each image in its set, int64 (N,).
    """

    images: Tensor
    captions: Tensor
    lengths: Tensor
    image_index: Tensor


@dataclass(frozen=True)
class CaptionedSet:
    """N images with C captions each, as they were read.

    Attributes:
        features: (N, I), floating point; may be mapped from a file.
        captions: the words of each caption, (C N,); those of image i are C i to C i + C - 1.
        names: of the images, (N,).
        where: what error messages call the set.
    """

    features: np.ndarray
    captions: Sequence[Sequence[str]]
    names: Sequence[str]
    where: str

    def __len__(self) -> int:
        return len(self.features)

    def first(self, images: int) -> CaptionedSet:
        """The first of the images, with their captions."""
        each = len(self.captions) // max(1, len(self))
        return CaptionedSet(
            self.features[:images],
            self.captions[: each * images],
            self.names[:images],
            self.where,
        )

    def check(self, each: int) -> None:
        """Checks that there are ``each`` captions per image, and features that are numbers.

        Raises:
            ValueError: if not.
        """
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
            finite = np.isfinite(rows).all(1)
            for good, what in ((finite, "that are not finite"), (rows.any(1), "of zeros alone")):
                if not good.all():
                    row = start + int(np.flatnonzero(~good)[0])
                    raise ValueError(
                        f"{self.where}: image {row} ({self.names[row]}) has features {what}, which "
                        "have no direction: extract them again"
                    )
        empty = [i for i, words in enumerate(self.captions) if not words]
        if empty:
            rank_zero_warn(
                f"{self.where}: {len(empty):,} captions have no word, the first is caption "
                f"{empty[0] % each} of {self.names[empty[0] // each]}"
            )


class CaptionSet(Dataset[CaptionBatch]):
    """Captioned images as training or evaluation sees them, in whole batches.

    Args:
        images: what was read.
        vocabulary: numbers the words.
        each: captions C of an image.
        sampling: which captions a batch has: ``None``: all C of each image. ``"one_per_image"``:
            one of each, indexed by a pair of tensors, images and caption of each. ``"all"``: an
            example is a caption with its image.

    Example:
        >>> words = [["a", "dog"], ["dogs"], ["a", "cat"], ["a", "black", "cat"]]
        >>> images = CaptionedSet(np.eye(2, dtype=np.float32), words, ["0.jpg", "1.jpg"], "a test")
        >>> data = CaptionSet(images, Vocabulary(["a", "cat", "dog"]), each=2)
        >>> batch = data[torch.tensor([1])]
        >>> batch.captions, batch.lengths
        (tensor([[2, 3, 0, 0],
                [2, 1, 3, 0]]), tensor([3, 4]))
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
        numbers = [np.asarray(vocabulary.numbers(words), np.int64) for words in images.captions]
        self._lengths = np.array([len(caption) for caption in numbers], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])
        self._numbers = np.concatenate(numbers)

    @property
    def batches(self) -> type[DistributedBatches]:
        """How `BatchLoader` groups examples."""
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
        captions, lengths = self._captions(rows.numpy())
        features = np.asarray(self.images.features[images.numpy()], np.float32)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        return CaptionBatch(torch.from_numpy(features), captions, lengths, images)

    def __getitems__(self, indices: list[int]) -> CaptionBatch:
        """One batch for a list of indices: what a ``DataLoader`` with a batch size asks for."""
        return self[torch.tensor(indices)]

    def _captions(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        lengths = self._lengths[rows]
        filled = np.full((len(rows), int(lengths.max(initial=0)) + 1), EOS, np.int64)
        starts = self._starts[rows]
        pieces = [self._numbers[a : a + n] for a, n in zip(starts, lengths, strict=True)]
        filled[np.arange(filled.shape[1]) < lengths[:, None]] = np.concatenate(pieces)
        return torch.from_numpy(filled), torch.from_numpy(lengths + 1)


class OneCaptionBatches(DistributedBatches):
    """Batches of images with one caption of each, which depends on (seed, epoch, image) alone.

    Yields (B,) images and (B,) numbers of their captions. Without shuffling it is the first one.

    Args:
        dataset: the images, a `CaptionSet`.
        batch_size: images per batch.
        options: as `DistributedBatches`.

    Raises:
        ValueError: as `DistributedBatches`.
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
    """Images, as features of some network, with captions.

    Batches are `CaptionBatch`. Features are float32 rows of unit length. A dataset states its name
    and where its three sets come from (`read`).

    In training each image has one of its C captions, chosen again in each epoch
    (``one_per_image``): so an epoch has every image once, no image is twice in a batch, and none
    of a batch's wrong answers is a right one. With ``all`` each caption with its image is an
    example, which makes epochs C times as long and admits such false negatives. Evaluation has all
    captions of each image.

    Args:
        batch_size: training examples per step of one process.
        caption_sampling: ``one_per_image`` or ``all``, see above.
        vocabulary: words to number, or a text file with one word per line; default: those of the
            captions.
        vocabulary_from: whose captions are counted: those of the ``train`` set, or of both
            (``train_val``), as in the released code of Vendrov et al. (2016): words that only
            validation captions have are never trained.
        min_count: how often a word must occur there to have a number.
        seed: seed of the order of training images and of the choice of captions.
        eval_batch_size: images per batch in evaluation; changes no result.
        num_workers: processes that fetch batches; 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` examples. A last
            training batch of a single example is always left out.

    Raises:
        ValueError: a value that is none of those above.
        OSError: if a vocabulary file cannot be read.
    """

    #: What a batch holds, for models that say what they take.
    gives: ClassVar[str] = "captioned images"
    captions_per_image: ClassVar[int] = 5
    test_split: str = "test"
    """What the set that tests score is called in tables."""

    def __init__(
        self,
        batch_size: int = 128,
        caption_sampling: CaptionSampling = "one_per_image",
        vocabulary: list[str] | str | None = None,
        vocabulary_from: VocabularyFrom = "train",
        min_count: int = 1,
        seed: int = 0,
        eval_batch_size: int = 100,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = True,
    ) -> None:
        super().__init__(batch_size, seed, eval_batch_size, num_workers, pin_memory, drop_last)
        check_choice("caption_sampling", caption_sampling, get_args(CaptionSampling))
        check_choice("vocabulary_from", vocabulary_from, get_args(VocabularyFrom))
        check_at_least(1, min_count=min_count)
        self.caption_sampling = caption_sampling
        self.vocabulary_from = vocabulary_from
        self.min_count = min_count
        self._given = None if vocabulary is None else Vocabulary.of(vocabulary)
        self._counted: Vocabulary | None = None
        self._read: dict[str, CaptionedSet] = {}

    @abstractmethod
    def read(self) -> Mapping[str, CaptionedSet]:
        """Reads the sets ``"train"``, ``"val"`` and ``"test"``."""

    @property
    def readable(self) -> bool:
        """Whether there is something to read."""
        return True

    @property
    def vocabulary(self) -> list[str] | None:
        """The words that have numbers, in order of these; ``None`` where there are no captions.

        Counting reads the captions, once.
        """
        if self._given is None and not self.readable:
            return None
        return list(self._words())

    @property
    def image_features(self) -> int | None:
        """Features I of an image; ``None`` where there are no images."""
        return self._images()["train"].features.shape[1] if self.readable else None

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What captions and features go through before the model, as plain data."""
        return {
            "captions": "lower case, without punctuation, ended by EOS",
            "features": "rows of unit length",
        }

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        facts: dict[str, Any] = {"dataset": self.name, "test_split": self.test_split}
        facts |= {f"{name}_size": len(images) for name, images in self._images().items()}
        return facts | {
            "captions_per_image": self.captions_per_image,
            "caption_sampling": self.caption_sampling,
            "words": len(self._words()),
            "vocabulary_from": "given" if self._given else self.vocabulary_from,
            "min_count": self.min_count,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "seed": self.seed,
        }

    def prepare_data(self) -> None:
        self._images()

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            for images in self._images().values():
                images.check(self.captions_per_image)
            self._sets = dict(self._images())

    def captioned(self, name: Literal["train", "val", "test"]) -> CaptionedSet:
        """The images of a set with their words and names.

        Raises:
            RuntimeError: before `setup`.
        """
        images: CaptionedSet = self._set(name)
        return images

    def thumbnail(self, name: str) -> np.ndarray | None:
        """A small picture of an image, uint8 (B, A, 3), by its name; ``None``: there is none."""
        return None

    def training_set(self) -> CaptionSet:
        return CaptionSet(
            self._set("train"), self._words(), self.captions_per_image, self.caption_sampling
        )

    def evaluation_set(self, name: str, examples: int | None = None) -> CaptionSet:
        """A set in its own order, all captions of each image, or the first of its images."""
        images: CaptionedSet = self._set(name)
        if examples is not None:
            images = images.first(examples)
        return CaptionSet(images, self._words(), self.captions_per_image)

    def _images(self) -> dict[str, CaptionedSet]:
        if not self._read:
            self._read = dict(self.read())
        return self._read

    def _words(self) -> Vocabulary:
        if self._given is not None:
            return self._given
        if self._counted is None:
            sets = self._images()
            names = ("train", "val") if self.vocabulary_from == "train_val" else ("train",)
            self._counted = count_words(
                (caption for name in names for caption in sets[name].captions), self.min_count
            )
        return self._counted


def count_words(captions: Iterable[Sequence[str]], min_count: int = 1) -> Vocabulary:
    """The vocabulary of captions.

    Raises:
        ValueError: if no word is left.
    """
    counts: Counter[str] = Counter()
    for words in captions:
        counts.update(words)
    vocabulary = Vocabulary.of_counts(counts, min_count=min_count)
    if not len(vocabulary):
        raise ValueError(
            f"no word of the captions occurs {min_count} times or more: lower min_count"
        )
    return vocabulary
