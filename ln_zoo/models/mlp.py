"""Permutation-invariant MNIST (paper, section 6.6)."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from ln_zoo.layers import Linear
from ln_zoo.models.arguments import check_inputs
from ln_zoo.models.classifier import SequentialClassifier
from ln_zoo.norms import Identity, LayerNorm, Norm, from_config
from ln_zoo.utils.checks import check_at_least, check_choice

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MLPClassifier(SequentialClassifier):
    r"""A fully connected classifier, 784-1000-1000-10 in the paper (section 6.6, Figure 6).

    Under layer norm the paper normalises the hidden layers only, since the scale of the logits
    carries the confidence of the softmax; under batch norm all layers. It states neither activation
    nor learning rate nor initial weights; here they are ReLU, 1e-3 and torch's.

    Args:
        in_features: size I of a flattened input; 784 for MNIST.
        hidden_sizes: sizes of the hidden layers.
        num_classes: number K of classes.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
        normalize_logits: apply the norm to the last layer too. Default: as in the paper, only for
            batch-dependent norms.
        activation: ``"relu"`` or ``"tanh"``.
        lr: learning rate of Adam.

    Shapes: input (N, \*) with I numbers per example, output: logits (N, K).

    Example:
        >>> import torch
        >>> model = MLPClassifier(64, hidden_sizes=[32], num_classes=10)
        >>> model(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden_sizes: tuple[int, ...] | list[int] = (1000, 1000),
        num_classes: int = 10,
        norm: Norm | None = None,
        normalize_logits: bool | None = None,
        activation: Literal["relu", "tanh"] = "relu",
        lr: float = 1e-3,
    ) -> None:
        super().__init__(lr)
        check_at_least(1, in_features=in_features, num_classes=num_classes)
        check_at_least(1, hidden_sizes=hidden_sizes)
        hidden_sizes = list(hidden_sizes)
        norm = LayerNorm() if norm is None else from_config(norm)
        normalize_logits = norm.batch_dependent if normalize_logits is None else normalize_logits
        check_choice("activation", activation, _ACTIVATIONS)
        sizes = [in_features, *hidden_sizes, num_classes]
        self.save_hyperparameters()
        self.resolve_hyperparameters(
            norm, hidden_sizes=hidden_sizes, normalize_logits=normalize_logits
        )
        self.in_features = in_features
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes[:-1]):
            layers += [Linear(inputs, outputs, norm=norm), _ACTIVATIONS[activation]()]
        layers.append(Linear(sizes[-2], num_classes, norm=norm if normalize_logits else Identity()))
        self.network = nn.Sequential(*layers)

    @property
    def multiplications(self) -> int:
        layers = (layer for layer in self.network if isinstance(layer, Linear))
        return sum(layer.in_features * layer.out_features for layer in layers)

    def check(self, inputs: Tensor) -> Tensor:
        check_inputs(inputs, self.in_features)
        return inputs
