"""Data modules of binarized images without labels."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ln_zoo.data.folders import check_folder, find_files, local_folder
from ln_zoo.data.images.batches import GreyImages, ImageSet, PackedImages, ResampledImages
from ln_zoo.data.images.dataset import (
    DIGIT_SIDE,
    ENLARGED_SCALE,
    MNIST,
    UNPUBLISHED,
    Digits,
    ImageData,
    digit_size,
    enlarge,
)
from ln_zoo.data.images.files import read_bits
from ln_zoo.data.loading import subset
from ln_zoo.utils.checks import check_at_least, check_choice

Binarization = Literal["fixed", "dynamic", "threshold", "grey"]

_SETS = ("train", "val", "test")


class _Published(NamedTuple):
    """The published ``binarized_mnist_{word}.amat``, and the SHA-256 of its packed bits."""

    word: str
    rows: int
    digest: str


_PUBLISHED = {
    "train": _Published(
        "train", 50_000, "727146c35424b019f3e350e1e69faa05644a0abaf787e3f4e1a9632220a13906"
    ),
    "val": _Published(
        "valid", 10_000, "a256ac44ae26be720fad8616a05ed6ecfd1619930d9a208379bb2a4405df5b6d"
    ),
    "test": _Published(
        "test", 10_000, "9fcd8da6f0fdf09b2ba30fe63a0bb784042a0de82563172530229b983e294ff2"
    ),
}
_HELP = (
    "Hugo Larochelle distributes binarized_mnist_{train,valid,test}.amat at "
    "www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist; --data.root (root= in Python) "
    "or a folder binarized_mnist in $LN_ZOO_DATA has them, gzipped or not"
)


class BinarizedImageData(ImageData, ABC):
    """Binary images of one shape, for models of their likelihood.

    A batch is ``(images,)``: float32 (N, C, H, W) of 0 and 1, in [0, 1] with
    ``binarization="grey"``. A subclass states its name and the attributes below and implements
    `read`. Evaluation is in an order spread over the set, prediction in the order of the file.

    The binarization changes a likelihood by several nats, so tables list all but ``fixed`` under
    another name:

    * ``fixed``: each pixel sampled once.
    * ``dynamic``: sampled in each epoch of training, with the grey level as probability; evaluation
      uses one sample, the same for every epoch, model and run.
    * ``threshold``: 1 above half of the highest grey level.
    * ``grey``: the grey levels as probabilities.

    Args:
        binarization: ``fixed``, ``dynamic``, ``threshold`` or ``grey``.
        binarization_seed: seed of the samples.
    """

    batch_kind = "images"
    _sets: dict[str, ImageSet]

    def __init__(
        self,
        batch_size: int,
        train_size: int,
        val_size: int,
        binarization: Binarization = "fixed",
        binarization_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, train_size, val_size, **options)
        check_choice("binarization", binarization, get_args(Binarization))
        check_at_least(0, binarization_seed=binarization_seed)
        self.binarization = binarization
        self.binarization_seed = binarization_seed
        if binarization != "fixed":
            self.name = f"{self.name}-{binarization}"

    @abstractmethod
    def read(self) -> dict[str, ImageSet]:
        """Read the three sets by name."""

    @property
    def resampled(self) -> bool:
        """Whether the images depend on ``binarization_seed``."""
        return self.binarization in ("fixed", "dynamic")

    @property
    def preprocessing(self) -> dict[str, Any]:
        return {"binarization": self.binarization} | super().preprocessing

    @property
    def metadata(self) -> dict[str, Any]:
        seed = {"binarization_seed": self.binarization_seed} if self.resampled else {}
        return super().metadata | {"binarization": self.binarization} | seed

    def setup(self, stage: str | None = None) -> None:
        if not self._sets:
            self._sets = self.read()

    def training_set(self) -> ImageSet:
        return self._set("train")

    def evaluation_set(self, name: str, examples: int | None = None) -> ImageSet:
        return subset(self._set(name), examples)

    def binarize(self, grey: Mapping[str, np.ndarray]) -> dict[str, ImageSet]:
        """Binarize the three sets of grey images, uint8 (N, C, H, W) up to ``scale``."""
        return {name: self._binarized(grey[name], stream) for stream, name in enumerate(_SETS)}

    def _binarized(self, grey: np.ndarray, stream: int) -> ImageSet:
        if self.binarization == "grey":
            return GreyImages(grey, self.scale)
        if self.binarization == "threshold":
            return PackedImages.pack(grey > self.scale / 2)
        drawn = ResampledImages(grey, self.scale, self.binarization_seed, stream)
        if self.binarization == "dynamic":
            return drawn
        return PackedImages.pack(drawn.images(drawn.numbers) > 0)


class BinarizedDigits(BinarizedImageData):
    """scikit-learn's 1,797 handwritten digits as binary images, for tests and first steps.

    As MNIST's digits, the 8 x 8 images are enlarged (bilinear) to 5/7 of the side and centred. With
    ``image_size=8`` they keep their size. Splits as in `Digits`.

    Args:
        image_size: side of an image, pixels, at least 8.
    """

    name = "binarized_digits"
    scale = ENLARGED_SCALE
    test_size = Digits.test_size

    def __init__(
        self,
        image_size: int = 28,
        *,
        batch_size: int = 32,
        train_size: int = 1297,
        val_size: int = 200,
        eval_batch_size: int = 100,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size, train_size, val_size, eval_batch_size=eval_batch_size, **options
        )
        check_at_least(DIGIT_SIDE, image_size=image_size)
        self.image_shape = (1, image_size, image_size)
        self._source = Digits(train_size=train_size, val_size=val_size)

    @property
    def preprocessing(self) -> dict[str, Any]:
        return super().preprocessing | {"digit_size": digit_size(self.image_shape[-1])}

    def read(self) -> dict[str, ImageSet]:
        side = self.image_shape[-1]
        return self.binarize(
            {
                name: enlarge(images.numpy(), side)
                for name, (images, _) in self._source.read().items()
            }
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
                if hashlib.sha256(bits.tobytes()).hexdigest() != _PUBLISHED[name].digest:
                    raise ValueError(
                        f"{files[name]} has {len(bits):,} images, which are not those published, "
                        "or in another order: copy it again, or give --data.published false "
                        "(published=False in Python), which names the dataset otherwise in tables"
                    )
        return found

    def _check_sizes(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        for what, (wanted, available) in sizes.items():
            if wanted > available:
                raise ValueError(
                    f"{what} {wanted:,} exceeds the {available:,} images there are for it in "
                    f"{self.name}: lower it"
                )


def _find(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        raise FileNotFoundError(f"no binarized MNIST: {_HELP}")
    check_folder(folder, _HELP)
    plain = {name: f"binarized_mnist_{of.word}.amat" for name, of in _PUBLISHED.items()}
    names = {name: (file, f"{file}.gz") for name, file in plain.items()}
    return find_files(folder, names, _HELP, required=True)
