"""COCO, Flickr8k and other images with five captions each (Vendrov et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ln_zoo.data.captioned_files import THUMBNAILS, Layout, find_layout, read_thumbnails
from ln_zoo.data.captions import CaptionedData, CaptionedSet, CaptionSampling, VocabularyFrom
from ln_zoo.data.loading import check_at_least
from ln_zoo.data.mnist import local_folder

#: What the test sets of some datasets are called in tables, where folds of them are scored.
_TEST_SPLITS = {"coco": "test-1k"}


class CaptionedImages(CaptionedData):
    """Images, as features of a convolutional network, with five captions each.

    ``root`` holds one of:

    * the form released with order embeddings: ``train.txt``, ``val.txt`` and ``test.txt``, one
      caption per line, five lines per image, tokens separated by blanks; and for each set
      ``images/<features>/<set>.npy``, float32 (N, 4096), ``<features>`` being ``10crop`` (the
      default) or ``1crop``. COCO in Karpathy's split has 113,287 training images, ``restval``
      among them, 5,000 for validation and 5,000 for tests;
    * Karpathy's ``dataset.json`` (or ``dataset_coco.json``, ...), and a features file with a row an
      image, ``.npy``, or a column an image, ``.mat`` as his ``vgg_feats.mat``. Of images with more
      than five captions the first five are kept;
    * ``captions.tsv``, with a header, name, split (``train``, ``dev``, ``test``; others are left
      out) and five raw captions per image; ``<features>.npy`` (default ``mobilenetv2_pool``) with
      as many rows; and possibly ``thumbs64_jpeg.npz``, thumbnails.

    Without ``root`` the folder ``dataset`` in the folder named by the environment variable
    ``LN_ZOO_DATA`` is taken. COCO's captions are under CC BY 4.0; Flickr8k and Flickr30k are for
    non-commercial research only.

    Args:
        root: folder of the images.
        dataset: name of the dataset in tables, and of its folder in ``LN_ZOO_DATA``. Default: what
            Karpathy's file says, else the name of ``root``.
        features: which of several features to take.
        use_restval: whether Karpathy's split ``restval`` belongs to the training set.
        val_images: how many validation images, the first of the set; ``None``: all.
        batch_size: training examples per step of one process.
        caption_sampling: ``one_per_image`` or ``all``, as `CaptionedData`.
        vocabulary: words to number, or a text file with one word per line; default: those of the
            captions.
        vocabulary_from: whose captions are counted, ``train`` or ``train_val``, as there.
        min_count: how often a word must occur there to have a number.
        seed: seed of the order of training images and of the choice of captions.
        eval_batch_size: images per batch in evaluation; changes no result.
        num_workers: processes that fetch batches; 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` examples. A last
            training batch of a single example is always left out.

    Raises:
        FileNotFoundError: no such folder, or one of its files is missing; without ``root`` and a
            folder in ``LN_ZOO_DATA`` when the images are to be read.
        ValueError: the folder holds something else, or a value that is none of those above; when
            they are read: captions that are not five an image, features that are not finite or of
            another number of images.
    """

    name = "captioned_images"

    def __init__(
        self,
        root: str | None = None,
        dataset: str | None = None,
        features: str | None = None,
        use_restval: bool = True,
        val_images: int | None = 1000,
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
        super().__init__(
            batch_size,
            caption_sampling,
            vocabulary,
            vocabulary_from,
            min_count,
            seed,
            eval_batch_size,
            num_workers,
            pin_memory,
            drop_last,
        )
        if val_images is not None:
            check_at_least(1, val_images=val_images)
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
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        return super().facts | {"features": self._layout.features if self._layout else None}

    def read(self) -> dict[str, CaptionedSet]:
        if self._layout is None:
            raise FileNotFoundError(
                f"no captioned images: --data.root (root= in Python) names the folder of "
                f"{self.dataset or 'a dataset'}, or --data.dataset one in $LN_ZOO_DATA; "
                "docs/results/order_embeddings.md says what it holds and where COCO and Flickr8k "
                "come from"
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
