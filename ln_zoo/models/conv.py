"""Convolutional network on images (paper, section 6.7)."""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from ln_zoo.layers import Conv2d, Linear
from ln_zoo.models.classifier import SequentialClassifier
from ln_zoo.norms import LayerNorm, Norm, from_config
from ln_zoo.utils.checks import check_at_least


class ConvClassifier(SequentialClassifier):
    """Blocks of 3 x 3 convolutions, each followed by 2 x 2 max-pooling, a dense layer, a softmax.

    The paper's experiment with convolutional networks (section 6.7) states neither network nor
    numbers. The default is conv 32, conv 32, pool, conv 64, conv 64, pool, dense 256, K logits,
    with ReLU and padding that keeps the size. The norm acts on the convolutions and the dense
    layer, not on the logits, whose scale carries the confidence of the softmax. The network
    computes in torch's faster ``channels_last`` memory format.

    Args:
        image_shape: channels C, height H and width W of the images; (1, 28, 28) for MNIST.
        num_classes: number K of classes.
        channels: the channels of each convolution, a list for each block; at least one block.
        hidden_size: size of the dense layer.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`,
            whose ``convolution`` selects groups of statistics and gains.
        optimizer: ``"adam"``, or ``"sgd"`` with momentum 0.9.
        lr: learning rate.

    Shapes: input (N, C, H, W), output: logits (N, K). ValueError for inputs of another shape.

    Example:
        >>> model = ConvClassifier((1, 8, 8), channels=[[4], [8]], hidden_size=16)
        >>> model(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] | list[int] = (1, 28, 28),
        num_classes: int = 10,
        channels: tuple[tuple[int, ...], ...] | list[list[int]] = ((32, 32), (64, 64)),
        hidden_size: int = 256,
        norm: Norm | None = None,
        optimizer: Literal["adam", "sgd"] = "adam",
        lr: float = 1e-3,
    ) -> None:
        super().__init__(lr, optimizer)
        image_shape, blocks = list(image_shape), [list(block) for block in channels]
        _check(image_shape, blocks, hidden_size, num_classes)
        norm = LayerNorm() if norm is None else from_config(norm)
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm, image_shape=image_shape, channels=blocks)
        self.image_shape = tuple(image_shape)
        features, *size = image_shape
        layers: list[nn.Module] = []
        for block in blocks:
            for outputs in block:
                positions = (size[0], size[1])
                conv = Conv2d(features, outputs, 3, padding="same", norm=norm, positions=positions)
                layers += [conv, nn.ReLU()]
                features = outputs
            layers.append(nn.MaxPool2d(2))
            size = [length // 2 for length in size]
        layers += [nn.Flatten(), Linear(features * prod(size), hidden_size, norm=norm)]
        layers += [nn.ReLU(), Linear(hidden_size, num_classes)]
        self.network = nn.Sequential(*layers)

    def check(self, inputs: Tensor) -> Tensor:
        if not isinstance(inputs, Tensor) or inputs.shape[1:] != self.image_shape:
            given = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
            # An odd size may pool to the size of an even one without an error.
            raise ValueError(
                f"this model reads images (N, {', '.join(map(str, self.image_shape))}), got "
                f"inputs {given}: give it such images, as model.card.preprocess makes them, or "
                "make it with their image_shape (C, H, W)"
            )
        # Weights need no conversion: a convolution's output has its input's format.
        return inputs.to(memory_format=torch.channels_last)


def _check(
    image_shape: list[int], blocks: list[list[int]], hidden_size: int, num_classes: int
) -> None:
    if len(image_shape) != 3:
        raise ValueError(f"image_shape must be channels, height and width, got {image_shape}")
    if not blocks:
        raise ValueError("channels must have at least one block of convolutions, got []")
    if not all(blocks):
        raise ValueError(f"every block must have at least one convolution, got channels={blocks}")
    channels = [size for block in blocks for size in block]
    check_at_least(1, image_shape=image_shape, channels=channels)
    check_at_least(1, hidden_size=hidden_size, num_classes=num_classes)
    if min(image_shape[1:]) < 2 ** len(blocks):
        raise ValueError(
            f"image_shape {image_shape} is too small for {len(blocks)} pools, each of which halves "
            f"it: give {2 ** len(blocks)} x {2 ** len(blocks)} or more, or fewer blocks in channels"
        )
