"""scikit-learn's handwritten digits as binary images: no download."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ln_zoo.data.binarized import Binarization, BinarizedImageData, ImageSet
from ln_zoo.data.digits import Digits
from ln_zoo.data.loading import check_at_least

_SMALLEST = 8
"""Side of an image as scikit-learn has it, pixels."""
_BOX = 5 / 7
"""Share of the side that a digit takes, as the 20 pixels of MNIST's 28."""


class BinarizedDigits(BinarizedImageData):
    """scikit-learn's 1,797 handwritten digits as binary images in the manner of binarized MNIST.

    The 8 x 8 grey images are enlarged (bilinear) to 5/7 of the side and lie in the middle, like
    MNIST's 20 x 20 digits in 28 x 28; then they are binarized, by default with every pixel drawn
    once. With ``image_size=8`` they are taken as they are. For tests and first steps: a likelihood
    of these images says nothing beside one of MNIST. The splits are those of `Digits`.

    Args:
        image_size: side of an image, pixels, at least 8.
        binarization: ``fixed``, ``dynamic``, ``threshold`` or ``grey``, as `BinarizedImageData`.
        binarization_seed: seed of the drawn pixels.
        batch_size: training images per step of one process.
        train_size: number of training images; fewer than all that remain are a part of them.
        val_size: number of validation images.
        seed: seed of the order of training images.
        eval_batch_size: images per batch in evaluation.
        num_workers: processes that fetch batches; the data are in memory, 0 is fastest.
        pin_memory: page-locked batches, for faster copies to a GPU.
        drop_last: leave out a last training batch of fewer than ``batch_size`` images. A last
            training batch of a single image is always left out.

    Raises:
        ValueError: an image size below 8, an empty batch or split, splits that would overlap, or a
            binarization that is none of those above.

    Example:
        >>> data = BinarizedDigits(batch_size=32)
        >>> data.setup()
        >>> (images,) = next(iter(data.train_dataloader()))
        >>> images.shape, images.unique()
        (torch.Size([32, 1, 28, 28]), tensor([0., 1.]))
    """

    name = "binarized_digits"
    # Digits have 16 levels; fifteen between each for what lies between enlarged pixels.
    scale = 240
    test_size = Digits.test_size

    def __init__(
        self,
        image_size: int = 28,
        binarization: Binarization = "fixed",
        binarization_seed: int = 0,
        batch_size: int = 32,
        train_size: int = 1297,
        val_size: int = 200,
        seed: int = 0,
        eval_batch_size: int = 100,
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
        check_at_least(_SMALLEST, image_size=image_size)
        self.image_shape = (1, image_size, image_size)
        self._source = Digits(train_size=train_size, val_size=val_size)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What an image goes through before the model, as plain data."""
        return super().preprocessing | {"digit_size": _digit_size(self.image_shape[-1])}

    def read(self) -> dict[str, ImageSet]:
        factor = self.scale // self._source.scale
        side = self.image_shape[-1]
        return self.binarize(
            {
                name: _enlarge(images.numpy() * np.uint8(factor), side)
                for name, (images, _) in self._source.read().items()
            }
        )


def _digit_size(side: int) -> int:
    """Side of the digit in an image, pixels."""
    return max(_SMALLEST, round(_BOX * side))


def _enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Grey images uint8 (N, 1, 8, 8) as (N, 1, side, side)."""
    size = _digit_size(side)
    digits = torch.nn.functional.interpolate(
        torch.from_numpy(images).double(), (size, size), mode="bilinear", align_corners=False
    )
    before = (side - size) // 2
    after = side - size - before
    around = [(0, 0), (0, 0), (before, after), (before, after)]
    return np.pad(digits.round().to(torch.uint8).numpy(), around)
