"""Pixel-by-pixel MNIST: images as sequences (Le et al. 2015; Cooijmans et al. 2017)."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import init

from ln_zoo.layers import (
    Linear,
    RecurrentLayer,
    layer_config,
    orthogonal_,
    orthogonal_init,
    recurrent_layer,
)
from ln_zoo.models.arguments import check_inputs
from ln_zoo.models.classifier import Classifier
from ln_zoo.norms import LayerNorm, Norm, from_config
from ln_zoo.utils.checks import check_at_least, check_not_negative


class SequenceClassifier(Classifier):
    r"""A recurrent classifier that reads an image a few pixels per step.

    The benchmark of recurrent batch normalisation (Cooijmans et al. 2017, arXiv 1603.09025, section
    5.1): 784 steps of one pixel, in the order of the rows or under one fixed permutation, and a
    softmax on the final state. Initial values are the source's (`orthogonal_init`). The source
    clips the gradient norm to 1: ``gradient_clip_val: 1.0``.

    Differences: the source's code draws pixels with replacement, so about 37 % never appear; here
    the permutation is a true one. Initial states are parameters as there, but start as noise of
    0.1: in a zero state that reads blank pixels, pre-activations have no variance, and gradients of
    layer normalisation grow by 1 / sqrt(eps) at each such step. Recurrent batch norm has the
    source's gain and statistics per step; set its ``max_steps`` to the number of steps, or later
    steps share the last statistics.

    Args:
        in_features: numbers I of a flattened input; 784 for MNIST.
        num_classes: number K of classes.
        hidden_size: size H of the state.
        cell: ``"lstm"``, ``"gru"`` or ``"rnn"`` (tanh); or your own subclass of
            `ln_zoo.layers.RecurrentLayer` (on the command line its class path), stored as
            ``{"class_path": ...}``.
        num_layers: recurrent layers.
        step_features: numbers F read at each of T = I / F steps: 1 for pixels, 28 for the rows of
            MNIST.
        permuted: read the numbers of a flattened input in a permuted order.
        permutation_seed: seed of the permutation, which checkpoints store as ``permutation``.
        norm: the normalisation, or its ``class_path``/``init_args`` dict; default `LayerNorm`.
        normalize: normalised sites of the recurrent layer; default: all. With one pixel per step,
            layer norm of ``W x`` divides by the size of x, so that only the sign of a pixel's
            brightness and, near 0, eps remain: ``["recurrent", "cell"]`` keeps it, with about the
            same accuracy at tuned rates (docs/results/pixels.md).
        initial_noise: standard deviation of noise on each example's initial h while batch
            statistics are in use. Default: 0.1 for a batch-dependent norm, else 0. Edge pixels are
            blank in all images; without noise the first states have no variance within the batch,
            and gradients explode. The source adds noise in unpermuted order only, though a
            permutation may start with edge pixels too, and in evaluation, where it is worse without
            batch statistics.
        optimizer: ``"rmsprop"`` (squared gradients decay by 0.9), ``"adam"`` or ``"sgd"`` (momentum
            0.9).
        lr: learning rate.

    Shapes: input (N, \*) with I numbers per example, output: logits (N, K). ValueError for inputs
    of another size.

    Example:
        >>> model = SequenceClassifier(64, hidden_size=16, permuted=True)
        >>> model(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    metrics = ("nll", "accuracy")
    permutation: Tensor | None

    def __init__(
        self,
        in_features: int = 784,
        num_classes: int = 10,
        hidden_size: int = 100,
        cell: Literal["lstm", "gru", "rnn"] | type[RecurrentLayer] | dict[str, str] = "lstm",
        num_layers: int = 1,
        step_features: int = 1,
        permuted: bool = False,
        permutation_seed: int = 0,
        norm: Norm | None = None,
        normalize: list[str] | None = None,
        initial_noise: float | None = None,
        optimizer: Literal["rmsprop", "adam", "sgd"] = "rmsprop",
        lr: float = 1e-3,
    ) -> None:
        super().__init__(lr, optimizer)
        norm = LayerNorm() if norm is None else from_config(norm)
        cls = recurrent_layer(cell)
        check_at_least(
            1,
            in_features=in_features,
            num_classes=num_classes,
            hidden_size=hidden_size,
            num_layers=num_layers,
            step_features=step_features,
        )
        if in_features % step_features:
            raise ValueError(
                f"step_features {step_features} must divide in_features {in_features}, so that "
                "every time step reads the same number of values"
            )
        if initial_noise is None:
            initial_noise = 0.1 if norm.batch_dependent else 0.0
        check_not_negative(initial_noise=initial_noise)
        self.save_hyperparameters()
        self.resolve_hyperparameters(norm, initial_noise=initial_noise, cell=layer_config(cls))
        self.in_features = in_features
        self.step_features = step_features
        self.initial_noise = initial_noise
        self.recurrent = cls(step_features, hidden_size, num_layers, norm=norm, normalize=normalize)
        self.readout = Linear(hidden_size, num_classes)
        states = len(self.recurrent.cell.states)
        self.initial_states = nn.Parameter(torch.empty(states, num_layers, hidden_size))
        order = None
        if permuted:
            order = self.random_permutation(in_features, permutation_seed)
        self.register_buffer("permutation", order)
        self.reset_parameters()
        self._warn_of_shared_statistics(norm, in_features // step_features)

    def reset_parameters(self) -> None:
        """Re-initialise weights, as the source does, and the norm."""
        self.recurrent.reset_parameters()
        orthogonal_init(self.recurrent)
        orthogonal_(self.readout.weight)
        init.zeros_(self.readout.bias)
        init.normal_(self.initial_states, std=0.1)

    @property
    def head(self) -> nn.Module:
        return self.readout

    @property
    def backbone(self) -> nn.Module:
        return self.recurrent

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.readout(self.forward_features(inputs))
        return logits

    def forward_features(self, inputs: Tensor) -> Tensor:
        r"""The final state (N, H) of the last layer, for inputs (N, \*)."""
        # A permutation would silently select from a longer input.
        check_inputs(inputs, self.in_features)
        x = inputs.flatten(1)
        if self.permutation is not None:
            x = x.index_select(1, self.permutation)
        examples = x.shape[0]
        steps = x.view(examples, -1, self.step_features).transpose(0, 1)
        states = self.initial_states.unsqueeze(2).expand(-1, -1, examples, -1)
        h, *rest = states.unbind()
        # Not `self.training`: population statistics are collected with only the sites in training
        # mode, and need the noise of training.
        if self.initial_noise and any(module.training for module in self.recurrent.modules()):
            h = h + self.initial_noise * torch.randn_like(h)
        output, _ = self.recurrent(steps, (h, *rest) if rest else h)
        features: Tensor = output[-1]
        return features

    @staticmethod
    def random_permutation(in_features: int = 784, seed: int = 0) -> Tensor:
        """The order (I,) in which a permuted model with this seed reads its inputs."""
        return torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def _warn_of_shared_statistics(norm: Norm, steps: int) -> None:
        kept = getattr(norm, "max_steps", steps)
        if kept < steps:
            warnings.warn(
                f"{type(norm).__name__} keeps statistics of {kept} steps and sequences have "
                f"{steps}: all later steps share the last. For statistics of their own set "
                f"max_steps={steps} (--model.norm.max_steps {steps})",
                stacklevel=3,
            )
