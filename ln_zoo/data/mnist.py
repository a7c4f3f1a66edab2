"""MNIST from the Hugging Face hub, from the four IDX files, or from a copy made by ``datasets``."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.images import ImageClassificationData
from ln_zoo.data.sources import LocalImages, load_from_hub, to_arrays

if TYPE_CHECKING:
    from datasets import Dataset


#: Ends the names of datasets that are read as the published one is, and hold other images.
UNPUBLISHED = "-unpublished"
#: SHA-256 of the labels of each set, one byte each, in the order of the published files.
_LABELS = {
    "train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}


class MNIST(ImageClassificationData):
    """The 60,000 training and 10,000 test images of MNIST, 28 x 28 grey levels 0 to 255.

    Training takes the first ``train_size`` training images, validation the last ``val_size``. The
    splits in use are 55,000/5,000/10,000 (the default) and 50,000/10,000/10,000.

    ``root`` may hold the four IDX files (gzipped or not; ``train-images-idx3-ubyte`` or
    ``train-images.idx3-ubyte``), a ``DatasetDict`` written by ``save_to_disk``, or parquet files
    whose names begin with ``train`` and ``test``, with columns ``image`` and ``label``. Without
    ``root`` the folder ``mnist`` in the folder named by the environment variable ``LN_ZOO_DATA`` is
    taken if it exists, else ``repo_id`` is downloaded from the hub, or found in its cache.

    Other images of this form are read too, such as Fashion-MNIST. As their labels are not MNIST's,
    tables call them ``mnist-unpublished``, and no reported number is put beside theirs.

    Args:
        root: folder of a local copy.
        repo_id: the dataset on the hub, used without a local copy.
        batch_size: training examples per step of one process.
        train_size: number of training images.
        val_size: number of validation images.
        seed: seed of the order of training examples.
        eval_batch_size: images per batch in evaluation; changes no result but those that use batch
            statistics, under batch-dependent norms: ``val_batch_*``, ``epoch_train_batch_*``
            and what `ln_zoo.callbacks.PopulationStatistics` estimates.
        num_workers: processes that fetch batches; the data are in memory, 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` examples. A last
            training batch of a single example is always left out, for batch norm's sake.

    Raises:
        FileNotFoundError: ``root`` does not exist, or one of its files is missing.
        ValueError: an empty batch or split, splits that would overlap, or data that are not MNIST.
        ConnectionError: no local copy, and the hub cannot be reached.
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
        seed: int = 0,
        eval_batch_size: int = 1000,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            batch_size,
            train_size,
            val_size,
            seed,
            eval_batch_size,
            num_workers,
            pin_memory,
            drop_last,
        )
        self.repo_id = repo_id
        folder = local_folder(root, self.name)
        self.source = None if folder is None else LocalImages(folder)

    def prepare_data(self) -> None:
        if self.source is None:
            load_from_hub(self.repo_id)

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self.source is None:
            source, where = load_from_hub(self.repo_id), self.repo_id
        else:
            source, where = self.source.load(), str(self.source.root)
        images, labels = self._tensors(source["train"], f"training set of {where}")
        test = self._tensors(source["test"], f"test set of {where}")
        published = _digests(labels, test[1]) == _LABELS
        self.name = MNIST.name if published else f"{MNIST.name}{UNPUBLISHED}"
        self._check_split(len(labels))
        val_start = len(labels) - self.val_size
        return {
            "train": (images[: self.train_size], labels[: self.train_size]),
            "val": (images[val_start:], labels[val_start:]),
            "test": test,
        }

    def _tensors(self, dataset: Dataset, where: str) -> tuple[Tensor, Tensor]:
        images, labels = to_arrays(dataset, where)
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


def _digests(train: Tensor, test: Tensor) -> dict[str, str]:
    return {
        name: hashlib.sha256(labels.numpy().astype(np.uint8).tobytes()).hexdigest()
        for name, labels in (("train", train), ("test", test))
    }


def local_folder(root: str | None, name: str) -> Path | None:
    """The folder given, else the dataset's folder in ``$LN_ZOO_DATA`` if there is one.

    Raises:
        NotADirectoryError: if ``LN_ZOO_DATA`` names no folder.
    """
    if root is not None:
        return Path(root).expanduser()
    shared = os.environ.get("LN_ZOO_DATA")
    if not shared:
        return None
    if not Path(shared).is_dir():
        what = "a file" if Path(shared).exists() else "not there"
        raise NotADirectoryError(
            f"LN_ZOO_DATA={shared} must name a folder with a folder {name}, and is {what}: correct "
            "or unset it, or give --data.root (root= in Python)"
        )
    folder = Path(shared, name)
    return folder if folder.is_dir() else None
