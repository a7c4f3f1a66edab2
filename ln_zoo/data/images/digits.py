"""The handwritten digits of scikit-learn, 8 x 8 pixels; no download."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ln_zoo.data.images.dataset import ImageClassificationData
from ln_zoo.utils.checks import check_at_least

#: Side of an original image, pixels.
DIGIT_SIDE = 8
_BOX = 5 / 7  # side of an enlarged digit relative to the image, 20 / 28 as in MNIST
#: Grey levels of enlarged digits: 15 times the original 16, for interpolation.
ENLARGED_SCALE = 240


class Digits(ImageClassificationData):
    """scikit-learn's 1,797 handwritten digits, grey levels 0 to 16, 8 x 8 pixels.

    They are the test part of the UCI "Optical Recognition of Handwritten Digits" (Alpaydin and
    Kaynak, 1998). The 300 test images are fixed; every split is stratified. With ``image_size=28``
    they have MNIST's shape: enlarged (bilinear) to 20 x 20 in the centre, grey levels 0 to 240;
    tables list this version under another name.

    Args:
        image_size: side of an image, pixels: 8 for the original, or more; a digit fills 5/7 of it.

    Example:
        >>> data = Digits(batch_size=32)
        >>> data.setup()
        >>> images, labels = next(iter(data.train_dataloader()))
        >>> images.shape, labels.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    name = "digits"
    num_classes = 10
    image_shape = (1, 8, 8)
    scale = 16
    source_size = 1497
    test_size = 300

    def __init__(
        self,
        batch_size: int = 32,
        train_size: int = 1297,
        val_size: int = 200,
        eval_batch_size: int = 100,
        image_size: int = DIGIT_SIDE,
        **options: Any,
    ) -> None:
        super().__init__(
            batch_size, train_size, val_size, eval_batch_size=eval_batch_size, **options
        )
        check_at_least(DIGIT_SIDE, image_size=image_size)
        if image_size != DIGIT_SIDE:
            self.name = f"{self.name}-{image_size}"
            self.image_shape = (1, image_size, image_size)
            self.scale = ENLARGED_SCALE
        if min(val_size, self.source_size - val_size) < self.num_classes:
            raise ValueError(
                f"val_size must leave at least {self.num_classes} images, one of each class, on "
                f"either side of the {self.source_size} images, got {val_size}"
            )

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        # Imported here: it takes a second.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        grey = digits.images.astype(np.uint8)[:, None]
        if self.image_shape[-1] != DIGIT_SIDE:
            grey = enlarge(grey, self.image_shape[-1])
        images = torch.from_numpy(grey)
        labels = torch.from_numpy(digits.target.astype(np.int64))

        def split(indices: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
            rest, part = train_test_split(
                indices, test_size=size, random_state=0, stratify=labels[indices]
            )
            return rest, part

        rest, test = split(np.arange(len(labels)), self.test_size)
        train, val = split(rest, self.val_size)
        parts = {"train": train[: self.train_size], "val": val, "test": test}
        return {name: (images[part], labels[part]) for name, part in parts.items()}


def digit_size(side: int) -> int:
    """Side of the digit in an image, pixels."""
    return max(DIGIT_SIDE, round(_BOX * side))


def enlarge(images: np.ndarray, side: int) -> np.ndarray:
    """Enlarge digits (N, 1, 8, 8) of 16 levels to images uint8 (N, 1, side, side) of 240."""
    size = digit_size(side)
    levels = torch.from_numpy(images * np.uint8(ENLARGED_SCALE // 16)).double()
    digits = torch.nn.functional.interpolate(
        levels, (size, size), mode="bilinear", align_corners=False
    )
    before = (side - size) // 2
    after = side - size - before
    around = [(0, 0), (0, 0), (before, after), (before, after)]
    return np.pad(digits.round().to(torch.uint8).numpy(), around)
