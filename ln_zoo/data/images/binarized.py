"""Binarized MNIST: the files of Larochelle and Murray (2011), and other binarizations."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ln_zoo.data.archives import read_file
from ln_zoo.data.folders import check_folder, find_files, local_folder
from ln_zoo.data.images.batches import Binarization, BinarizedImageData, ImageSet, PackedImages
from ln_zoo.data.images.mnist import MNIST, UNPUBLISHED

_MAX_BYTES = 1_000_000_000  # bytes of a text file; the training set has 78 MB


class _Published(NamedTuple):
    """The published ``binarized_mnist_{word}.amat``, and the SHA-256 of its packed bits."""

    word: str
    rows: int
    ones: int
    digest: str


_DIGESTS = (
    "727146c35424b019f3e350e1e69faa05644a0abaf787e3f4e1a9632220a13906",
    "a256ac44ae26be720fad8616a05ed6ecfd1619930d9a208379bb2a4405df5b6d",
    "9fcd8da6f0fdf09b2ba30fe63a0bb784042a0de82563172530229b983e294ff2",
)
_PUBLISHED = {
    "train": _Published("train", 50_000, 5_118_041, _DIGESTS[0]),
    "val": _Published("valid", 10_000, 1_028_036, _DIGESTS[1]),
    "test": _Published("test", 10_000, 1_038_896, _DIGESTS[2]),
}
_HELP = (
    "Hugo Larochelle distributes binarized_mnist_{train,valid,test}.amat at "
    "www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist; --data.root (root= in Python) "
    "or a folder binarized_mnist in $LN_ZOO_DATA has them, gzipped or not"
)


class BinarizedMNIST(BinarizedImageData):
    """Binarized MNIST, 28 x 28 pixels of 0 and 1, without labels.

    ``fixed``, the default, is the binarization in which likelihoods are reported (Salakhutdinov and
    Murray 2008; Larochelle and Murray, AISTATS 2011): each pixel of MNIST sampled once; 50,000
    training, 10,000 validation and 10,000 test images. ``root`` has ``binarized_mnist_train.amat``,
    ``..._valid.amat`` and ``..._test.amat``, gzipped or not.

    The other binarizations use MNIST's grey levels; ``root`` and ``repo_id`` as in `MNIST`.
    Training takes the first ``train_size`` of its 60,000 images, validation the last ``val_size``.

    Args:
        root: folder of a local copy; default: the folder ``binarized_mnist`` (``mnist`` for other
            binarizations) in ``$LN_ZOO_DATA``.
        published: accept the published images only. Otherwise, under ``fixed``, accept other files
            of this form, of any length; tables list them under another name.
        repo_id: MNIST on the hub, used by other binarizations without a local copy.
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
        batch_size: int = 128,
        train_size: int = 50_000,
        val_size: int = 10_000,
        eval_batch_size: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size,
            train_size,
            val_size,
            binarization,
            eval_batch_size=eval_batch_size,
            **options,
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
        found = super().preprocessing
        if self.binarization == "fixed":  # the files are binary
            del found["scale"]
        return found

    @property
    def metadata(self) -> dict[str, Any]:
        fixed = self.binarization == "fixed"
        return super().metadata | ({"published": self.published} if fixed else {})

    def prepare_data(self) -> None:
        if self.binarization == "fixed":
            _find(local_folder(self.root, "binarized_mnist"))
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
        files = _find(local_folder(self.root, "binarized_mnist"))
        found = {name: read_bits(path, self.in_features) for name, path in files.items()}
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


def read_bits(path: Path, columns: int) -> np.ndarray:
    """Read a text matrix of 0 and 1 with P columns, packed to uint8 (N, ceil(P / 8))."""
    text = read_file(path, _MAX_BYTES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file
            values = np.loadtxt(io.BytesIO(text), np.uint8, comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a text matrix of 0 and 1 ({error}): it is damaged or truncated, copy "
            "it again"
        ) from error
    if values.shape[1] != columns or values.max(initial=0) > 1:
        raise ValueError(
            f"{path} has {len(values):,} lines of {values.shape[1]:,} values up to "
            f"{values.max(initial=0)}, expected {columns:,} values of 0 or 1: "
            "it is truncated or another file"
        )
    return np.packbits(values, axis=1)


def _find(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        raise FileNotFoundError(f"no binarized MNIST: {_HELP}")
    check_folder(folder, _HELP)
    plain = {name: f"binarized_mnist_{of.word}.amat" for name, of in _PUBLISHED.items()}
    names = {name: (file, f"{file}.gz") for name, file in plain.items()}
    return find_files(folder, names, _HELP, required=True)


def _check(bits: np.ndarray, published: _Published, pixels: int, path: Path) -> None:
    if hashlib.sha256(bits.tobytes()).hexdigest() == published.digest:
        return
    ones = int(np.unpackbits(bits, axis=1).sum(dtype=np.int64))
    raise ValueError(
        f"{path} has {len(bits):,} images and {ones:,} ones (a fraction of "
        f"{ones / (len(bits) * pixels):.5f}), the published file {published.rows:,} images and "
        f"{published.ones:,} ones ({published.ones / (published.rows * pixels):.5f}) in a certain "
        "order: copy it again, or give --data.published false (published=False in Python), which "
        "gives the dataset another name in tables"
    )
