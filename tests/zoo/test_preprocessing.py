"""Pictures as published models take them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from data_support import ready
from PIL import Image
from zoo_support import MakeCard, refuses

from ln_zoo.data import BinarizedDigits, Digits
from ln_zoo.utils.preprocessing import preprocess
from ln_zoo.zoo import load

MNIST = {"scale": 255, "image_shape": [1, 28, 28]}
DIGITS = {"scale": 16, "image_shape": [1, 8, 8]}
COLOURS = {"scale": 255, "image_shape": [3, 4, 5]}
LEVELS = np.arange(784, dtype=np.uint8).reshape(28, 28)


def test_every_form_of_an_image_is_what_training_saw() -> None:
    expected = torch.from_numpy(LEVELS)[None, None].float() / 255
    forms: list[Any] = [
        *(LEVELS, LEVELS[None], LEVELS[None, None], LEVELS[::-1][::-1], np.asfortranarray(LEVELS)),
        *(LEVELS.astype(kind) for kind in (np.int64, np.uint16)),
        torch.from_numpy(LEVELS),
        [torch.from_numpy(LEVELS)],
        LEVELS.astype(np.float32) / np.float32(255),
        Image.fromarray(LEVELS),
        (Image.fromarray(LEVELS).convert("RGB"),),
    ]
    for form in forms:
        got = preprocess(MNIST, form)
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)
    halves = preprocess(MNIST, torch.full((2, 28, 28), 0.5, dtype=torch.float64))
    assert torch.equal(halves, torch.full((2, 1, 28, 28), 0.5))
    assert preprocess(MNIST, [LEVELS, LEVELS[None], halves]).shape == (4, 1, 28, 28)
    assert preprocess(MNIST, np.zeros((28, 28), np.uint8)).sum() == 0
    assert preprocess(MNIST, np.ones((28, 28), bool)).min() == 1


def test_levels_of_the_dataset() -> None:
    data = ready(Digits())
    images, _ = data.evaluation_set("test", 20)[torch.arange(20)]
    stored = data.evaluation_set("test", 20).inputs
    assert torch.equal(preprocess(data.preprocessing, stored), images)
    assert torch.equal(preprocess(data.preprocessing, images), images)
    # A picture has 256 levels whatever the data had.
    picture = Image.fromarray(np.full((8, 8), 51, np.uint8))
    assert torch.equal(preprocess(DIGITS, picture), torch.full((1, 1, 8, 8), 0.2))


def test_colours() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    expected = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
    assert torch.equal(preprocess(COLOURS, Image.fromarray(pixels)), expected)
    assert torch.equal(preprocess(COLOURS, np.moveaxis(pixels, 2, 0)), expected)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (LEVELS.astype(np.float32), "floats reach from 0 to 255: give the stored levels as int"),
        (LEVELS / 127.5 - 1, "reach from -1 to 1:"),
        (LEVELS.astype(np.int64) * 2, "whole numbers reach from 0 to 510"),
        (LEVELS.astype(np.int64) - 1, "whole numbers reach from -1 to 254"),
        (LEVELS / 255 / 255, r"reach to 0\.0039.* only, a single level: they were divided twice"),
        ((LEVELS > 99).astype(np.uint8), "are 0 and 1 as integers, which go in as bool or float"),
        (np.full((28, 28), np.nan), "finite values"),
        (np.full((28, 28), -np.inf), "finite values"),
        (LEVELS.ravel(), r"give \(1, 28, 28\), \('N', 1, 28, 28\) or \(28, 28\), got \(784,\)"),
        (LEVELS[..., None], r"28 x 28 pixels, channels first.* got \(28, 28, 1\)"),
        (np.zeros((2, 3, 28, 28)), r"got \(2, 3, 28, 28\)"),
        (np.zeros((32, 32)), r"got \(32, 32\); resize"),
        (Image.new("L", (32, 28)), r"got \(1, 28, 32\); resize"),
        (Image.new("RGBA", (28, 28)), "mode 'RGBA' has no brightness in 8 bits, or is transparent"),
        (Image.new("I;16", (28, 28)), "mode 'I;16'"),
        ([], "the list is empty"),
    ],
)
def test_what_training_did_not_have_is_refused(image: Any, message: str) -> None:
    refuses(message, preprocess, MNIST, image, error=ValueError)


@pytest.mark.parametrize(
    "image", ["7.png", None, 7, b"", np.array([["a"]]), np.zeros((28, 28), complex), [None]]
)
def test_what_is_no_image_is_refused(image: Any) -> None:
    refuses("an image", preprocess, MNIST, image, error=TypeError)


def test_models_of_binary_images_take_what_their_data_were_drawn_from() -> None:
    stated = BinarizedDigits(binarization="dynamic").preprocessing
    grey = torch.full((4, 1, 28, 28), 0.25)
    grey[0], grey[1] = 0, 1
    drawn = preprocess(stated, grey)
    assert sorted(drawn.unique().tolist()) == [0, 1]
    assert (drawn[0].sum(), drawn[1].min()) == (0, 1)
    # 1,568 pixels of probability 1/4: 392, give or take 4 standard deviations of 17.
    assert 324 < drawn[2:].sum() < 460
    assert torch.equal(preprocess(stated, grey), drawn)
    assert not torch.equal(preprocess(stated, grey, seed=1), drawn)
    for bits in (drawn, drawn.to(torch.uint8)):
        assert torch.equal(preprocess(stated, bits), drawn)
    assert torch.equal(preprocess(stated | {"binarization": "threshold"}, grey[2:]), 0 * grey[2:])
    assert torch.equal(preprocess(stated | {"binarization": "grey"}, grey), grey)
    # The cards of the first models do not state the scale.
    published = {"binarization": "fixed", "image_shape": [1, 28, 28]}
    black_and_white = 255 * (LEVELS > 99).astype(np.uint8)
    assert np.array_equal(preprocess(published, black_and_white)[0, 0].numpy() > 0, LEVELS > 99)
    refuses("45 to 300", preprocess, published, LEVELS.astype(np.int64) + 45, error=ValueError)


def test_a_loaded_model_prepares_images(make_card: MakeCard) -> None:
    model = load(make_card())
    levels = np.arange(64, dtype=np.uint8).reshape(8, 8) % 17
    image = torch.from_numpy(levels).float() / 16
    assert torch.equal(model.card.preprocess(levels)[0, 0], image)
    assert torch.equal(model(model.card.preprocess([levels])), model(image[None, None]))


def test_models_without_images() -> None:
    refuses("image_shape", preprocess, {"words": "Penn Treebank (nltk)"}, LEVELS)
