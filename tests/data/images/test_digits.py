"""Digits, also binarized, and the sets of images that binarized data share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_support import SETS, in_order, ready
from sklearn import datasets
from sklearn.model_selection import train_test_split

from ln_zoo.data import BinarizedDigits, Digits
from ln_zoo.data.images.batches import PackedImages, golden_order
from ln_zoo.data.images.digits import load_digits, stratified_split


def sets_of(**options) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return Digits(**options).read()


def test_splits_are_disjoint_complete_and_stratified():
    sets = sets_of()
    assert [len(labels) for _, labels in sets.values()] == [1297, 200, 300]
    for images, labels in sets.values():
        share = labels.bincount(minlength=10) / len(labels)
        assert 0.09 < share.min() <= share.max() < 0.11
        assert images.shape[1:] == (1, 8, 8)
    images = torch.cat([images for images, _ in sets.values()]).flatten(1)
    assert images.dtype == torch.uint8
    # scikit-learn's set has no two equal images, so equal rows would be a repeated example.
    assert len(images.unique(dim=0)) == 1797


@pytest.mark.parametrize("val_size", [10, 200, 333, 1000])
def test_splits_are_those_of_scikit_learn(val_size: int) -> None:
    digits = datasets.load_digits()
    images, labels = load_digits()
    assert np.array_equal(images, digits.images)
    assert np.array_equal(labels, digits.target)
    given = {"random_state": 0, "stratify": labels}
    expected = train_test_split(np.arange(1797), test_size=val_size, **given)
    for found, indices in zip(stratified_split(labels, val_size), expected, strict=True):
        assert np.array_equal(found, indices)


def test_test_set_is_always_the_same():
    for options in ({"seed": 3}, {"train_size": 100, "val_size": 50}):
        for found, expected in zip(sets_of(**options)["test"], sets_of()["test"], strict=True):
            assert torch.equal(found, expected)


def test_a_smaller_training_set_is_part_of_the_larger():
    assert torch.equal(sets_of(train_size=100)["train"][0], sets_of()["train"][0][:100])


def test_batches_are_in_the_unit_interval():
    data = ready(Digits(batch_size=32))
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (32, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    whole = torch.cat([images for images, _ in data.train_eval_dataloader()])
    assert (whole.min(), whole.max()) == (0, 1)
    assert data.in_features == 64


def test_digits_of_the_size_of_mnist():
    data = ready(Digits(image_size=28))
    assert (data.name, data.image_shape, data.in_features) == ("digits-28", (1, 28, 28), 784)
    test = data.evaluation_set("test")
    assert test.inputs.dtype == torch.uint8
    expected = in_order(ready(BinarizedDigits(image_size=28, binarization="grey")), "test")
    assert torch.equal(test.inputs / data.scale, expected)
    assert torch.equal(test.labels, sets_of()["test"][1])


# Binarized


def digits(*arguments, **options) -> BinarizedDigits:
    return ready(BinarizedDigits(*arguments, **options))


@pytest.mark.parametrize("image_size", [8, 9, 16, 28])
def test_images_are_binary_and_of_the_size_asked_for(image_size: int) -> None:
    data = digits(image_size=image_size)
    shape = (1, image_size, image_size)
    for name, size in {"train": 1297, "val": 200, "test": 300}.items():
        images = in_order(data, name)
        assert (images.shape, images.dtype) == ((size, *shape), torch.float32)
        assert images.unique().tolist() == [0, 1]
    assert (data.image_shape, data.in_features) == (shape, image_size**2)
    (batch,) = next(iter(data.train_dataloader()))
    assert batch.shape == (32, *shape)


@pytest.mark.parametrize("sizes", [{}, {"train_size": 100, "val_size": 50}])
def test_at_8_pixels_the_digits_and_splits_are_as_they_are(sizes: dict[str, int]) -> None:
    grey, above = (digits(8, binarization=name, **sizes) for name in ("grey", "threshold"))
    for name, (images, _) in Digits(**sizes).read().items():
        torch.testing.assert_close(in_order(grey, name), images / 16, rtol=0, atol=1e-7)
        assert torch.equal(in_order(above, name), (images > 8).float())


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

    data = digits(image_size=image_size, binarization="grey")
    grey = in_order(data, "test")
    middle = slice(before, before + digit)
    inside = grey[:, :, middle, middle].numpy()
    np.testing.assert_allclose(inside, large, rtol=0, atol=0.5 / 240 + 1e-6)
    assert grey.sum().item() == pytest.approx(inside.sum(), rel=1e-6)
    assert data.preprocessing["digit_size"] == digit


def test_fixed_images_are_drawn_once_by_their_seed() -> None:
    first = digits()
    for name in SETS:
        assert torch.equal(in_order(digits(seed=5, batch_size=7), name), in_order(first, name))
        assert not torch.equal(in_order(digits(binarization_seed=1), name), in_order(first, name))
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
    assert (len(packed.pick([1])), len(packed)) == (1, shape[0])


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12, 13, 100, 300, 1000, 10_000])
def test_beginnings_of_a_spread_order_lie_evenly(n: int) -> None:
    order = golden_order(n)
    assert sorted(order.tolist()) == list(range(n))
    for count in range(1, min(n, 130) + 1):
        chosen = np.sort(order[:count])
        gaps = np.diff(np.append(chosen, chosen[0] + n))
        assert gaps.max() <= 2 * n / count
