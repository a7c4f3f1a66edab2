"""Preprocessing of images: size, range and binarization of the training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ln_zoo.utils.errors import CardError

#: Modes of PIL whose pixels are brightness in 8 bits, or become it without a loss of meaning.
_PIL_MODES = ("1", "L", "P", "RGB")
_PIL_MAXIMUM = 255


def preprocess(preprocessing: Mapping[str, Any], images: Any, seed: int = 0) -> Tensor:
    """Implementation of `ln_zoo.zoo.Card.preprocess`."""
    if "image_shape" not in preprocessing:
        raise CardError(
            "this model takes no images: its preprocessing has no image_shape; card.preprocessing "
            "lists its preprocessing, and its README has an example"
        )
    shape = tuple(preprocessing["image_shape"])
    if isinstance(images, list | tuple):
        if not images:
            raise ValueError("there is no image to prepare: the list is empty")
        batch = torch.cat([_one(image, preprocessing, shape) for image in images])
    else:
        batch = _one(images, preprocessing, shape)
    return _binarized(batch, preprocessing.get("binarization", "grey"), seed)


def _one(image: Any, preprocessing: Mapping[str, Any], shape: tuple[int, ...]) -> Tensor:
    """One image, or an array of several, float32 (N, C, H, W) in [0, 1]."""
    scale = preprocessing.get("scale", _PIL_MAXIMUM)
    if hasattr(image, "convert") and hasattr(image, "mode"):
        image, scale = _of_pil(image, shape[0]), _PIL_MAXIMUM
    elif not isinstance(image, Tensor | np.ndarray):
        raise TypeError(
            "an image must be a PIL image, a NumPy array or a tensor, or a list of such, got "
            f"{type(image).__name__}"
        )
    if isinstance(image, np.ndarray):
        try:
            image = torch.from_numpy(np.ascontiguousarray(image))
        except TypeError as error:
            raise TypeError(f"an image cannot be an array of {image.dtype}") from error
    binary = preprocessing.get("binarization", "grey") != "grey"
    return _in_range(_shaped(image, shape), scale, binary)


def _of_pil(image: Any, channels: int) -> np.ndarray:
    if image.mode not in _PIL_MODES:
        raise ValueError(
            f"an image of mode {image.mode!r} has no brightness in 8 bits, or is transparent: lay "
            'it on a background and convert it, as in image.convert("RGB")'
        )
    pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _shaped(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The images as a batch (N, C, H, W)."""
    given = tuple(values.shape)
    # Grey images may leave out their one channel.
    full = given if shape[0] > 1 or values.dim() == 4 else (*given[:-2], 1, *given[-2:])
    fits = full[-3:] == shape and values.dim() <= 4
    if not fits:
        size = " x ".join(map(str, shape[1:]))
        raise ValueError(
            f"this model reads images of {size} pixels, channels first: give {shape}, "
            f"{('N', *shape)}{f' or {shape[1:]}' if shape[0] == 1 else ''}, got {given}; resize "
            "others, as in PIL's image.resize, and centre what they show as the training images do"
        )
    return values.reshape(-1, *shape)


def _in_range(values: Tensor, scale: float, binary: bool) -> Tensor:
    """Values in [0, 1] from levels up to the scale, or from fractions."""
    if values.is_complex():
        raise TypeError("an image cannot have complex values")
    if values.dtype == torch.bool or not values.numel():
        return values.float()
    whole = not values.is_floating_point()
    if whole:
        values = values.long()  # torch has no least and greatest of some unsigned integers
    if not values.isfinite().all():
        raise ValueError("an image must have finite values, got some that are NaN or infinite")
    low, high = (value.item() for value in values.aminmax())
    most = scale if whole and not (binary and high <= 1) else 1
    levels = f"whole levels from 0 to {scale:g}, or fractions from 0.0 to 1.0"
    if low < 0 or high > most:
        raise ValueError(
            f"training had {levels}; these {'whole numbers' if whole else 'floats'} reach from "
            f"{low:g} to {high:g}: give the stored levels as integers, or divide them by their "
            "largest possible value"
        )
    # All black is an image. One whose brightest pixel is a single level is a mistake.
    if 0 < high / most <= 1 / scale < 1:
        raise ValueError(
            f"training had {levels}; these reach to {high:g} only, a single level: they were "
            "divided twice, or are 0 and 1 as integers, which go in as bool or float"
        )
    return values.float() / most


def _binarized(images: Tensor, binarization: str, seed: int) -> Tensor:
    if binarization == "grey":
        return images
    if binarization == "threshold":
        return (images > 0.5).float()
    generator = torch.Generator().manual_seed(seed)
    # On the CPU: the same draw on every device.
    return (torch.rand(images.shape, generator=generator).to(images.device) < images).float()
