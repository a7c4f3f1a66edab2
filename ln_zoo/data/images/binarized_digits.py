"""scikit-learn's handwritten digits as binary images: no download."""

from __future__ import annotations

from typing import Any

from ln_zoo.data.images.batches import BinarizedImageData, ImageSet
from ln_zoo.data.images.digits import DIGIT_SIDE, ENLARGED_SCALE, Digits, digit_size, enlarge
from ln_zoo.utils.checks import check_at_least


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
