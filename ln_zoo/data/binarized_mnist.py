"""Binarized MNIST: the files of Larochelle and Murray (2011); other binarizations by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ln_zoo.data.amat import load_bits
from ln_zoo.data.binarized import Binarization, BinarizedImageData, ImageSet, PackedImages
from ln_zoo.data.mnist import MNIST, UNPUBLISHED, local_folder


class _Published(NamedTuple):
    """A file as it was published."""

    word: str
    """What its name says: ``binarized_mnist_{word}.amat``."""
    rows: int
    ones: int
    digest: str
    """SHA-256 of its packed bits: whatever blanks the copy has, it tells the images."""


_PUBLISHED = {
    "train": _Published(
        "train",
        50_000,
        5_118_041,
        "727146c35424b019f3e350e1e69faa05644a0abaf787e3f4e1a9632220a13906",
    ),
    "val": _Published(
        "valid",
        10_000,
        1_028_036,
        "a256ac44ae26be720fad8616a05ed6ecfd1619930d9a208379bb2a4405df5b6d",
    ),
    "test": _Published(
        "test",
        10_000,
        1_038_896,
        "9fcd8da6f0fdf09b2ba30fe63a0bb784042a0de82563172530229b983e294ff2",
    ),
}
_HELP = (
    "Hugo Larochelle distributes binarized_mnist_{train,valid,test}.amat at "
    "www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist; --data.root (root= in Python) "
    "or a folder binarized_mnist in $LN_ZOO_DATA names where they lie, gzipped or not"
)


class BinarizedMNIST(BinarizedImageData):
    """Binarized MNIST, 28 x 28 pixels of 0 and 1, without labels.

    ``fixed``, the default, is the binarization in which likelihoods are reported (Salakhutdinov and
    Murray 2008; Larochelle and Murray, AISTATS 2011): every pixel of MNIST drawn once, with its
    grey level as probability; 50,000 training, 10,000 validation and 10,000 test images. Training
    and validation images are a random division of MNIST's training images, in random order; the
    test images are sorted by digit.

    ``root`` has the files ``binarized_mnist_train.amat``, ``binarized_mnist_valid.amat`` and
    ``binarized_mnist_test.amat``, gzipped (``.gz``) or not. Without ``root`` they are looked for in
    the folder ``binarized_mnist`` of the folder named by the environment variable ``LN_ZOO_DATA``.
    The text is parsed once: its bits, 6.9 MB in all, are kept in ``LN_ZOO_CACHE`` if that is set,
    else in a folder ``.cache`` beside the text (in the user's cache where that folder is another
    user's or cannot be written), and mapped into memory.

    The other binarizations, by name only, are made of MNIST's grey levels, for which ``root`` and
    ``repo_id`` are those of `MNIST`. Training takes the first ``train_size`` of its 60,000 images,
    validation the last ``val_size``. Likelihoods differ from those of the fixed one by whole nats:
    a draw alone has an entropy of 45.5 nats per test image.

    Args:
        root: folder of a local copy.
        binarization: ``fixed``, ``dynamic``, ``threshold`` or ``grey``, as `BinarizedImageData`.
        published: under ``fixed``, take the published images only; else other files of this form
            too, of any number of images, which give the dataset another name in tables.
        repo_id: MNIST on the hub, for the other ways without a local copy.
        binarization_seed: seed of the draws under ``dynamic``.
        batch_size: training images per step of one process.
        train_size: number of training images, the first of the file.
        val_size: number of validation images, the first of the file.
        seed: seed of the order of training images.
        eval_batch_size: images per batch in evaluation.
        num_workers: processes that fetch batches; the data are in memory, 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` images. A last
            training batch of a single image is always left out.

    Raises:
        ValueError: an empty batch or set, more images than there are, or a binarization that is
            none of those above; when the files are read, damaged ones or others than published.
        FileNotFoundError: when the files are to be read, there are none.
    """

    name = "binarized_mnist"
    image_shape = (1, 28, 28)
    scale = MNIST.scale
    test_size = MNIST.test_size

    def __init__(
        self,
        root: str | None = None,
        binarization: Binarization = "fixed",
        published: bool = True,
        repo_id: str = "ylecun/mnist",
        binarization_seed: int = 0,
        batch_size: int = 128,
        train_size: int = 50_000,
        val_size: int = 10_000,
        seed: int = 0,
        eval_batch_size: int = 1000,
        num_workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        super().__init__(
            binarization,
            binarization_seed,
            batch_size,
            train_size,
            val_size,
            seed,
            eval_batch_size,
            num_workers,
            pin_memory,
            drop_last,
        )
        self.root = root
        self.published = published
        self.repo_id = repo_id
        if binarization == "fixed" and not published:
            self.name = f"{self.name}{UNPUBLISHED}"
        if binarization != "fixed":
            self._check_sizes({"train_size + val_size": (train_size + val_size, MNIST.source_size)})
        elif published:
            self._check_sizes(
                {
                    "train_size": (train_size, _PUBLISHED["train"].rows),
                    "val_size": (val_size, _PUBLISHED["val"].rows),
                }
            )

    @property
    def resampled(self) -> bool:
        return self.binarization == "dynamic"

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What an image goes through before the model, as plain data."""
        found = super().preprocessing
        if self.binarization == "fixed":  # the files hold 0 and 1
            del found["scale"]
        return found

    @property
    def facts(self) -> dict[str, Any]:
        """The dataset, its splits and its batches as plain data, for tables and model cards."""
        fixed = self.binarization == "fixed"
        return super().facts | ({"published": self.published} if fixed else {})

    def prepare_data(self) -> None:
        if self.binarization == "fixed":
            self._read_files()  # so that one process parses the text, and all map what it kept
        else:
            self._mnist().prepare_data()

    def read(self) -> dict[str, ImageSet]:
        if self.binarization != "fixed":
            mnist = self._mnist()
            grey = mnist.read()
            unpublished = mnist.name.removeprefix(MNIST.name)
            self.name = f"{BinarizedMNIST.name}-{self.binarization}{unpublished}"
            return self.binarize({name: images.numpy() for name, (images, _) in grey.items()})
        sets: dict[str, ImageSet] = {
            name: PackedImages(bits, self.image_shape) for name, bits in self._read_files().items()
        }
        sizes = {"train": self.train_size, "val": self.val_size}
        self._check_sizes({f"{name}_size": (n, len(sets[name])) for name, n in sizes.items()})
        return sets | {name: sets[name].pick(range(n)) for name, n in sizes.items()}

    def _mnist(self) -> MNIST:
        return MNIST(self.root, self.repo_id, train_size=self.train_size, val_size=self.val_size)

    def _read_files(self) -> dict[str, np.ndarray]:
        """The bits of the three files."""
        files = _find(local_folder(self.root, "binarized_mnist"))
        found = {name: load_bits(path, self.in_features) for name, path in files.items()}
        if self.published:
            for name, bits in found.items():
                _check(bits, _PUBLISHED[name], self.in_features, files[name])
        return found

    def _check_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        for what, (wanted, available) in sizes.items():
            if wanted > available:
                raise ValueError(
                    f"{what} {wanted:,} exceeds the {available:,} images there are for it in "
                    f"{self.name}: lower it"
                )


def _find(folder: Path | None) -> dict[str, Path]:
    """The file of each set."""
    if folder is None:
        raise FileNotFoundError(f"no binarized MNIST: {_HELP}")
    if not folder.exists():
        raise FileNotFoundError(f"no folder {folder}: {_HELP}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: give the folder of the three files")
    files, missing = {}, []
    for name, published in _PUBLISHED.items():
        plain = folder / f"binarized_mnist_{published.word}.amat"
        there = [path for path in (plain, plain.with_name(f"{plain.name}.gz")) if path.is_file()]
        if there:
            files[name] = there[0]
        else:
            missing.append(plain.name)
    if missing:
        found = sorted(path.name for path in folder.iterdir())
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)} (or .gz), it has "
            f"{', '.join(found[:8]) or 'nothing'}: {_HELP}"
        )
    return files


def _check(bits: np.ndarray, published: _Published, pixels: int, path: Path) -> None:
    """Whether these are the images that were published."""
    if hashlib.sha256(bits.tobytes()).hexdigest() == published.digest:
        return
    rows, ones = len(bits), int(np.unpackbits(bits, axis=1).sum(dtype=np.int64))
    other = (
        "or, if these images are meant, give --data.published false (published=False in Python), "
        "which gives the dataset another name in tables"
    )
    if rows != published.rows:
        what = "it is truncated there" if rows < published.rows else "it is another file"
        raise ValueError(
            f"{path} ends with line {rows:,}, expected {published.rows:,} lines: {what}; copy it "
            f"again, {other}"
        )
    if ones != published.ones:
        fraction, expected = (count / (rows * pixels) for count in (ones, published.ones))
        raise ValueError(
            f"{path} has {ones:,} ones, a fraction of {fraction:.5f}, expected "
            f"{published.ones:,}, a fraction of {expected:.5f}: it is damaged or another "
            f"binarization; take the published file, {other}"
        )
    raise ValueError(
        f"{path} has as many images and ones as the published file, but other images or another "
        f"order: take the published file, {other}"
    )
