"""MNIST from the Hugging Face hub, from the four IDX files, or from a copy made by ``datasets``."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.folders import local_folder
from ln_zoo.data.images.dataset import ImageClassificationData
from ln_zoo.data.images.files import LocalImages, load_from_hub, to_arrays

#: Suffix of the names of datasets with other images in the published format.
UNPUBLISHED = "-unpublished"
#: SHA-256 of the published labels of each set, one byte each.
_LABELS = {
    "train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}


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
        folder = local_folder(root, self.name)
        self.source = None if folder is None else LocalImages(folder)

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
