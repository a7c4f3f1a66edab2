"""scikit-learn's handwritten digits as binary images: no download."""

from __future__ import annotations

from typing import Any

from ln_zoo.data.binarized import Binarization, BinarizedImageData, ImageSet
from ln_zoo.data.digits import DIGIT_SIDE, ENLARGED_SCALE, Digits, digit_size, enlarge
from ln_zoo.data.loading import check_at_least


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
    scale = ENLARGED_SCALE
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
        check_at_least(DIGIT_SIDE, image_size=image_size)
        self.image_shape = (1, image_size, image_size)
        self._source = Digits(train_size=train_size, val_size=val_size)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What an image goes through before the model, as plain data."""
        return super().preprocessing | {"digit_size": digit_size(self.image_shape[-1])}

    def read(self) -> dict[str, ImageSet]:
        side = self.image_shape[-1]
        return self.binarize(
            {
                name: enlarge(images.numpy(), side)
                for name, (images, _) in self._source.read().items()
            }
        )
