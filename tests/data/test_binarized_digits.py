"""Binarized digits, and the sets of images that binarized data share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ln_zoo.data import BinarizedDigits, Digits
from ln_zoo.data.binarized import PackedImages, golden_order


def ready(**options) -> BinarizedDigits:
    data = BinarizedDigits(**options)
    data.prepare_data()
    data.setup()
    return data


def images_of(data: BinarizedDigits, name: str) -> torch.Tensor:
    images = data.evaluation_set(name)
    return images[torch.arange(len(images))][0]


@pytest.mark.parametrize("image_size", [8, 9, 16, 28])
def test_images_are_binary_and_of_the_size_asked_for(image_size: int) -> None:
    data = ready(image_size=image_size)
    for name, size in {"train": 1297, "val": 200, "test": 300}.items():
        images = images_of(data, name)
        assert images.shape == (size, 1, image_size, image_size)
        assert images.dtype == torch.float32
        assert images.unique().tolist() == [0, 1]
    assert data.image_shape == (1, image_size, image_size)
    assert data.in_features == image_size**2
    (batch,) = next(iter(data.train_dataloader()))
    assert batch.shape == (32, 1, image_size, image_size)


def test_at_8_pixels_the_digits_are_as_they_are() -> None:
    levels = {name: images for name, (images, _) in Digits().read().items()}
    grey = ready(image_size=8, binarization="grey")
    above = ready(image_size=8, binarization="threshold")
    for name, images in levels.items():
        torch.testing.assert_close(images_of(grey, name), images / 16, rtol=0, atol=1e-7)
        assert torch.equal(images_of(above, name), (images > 8).float())


@pytest.mark.parametrize(("image_size", "digit", "before"), [(28, 20, 4), (16, 11, 2), (9, 8, 0)])
def test_larger_digits_lie_in_the_middle(image_size: int, digit: int, before: int) -> None:
    """Against bilinear interpolation between the middles of pixels, in float64 from its formula."""
    places = np.clip((np.arange(digit) + 0.5) * 8 / digit - 0.5, 0, 7)
    low = np.minimum(places.astype(int), 6)
    weights = np.zeros((digit, 8))
    weights[np.arange(digit), low] = low + 1 - places
    weights[np.arange(digit), low + 1] = places - low
    small = Digits().read()["test"][0].numpy() / 16
    large = weights @ small @ weights.T

    data = ready(image_size=image_size, binarization="grey")
    grey = images_of(data, "test")
    middle = slice(before, before + digit)
    inside = grey[:, :, middle, middle].numpy()
    np.testing.assert_allclose(inside, large, rtol=0, atol=0.5 / 240 + 1e-6)
    assert grey.sum().item() == pytest.approx(inside.sum(), rel=1e-6)
    assert data.preprocessing["digit_size"] == digit


def test_fixed_images_are_drawn_once_by_their_seed() -> None:
    first = ready()
    for name in ("train", "val", "test"):
        assert torch.equal(images_of(ready(seed=5, batch_size=7), name), images_of(first, name))
        assert not torch.equal(images_of(ready(binarization_seed=1), name), images_of(first, name))
    epochs = []
    for epoch in range(2):
        loader = first.train_dataloader()
        loader.sampler.set_epoch(epoch)
        images = torch.cat([images for (images,) in loader])
        # 1,297 images in batches of 32: the last one of a batch of its own is not left out.
        assert len(images) == 1297
        epochs.append(sorted(image.numpy().tobytes() for image in images))
    assert epochs[0] == epochs[1]
    assert first.metadata["binarization_seed"] == 0


def test_splits_are_those_of_digits() -> None:
    data = ready(image_size=8, binarization="grey", train_size=100, val_size=50)
    for name, (images, _) in Digits(train_size=100, val_size=50).read().items():
        torch.testing.assert_close(images_of(data, name), images / 16, rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(5, 1, 3, 3), (4, 1, 4, 4), (2, 3, 5, 7)])
def test_packed_images(shape: tuple[int, int, int, int]) -> None:
    images = np.random.default_rng(0).random(shape) > 0.5
    packed = PackedImages.pack(images)
    assert packed.rows.shape == (shape[0], -(-np.prod(shape[1:]) // 8))
    order = torch.tensor([1, 0, 1])
    (batch,) = packed[order]
    assert np.array_equal(batch.numpy(), images[order].astype(np.float32))
    (picked,) = packed.pick([1]).pick([0])[torch.tensor([0])]
    assert np.array_equal(picked.numpy(), images[[1]])
    assert len(packed.pick([1])) == 1
    assert len(packed) == shape[0]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12, 13, 100, 300, 1000, 10_000])
def test_beginnings_of_a_spread_order_lie_evenly(n: int) -> None:
    order = golden_order(n)
    assert sorted(order.tolist()) == list(range(n))
    for count in range(1, min(n, 130) + 1):
        chosen = np.sort(order[:count])
        gaps = np.diff(np.append(chosen, chosen[0] + n))
        assert gaps.max() <= 2 * n / count
