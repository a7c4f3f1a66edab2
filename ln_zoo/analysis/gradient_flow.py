"""How far gradients reach back in time (Cooijmans et al. 2017, arXiv 1603.09025, section 4).

In the source, recurrent batch norm needs a gain of 0.1: with 1 the mean derivative of tanh is far
below 1, and gradients vanish over hundreds of steps. Measured for any recurrent layer and norm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.analysis.stepping import (
    Statistics,
    check_sequences,
    exact_cell,
    initial_states,
    measuring,
    noisy_start,
    run_steps,
)
from ln_zoo.layers import RecurrentLayer, orthogonal_init, recurrent_layer
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm
from ln_zoo.ops import States
from ln_zoo.utils.tables import markdown_table, write_csv

#: ``loss(outputs)``, outputs (T, N, H), a scalar.
Loss = Callable[[Tensor], Tensor]

_NODES = 256
_CLASSES = 10


def expected_tanh_derivative(gain: float) -> float:
    """E[1 - tanh^2(gain z)] for a standard normal z, by Gauss-Hermite quadrature.

    The mean derivative of tanh at normalised summed inputs with this gain. Accurate to 9 digits for
    gains up to 2, to 3 digits up to 5.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return float(weights @ (1 - np.tanh(gain * nodes) ** 2) / weights.sum())


def gradient_norms(
    layer: RecurrentLayer,
    inputs: Tensor,
    states: Tensor | States | None = None,
    loss: Loss | None = None,
    statistics: Statistics = "batch",
) -> Tensor:
    """Norms of a loss's gradients with respect to the states h_1, ..., h_T of a recurrent layer.

    The gradient is the total one, through the output of step t and through the next step. The norm
    is Euclidean over all N H (or N P) numbers. The layer is unchanged, running averages and
    gradients of parameters included. Further arguments and errors as `perturbation_growth`.

    Args:
        loss: ``loss(outputs)``, outputs (T, N, H), a scalar. Default: mean cross-entropy of a
            softmax over 10 classes on the last state, with fixed random weights of variance 1 / H
            and fixed random labels.

    Returns:
        The norms, (T,), float64; index t - 1 for h_t.

    Example:
        >>> from ln_zoo.layers import LSTM
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = LSTM(3, 5, norm=LayerNorm(), dtype=torch.float64)
        >>> gradient_norms(layer, torch.randn(7, 4, 3, dtype=torch.float64)).shape
        torch.Size([7])
    """
    given = initial_states("gradient_norms", layer, inputs, states)
    loss = _last_state_loss if loss is None else loss
    carried: list[Tensor] = []

    def step(*arguments: Any) -> States:
        after = exact_cell(layer).step(*arguments)
        carried.append(after[0])
        return after

    with torch.enable_grad(), measuring(layer, statistics):
        # States require gradients: the parameters may be frozen.
        start = tuple(state[0].detach().requires_grad_() for state in given)
        output = run_steps(layer, inputs.detach(), start, step)
        gradients = torch.autograd.grad(loss(output), carried, materialize_grads=True)
    return torch.stack([_norm(gradient.double()) for gradient in gradients])


def _norm(gradient: Tensor) -> Tensor:
    largest = gradient.abs().max()  # squares of vanishing numbers underflow
    if not 0 < float(largest) < float("inf"):
        return largest
    return largest * torch.linalg.vector_norm(gradient / largest)


def _last_state_loss(output: Tensor) -> Tensor:
    _, examples, features = output.shape
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(_CLASSES, features, generator=generator, dtype=torch.float64)
    labels = torch.randint(_CLASSES, (examples,), generator=generator)
    logits = F.linear(output[-1], (weights / features**0.5).to(output))
    return F.cross_entropy(logits, labels.to(output.device))


@dataclasses.dataclass(frozen=True)
class GradientFlow:
    """Gradient norms of one layer."""

    norm: str  #: name of the norm's class
    gain: float | None  #: its initial gain; None for a norm without gain
    norms: Tensor  #: gradient norms with respect to h_1, ..., h_T, (T,)

    @property
    def label(self) -> str:
        """Norm and gain."""
        return self.norm if self.gain is None else f"{self.norm} {self.gain:g}"


def gradient_flow(
    inputs: Tensor,
    cell: Literal["LSTM", "GRU", "RNN"] | type[RecurrentLayer] = "RNN",
    hidden_size: int = 100,
    norms: Sequence[type[Norm]] = (BatchNorm, LayerNorm, Identity),
    gains: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0),
    candidate: Literal["identity", "orthogonal"] = "identity",
    noise: float = 0.1,
    seed: int = 0,
) -> list[GradientFlow]:
    """Gradient norms of untrained recurrent layers, for each norm and each gain.

    All have the same initial weights (`ln_zoo.layers.orthogonal_init`) and states. The loss is the
    default of `gradient_norms`. The RNN uses tanh.

    Args:
        inputs: (T, N, I), in the dtype of the computation, ideally float64.
        cell: the kind of layer, or a class of your own.
        hidden_size: size H of its states.
        norms: classes of norms: a layer for each gain if the class has a field ``recurrent_gain``
            or ``gain``, otherwise one layer. A field ``max_steps`` is set to T.
        gains: the gains.
        candidate: recurrent weights of the candidate state: ``"identity"``, as in the source, or
            ``"orthogonal"``.
        noise: standard deviation of the initial h of each example; other states start at 0. Without
            noise, equal first inputs have no batch variance, and gradients grow by gain / sqrt(eps)
            at each such step.
        seed: seed of weights and initial states.

    Example:
        >>> flows = gradient_flow(random_sequences(50, 8), hidden_size=10, gains=(0.1, 1.0))
        >>> [flow.label for flow in flows]
        ['BatchNorm 0.1', 'BatchNorm 1', 'LayerNorm 0.1', 'LayerNorm 1', 'Identity']
    """
    cls_of_layer = recurrent_layer(cell)
    check_sequences("gradient_flow", inputs)
    steps, _, features = inputs.shape
    flows = []
    for cls in norms:
        for gain, norm in norms_with_gains(cls, gains, steps):
            generator = torch.Generator().manual_seed(seed)
            with torch.random.fork_rng(devices=[]):  # the constructor draws weights
                layer = cls_of_layer(features, hidden_size, norm=norm, dtype=inputs.dtype)
            orthogonal_init(layer, candidate, generator=generator)
            layer = layer.to(inputs.device)  # after drawing on the CPU, for equal numbers
            states = noisy_start(layer, inputs, noise, generator)
            flows.append(GradientFlow(cls.__name__, gain, gradient_norms(layer, inputs, states)))
    return flows


def norms_with_gains(
    cls: type[Norm], gains: Sequence[float], steps: int
) -> Iterator[tuple[float | None, Norm]]:
    """Instances of a class of norms for T steps: one for each gain, or one without gain."""
    if not (isinstance(cls, type) and issubclass(cls, Norm)):
        raise TypeError(f"norms must be classes such as LayerNorm, without (); got {cls!r}")
    fields: set[str] = set()
    if dataclasses.is_dataclass(cls):
        fields = {field.name for field in dataclasses.fields(cls) if field.init}
    options: dict[str, Any] = {"max_steps": steps} if "max_steps" in fields else {}
    for name in ("recurrent_gain", "gain"):
        if name in fields:
            for gain in gains:
                yield gain, cls(**options, **{name: gain})
            return
    yield None, cls(**options)


def random_sequences(steps: int, examples: int, features: int = 1, seed: int = 0) -> Tensor:
    """Inputs uniform in [0, 1), like pixels, (T, N, I), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, examples, features, generator=generator, dtype=torch.float64)


# Tables


def gradient_flow_table(flows: Sequence[GradientFlow]) -> str:
    """A Markdown table of decimal logarithms of the gradient norms at five time steps."""
    if not flows:
        raise ValueError("gradient_flow_table needs at least one measurement, got none")
    steps = len(flows[0].norms)
    shown = sorted({max(1, round(steps * part)) for part in (0, 0.25, 0.5, 0.75, 1)}, reverse=True)
    head = ["norm", "gain", "E[1 - tanh^2(gain z)]", *(f"log10 at t = {t}" for t in shown)]
    rows = []
    for flow in flows:
        gain, derivative = "", ""
        if flow.gain is not None:
            gain, derivative = f"{flow.gain:g}", f"{expected_tanh_derivative(flow.gain):.3f}"
        orders = [f"{float(flow.norms[t - 1].log10()):.1f}" for t in shown]
        rows.append([flow.norm, gain, derivative, *orders])
    return markdown_table(head, rows, numeric=len(head) - 1)


def write_gradient_flow(flows: Sequence[GradientFlow], path: Path, inputs: str) -> None:
    """Write a CSV file: the inputs, the time step t = 1, ..., T, and a column for each layer."""
    steps = enumerate(torch.stack([flow.norms for flow in flows]).T.tolist(), 1)
    rows = ([inputs, t, *(f"{value:.4g}" for value in values)] for t, values in steps)
    write_csv(path, ["inputs", "t", *(flow.label for flow in flows)], rows)
