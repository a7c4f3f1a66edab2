"""COCO, Flickr8k and other images with five captions each (Vendrov et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ln_zoo.data.captions.dataset import CaptionedData, CaptionedSet
from ln_zoo.data.captions.files import THUMBNAILS, Layout, find_layout, read_thumbnails
from ln_zoo.data.folders import local_folder
from ln_zoo.utils.checks import check_optional

#: Names of test sets in tables, if folds are scored.
_TEST_SPLITS = {"coco": "test-1k"}


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
