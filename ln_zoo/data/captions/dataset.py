"""Data modules of captioned images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from ln_zoo.data.base import ZooDataModule
from ln_zoo.data.captions.batches import CaptionSampling, CaptionSet
from ln_zoo.data.captions.files import (
    THUMBNAILS,
    CaptionedSet,
    Layout,
    find_layout,
    read_thumbnails,
)
from ln_zoo.data.folders import local_folder
from ln_zoo.utils.checks import check_at_least, check_choice, check_optional
from ln_zoo.utils.vocabulary import Vocabulary

VocabularyFrom = Literal["train", "train_val"]

#: Names of test sets in tables, if folds are scored.
_TEST_SPLITS = {"coco": "test-1k"}


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


class CaptionedImages(CaptionedData):
    """Images, as features of a convolutional network, with five captions each.

    ``root`` holds one of:

    * the form released with order embeddings: ``train.txt``, ``val.txt`` and ``test.txt``, five
      lines of tokens per image, and ``images/<features>/<set>.npy``, float32 (N, 4096), with
      ``<features>`` ``10crop`` (default) or ``1crop``;
    * Karpathy's ``dataset.json`` (or ``dataset_coco.json``, ...) and a file of features: ``.npy``
      with a row per image, or ``.mat`` (version 5 to 7) with a column per image, as his
      ``vgg_feats.mat``. The first five captions of an image are used;
    * ``captions.tsv``, with a header, name, split (``train``, ``dev``, ``test``; others are
      dropped) and five raw captions per image; ``<features>.npy`` (default ``mobilenetv2_pool``)
      with the same rows; and optionally thumbnails, ``thumbs64_jpeg.npz``.

    Captions without words are kept, with a warning.

    COCO's captions are under CC BY 4.0; Flickr8k and Flickr30k are for non-commercial research.

    Args:
        root: folder of the images; default: the folder ``dataset`` in ``$LN_ZOO_DATA``.
        dataset: name in tables, and of the folder in ``$LN_ZOO_DATA``. Default: the name in
            Karpathy's file, else the name of ``root``.
        features: name of the features, if there are several.
        use_restval: add Karpathy's split ``restval`` to the training set.
        val_images: use the first validation images only; None: all.
    """

    name = "captioned_images"

    def __init__(
        self,
        root: str | None = None,
        dataset: str | None = None,
        features: str | None = None,
        use_restval: bool = True,
        val_images: int | None = 1000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_optional(1, val_images=val_images)
        self.dataset = dataset
        self.use_restval = use_restval
        self.val_images = val_images
        self._layout: Layout | None = None
        self._picture: Callable[[str], np.ndarray | None] | None = None
        self._folder = local_folder(root, dataset or "") if root or dataset else None
        found = None
        if self._folder is not None:
            each = self.captions_per_image
            self._layout = find_layout(self._folder, features, each, use_restval)
            found = self._layout.name or self._folder.resolve().name
        self.name = dataset or found or type(self).name
        self.test_split = _TEST_SPLITS.get(self.name.lower(), "test")

    @property
    def readable(self) -> bool:
        return self._layout is not None

    @property
    def metadata(self) -> dict[str, Any]:
        return super().metadata | {"features": self._layout.features if self._layout else None}

    def read(self) -> dict[str, CaptionedSet]:
        if self._layout is None:
            raise FileNotFoundError(
                f"no captioned images: give the folder of {self.dataset or 'a dataset'} by "
                "--data.root (root= in Python), or --data.dataset, one in $LN_ZOO_DATA; see "
                "docs/results/order_embeddings.md"
            )
        sets = self._layout.read()
        if self.val_images is not None:
            sets["val"] = sets["val"].first(self.val_images)
        widths = {images.features.shape[1] for images in sets.values()}
        if len(widths) > 1:
            raise ValueError(
                f"{self.name}: the sets have {', '.join(map(str, sorted(widths)))} features per "
                "image: take all from one network"
            )
        return sets

    def thumbnail(self, name: str) -> np.ndarray | None:
        path = self._folder / THUMBNAILS if self._folder else Path(THUMBNAILS)
        if self._picture is None:
            if not path.is_file():
                return None
            self._picture = read_thumbnails(path)
        return self._picture(name)
