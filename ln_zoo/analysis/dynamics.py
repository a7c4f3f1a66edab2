"""Stability of hidden-to-hidden dynamics: growth of perturbations and gradients per step.

The paper (section 3.1) claims that layer norm makes these dynamics much more stable. Lyapunov
exponents are measured by tangent vectors and QR (Benettin et al. 1980), gradients by
`ln_zoo.analysis.gradient_norms`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ln_zoo.analysis.gradient_flow import Loss, gradient_norms, norms_with_gains
from ln_zoo.analysis.stepping import (
    Statistics,
    check_arguments,
    check_sequences,
    cpu_seed,
    exact_cell,
    initial_states,
    layers_apart,
    measuring,
    noisy_start,
    run_steps,
)
from ln_zoo.layers import RecurrentLayer, orthogonal_init, recurrent_layer
from ln_zoo.layers.cells import as_states, sites_by_role
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm, batch_dependent
from ln_zoo.ops import Cell, States, Weights
from ln_zoo.ops.cells import Sites
from ln_zoo.utils.checks import check_choice
from ln_zoo.utils.tables import markdown_table, write_csv

#: Initialisation of an untrained layer: torch's, or `orthogonal_init` with this candidate.
Start = Literal["torch", "orthogonal", "identity"]

#: Input and output of each site of a step, by role.
Seen = dict[str, tuple[Tensor, Tensor]]

#: ``loss(network, batch)``, a scalar.
NetworkLoss = Callable[[nn.Module, Any], Tensor]


def perturbation_growth(
    layer: RecurrentLayer,
    inputs: Tensor,
    states: Tensor | States | None = None,
    *,
    count: int = 1,
    statistics: Statistics = "batch",
    seed: int = 0,
) -> Tensor:
    """Growth of small perturbations of a layer's states at each step of a sequence.

    ``count`` random orthonormal perturbations of all states (h, and c in an LSTM) are propagated by
    the derivative of each step and re-orthonormalised by a QR decomposition; the diagonal of R is
    their growth. The mean of its logarithm over steps tends to the Lyapunov exponents, the largest
    first. Derivatives are exact (forward mode): perturbations are infinitesimal.

    Under a batch-dependent norm the batch is one system, since a perturbation of one example
    changes the statistics of all. Otherwise, and with ``statistics="kept"``, each example is a
    system.

    Args:
        layer: a recurrent layer with one layer and one direction; ideally in float64.
        inputs: (T, N, I), also with ``batch_first``.
        states: initial states, (1, N, H) each; default zeros.
        count: number k of perturbations.
        statistics: statistics of batch-dependent norms: ``"batch"``, as in training, or ``"kept"``,
            the running ones, as in evaluation.
        seed: seed of the perturbations.

    Returns:
        Natural logarithms of the growth, (T, C, k), for C systems.

    Raises:
        TypeError: if the layer is not a recurrent layer of `ln_zoo.layers`.
        ValueError: for several layers, two directions, or a ``count`` above the size of the states.
        RuntimeError: for mismatched sizes.
    """
    return _carry(layer, inputs, states, count, statistics, seed)[0]


def lyapunov_exponents(
    layer: RecurrentLayer,
    inputs: Tensor,
    states: Tensor | States | None = None,
    *,
    count: int = 1,
    skip: int = 0,
    statistics: Statistics = "batch",
    seed: int = 0,
) -> Tensor:
    """The largest Lyapunov exponents of a layer driven by a sequence, per step.

    Means over steps of `perturbation_growth`, with its arguments and errors. ``skip``: initial
    steps to ignore, in which perturbations turn towards the directions of largest growth.

    Returns:
        Natural logarithms per step, (C, k), for C systems; perturbations grow if above 0.

    Example:
        >>> from ln_zoo.layers import RNN
        >>> layer = RNN(1, 2, nonlinearity="relu", bias=False, dtype=torch.float64)
        >>> _ = layer.weight_hh_l0.data.copy_(torch.tensor([[0.5, 0.0], [0.0, 0.25]]))
        >>> _ = layer.weight_ih_l0.data.fill_(1.0)
        >>> x = torch.ones(200, 1, 1, dtype=torch.float64)
        >>> lyapunov_exponents(layer, x, count=2, skip=100).exp()
        tensor([[0.5000, 0.2500]], dtype=torch.float64)
    """
    check_arguments("lyapunov_exponents", layer, inputs)
    _check_skip(skip, len(inputs))
    logs = perturbation_growth(layer, inputs, states, count=count, statistics=statistics, seed=seed)
    return logs[skip:].mean(0)


@dataclasses.dataclass(frozen=True)
class SiteGains:
    """Effect of normalisation on a perturbation within a step."""

    #: For each site that sees the states, by role: root mean square of the perturbation (over
    #: features, examples and steps) after the site, divided by its value before. 1 without
    #: normalisation of pre-activations. Layer norm multiplies by gain / sigma, and removes the two
    #: directions that statistics absorb.
    gains: dict[str, float]
    #: Fraction of the mean square of the gates' summed inputs that comes from the state; the input
    #: term carries no perturbation.
    share: float


def site_gains(
    layer: RecurrentLayer,
    inputs: Tensor,
    states: Tensor | States | None = None,
    *,
    skip: int = 0,
    statistics: Statistics = "batch",
    seed: int = 0,
) -> SiteGains:
    """Growth of the perturbation of `lyapunov_exponents` at each site; arguments as there."""
    check_arguments("site_gains", layer, inputs)
    _check_skip(skip, len(inputs))
    passages = _carry(layer, inputs, states, 1, statistics, seed)[1]
    return _site_gains(passages[skip:])


@dataclasses.dataclass(frozen=True)
class _Passage:
    """Mean squares in one step: of the perturbation around each site, and of both terms."""

    squares: dict[str, tuple[float, float]]
    recurrent: float
    input: float


def _site_gains(passages: Sequence[_Passage]) -> SiteGains:
    gains = {}
    for role in passages[0].squares:
        before = sum(each.squares[role][0] for each in passages)
        behind = sum(each.squares[role][1] for each in passages)
        gains[role] = math.sqrt(behind / before) if before else math.nan
    recurrent = sum(each.recurrent for each in passages)
    total = recurrent + sum(each.input for each in passages)
    return SiteGains(gains, recurrent / total if total else math.nan)


def _carry(
    layer: RecurrentLayer,
    inputs: Tensor,
    states: Tensor | States | None,
    count: int,
    statistics: Statistics,
    seed: int,
) -> tuple[Tensor, list[_Passage]]:
    """`perturbation_growth`, and the mean squares of the first perturbation in each step."""
    given = initial_states("perturbation_growth", layer, inputs, states)
    cell = exact_cell(layer)
    examples = inputs.shape[1]
    systems = 1 if statistics == "batch" and batch_dependent(layer) else examples
    widths = [state.shape[-1] for state in given]
    size = sum(widths) * examples // systems
    if not 1 <= count <= size:
        raise ValueError(f"count must be from 1 to {size}, the size of the states, got {count}")
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(systems, size, count, generator=generator, dtype=torch.float64)
    frame = torch.linalg.qr(random.to(inputs)).Q  # (C, D, k)
    logs: list[Tensor] = []
    passages: list[_Passage] = []

    def step(wx: Tensor, before: States, weights: Weights, sites: Sites, t: int | None) -> States:
        nonlocal frame

        def function(*states: Tensor) -> tuple[States, Seen]:
            seen: Seen = {}

            def watched(role: str, a: Tensor, t: int | None) -> Tensor:
                after = sites[role](a, t)
                seen[role] = (a, after)
                return after

            watching = {role: functools.partial(watched, role) for role in sites}
            return cell.step(wx, states, weights, watching, t), seen

        def derivative(tangent: Tensor) -> tuple[Tensor, Seen]:
            parts = tuple(tangent.split(widths, dim=-1))
            after, seen = torch.func.jvp(function, before, parts)[1]
            return torch.cat(after, dim=-1), seen

        rows = frame.movedim(-1, 0).reshape(count, examples, -1)  # (k, N, S H)
        moved, tangents = torch.func.vmap(derivative)(rows)
        frame, r = torch.linalg.qr(moved.reshape(count, systems, size).movedim(0, -1))
        logs.append(r.diagonal(dim1=-2, dim2=-1).abs().log())
        after, sums = function(*before)
        passages.append(_passage(cell, wx, sums, tangents))
        return after

    with torch.no_grad(), measuring(layer, statistics):
        # Forward mode refuses expanded states.
        run_steps(layer, inputs, tuple(state[0].contiguous() for state in given), step)
    return torch.stack(logs), passages


def _passage(cell: Cell, wx: Tensor, sums: Seen, tangents: Seen) -> _Passage:
    seen = [place for place in cell.places if place.role in sums]
    of_state = [sums[place.role][1] for place in seen if place.products == ("hh",)]
    if not of_state:  # a simple RNN: one site for the sum of both terms
        of_state = [sums[place.role][0] - wx for place in seen if len(place.products) == 2]
    recurrent = torch.cat(of_state, dim=-1) if of_state else wx.new_full((1,), math.nan)
    squares = {
        role: (_mean_square(before[0]), _mean_square(behind[0]))
        for role, (before, behind) in tangents.items()
    }
    return _Passage(squares, _mean_square(recurrent), _mean_square(wx))


def _mean_square(a: Tensor) -> float:
    return float(a.square().mean())


def _check_skip(skip: int, steps: int) -> None:
    if not 0 <= skip < steps:
        raise ValueError(f"skip must be from 0 to {steps - 1} for {steps} steps, got {skip}")


# Whole measurements


@dataclasses.dataclass(frozen=True)
class Dynamics:
    """Growth of perturbations and of gradients in one layer."""

    group: str  #: panel of the picture, such as the kind of the layer
    name: str  #: name of the layer in its group; the first word sets the colour of its curves
    growth: Tensor  #: result of `perturbation_growth`, (T, C, k)
    sites: SiteGains  #: result of `site_gains`
    gradients: Tensor  #: result of `gradient_norms`, (T,)
    skip: int = 0  #: initial steps that the properties ignore

    @property
    def exponents(self) -> Tensor:
        """Lyapunov exponents per step, (C, k)."""
        return self.growth[self.skip :].mean(0)

    @property
    def sizes(self) -> Tensor:
        """Logarithm of the size of a perturbation of size 1 after each step, (T,)."""
        return self.growth[..., 0].mean(1).cumsum(0)

    @property
    def factor(self) -> float:
        """Growth of a perturbation per step: e to the mean first exponent."""
        return math.exp(float(self.exponents[:, 0].mean()))

    @property
    def gradient_factor(self) -> float:
        """Growth of the gradient per step, from the last step back to the first."""
        norms = self.gradients[self.skip :].log()
        return math.exp(float(norms[0] - norms[-1]) / max(1, len(norms) - 1))


def hidden_dynamics(
    layer: RecurrentLayer,
    inputs: Tensor,
    states: Tensor | States | None = None,
    *,
    group: str | None = None,
    name: str | None = None,
    loss: Loss | None = None,
    count: int = 1,
    skip: int | None = None,
    statistics: Statistics = "batch",
    seed: int = 0,
) -> Dynamics:
    """All measurements of one layer, trained or not, on one batch of sequences.

    Further arguments: see `perturbation_growth`. Errors as `lyapunov_exponents` and
    `gradient_norms`.

    Args:
        group: see `Dynamics`; default: the layer's class.
        name: see `Dynamics`; default: its norm's class.
        loss: loss of the outputs; see `gradient_norms`.
        skip: initial steps to ignore; default: a quarter.

    Example:
        >>> from ln_zoo.layers import LSTM
        >>> layer = LSTM(3, 5, norm=LayerNorm(), dtype=torch.float64)
        >>> found = hidden_dynamics(layer, torch.randn(40, 4, 3, dtype=torch.float64))
        >>> found.group, found.name, found.skip
        ('LSTM', 'LayerNorm', 10)
    """
    check_arguments("hidden_dynamics", layer, inputs)
    skip = len(inputs) // 4 if skip is None else skip
    _check_skip(skip, len(inputs))
    site = next(iter(sites_by_role(layer.sites["l0"]).values()))
    growth, passages = _carry(layer, inputs, states, count, statistics, seed)
    return Dynamics(
        type(layer).__name__ if group is None else group,
        type(site.norm).__name__ if name is None else name,
        growth,
        _site_gains(passages[skip:]),
        gradient_norms(layer, inputs, states, loss, statistics),
        skip,
    )


def initial_dynamics(
    inputs: Tensor,
    cell: Literal["LSTM", "GRU", "RNN"] | type[RecurrentLayer] = "LSTM",
    hidden_size: int = 256,
    norms: Sequence[type[Norm]] = (LayerNorm, BatchNorm, RMSNorm, WeightNorm, Identity),
    gains: Sequence[float] = (0.1, 0.5, 1.0),
    start: Start = "torch",
    recurrent_scale: float = 1.0,
    noise: float = 0.1,
    count: int = 1,
    skip: int | None = None,
    seed: int = 0,
) -> Iterator[Dynamics]:
    """`hidden_dynamics` of untrained layers, for each norm and each gain.

    All have the same initial weights and states, and use batch statistics.

    Args:
        inputs: (T, N, I), in the dtype of the computation, ideally float64.
        cell: the kind of layer, or a class of your own.
        hidden_size: size H of its states.
        norms: classes of norms: a layer for each gain if the class has a gain or, like
            `WeightNorm`, a scale of its weights' rows, which is set to the gain, so that
            pre-activations have the same size for inputs of variance 1; otherwise one layer.
        gains: the gains.
        start: ``"torch"``, weights uniform in +-1 / sqrt(H); or the candidate of
            `ln_zoo.layers.orthogonal_init`, with an LSTM's forget bias of 1.
        recurrent_scale: factor of the initial recurrent weights.
        noise: standard deviation of the initial h; other states start at 0.
        count: number of exponents.
        skip: initial steps to ignore; default: a quarter.
        seed: seed of weights, initial states and perturbations.
    """
    cls_of_layer = recurrent_layer(cell)
    check_choice("start", start, ("torch", "orthogonal", "identity"))
    check_sequences("initial_dynamics", inputs)
    steps, _, features = inputs.shape
    for cls in norms:
        for gain, norm in norms_with_gains(cls, gains, steps):
            scales = gains if gain is None and norm.weight_scale is not None else (None,)
            for scale in scales:
                generator = torch.Generator().manual_seed(seed)
                with cpu_seed(seed):
                    layer = cls_of_layer(features, hidden_size, norm=norm, dtype=inputs.dtype)
                if start != "torch":
                    orthogonal_init(layer, start, generator=generator)
                with torch.no_grad():
                    layer.get_parameter("weight_hh_l0").mul_(recurrent_scale)
                layer.reset_norm()
                if scale is not None:
                    _set_scale(layer, scale)
                layer = layer.to(inputs.device)  # after cpu_seed on the CPU, for equal numbers
                states = noisy_start(layer, inputs, noise, generator)
                shown = gain if scale is None else scale
                words = [cls.__name__, *([] if shown is None else [f"{shown:g}"])]
                yield hidden_dynamics(
                    layer,
                    inputs,
                    states,
                    name=" ".join(words),
                    count=count,
                    skip=skip,
                    seed=seed,
                )


def _set_scale(layer: RecurrentLayer, scale: float) -> None:
    with torch.no_grad():
        for site in sites_by_role(layer.sites["l0"]).values():
            name = site.norm.weight_scale
            if name is not None and name in dict(site.named_parameters()):
                site.get_parameter(name).fill_(scale)


# Layers within networks


def network_dynamics(
    network: nn.Module,
    batch: Any,
    loss: NetworkLoss,
    *,
    steps: int | None = None,
    count: int = 1,
    skip: int | None = None,
    statistics: Statistics = "kept",
    seed: int = 0,
) -> dict[str, Dynamics]:
    """`hidden_dynamics` of each recurrent layer of a network, on its inputs in the network.

    Each layer is a system driven by the layers below and its initial states. Gradients of the
    network's loss pass through the layers above. The layers of one module (``num_layers``) are
    measured separately. The network must call a layer of `ln_zoo.layers` once, with whole
    sequences; cells in a loop of the network (such as `WindowLSTM`'s), whose inputs depend on their
    states, are not measured.

    Args:
        network: any module, ideally in float64; runs in evaluation mode, and is restored.
        batch: argument of the loss; sequences must have one length.
        loss: ``loss(network, batch)``, a scalar.
        steps: measure only the first steps; layers above get as many outputs. Default: all.
        count: number of exponents.
        skip: initial steps to ignore; default: a quarter.
        statistics: see `perturbation_growth`.
        seed: seed of the perturbations, and of random numbers of the network on the CPU.

    Returns:
        Measurements by module name, ``name.l0``, ``name.l1``, ... for several layers in one module,
        in the order of the forward pass.

    Raises:
        ValueError: if there is no such layer, or a layer has two directions or zoneout, reads
            packed or single sequences, gets resets or a mask, or is called more than once.

    Example:
        >>> from ln_zoo.layers import LSTM
        >>> network = nn.Sequential(LSTM(3, 5, num_layers=2, dtype=torch.float64))
        >>> x = torch.randn(40, 4, 3, dtype=torch.float64)
        >>> list(network_dynamics(network, x, lambda net, x: net(x)[0][-1].square().sum()))
        ['0.l0', '0.l1']
    """
    found: dict[str, Dynamics] = {}
    with cpu_seed(seed), measuring(network, statistics):
        for place, (layer, inputs, states) in _calls(network, batch, loss).items():
            parts = layers_apart("network_dynamics", layer)
            own = [_own_states(states, number) for number in range(len(parts))]
            x = inputs[:steps]
            for number, part in enumerate(parts):
                above = list(zip(parts, own, strict=True))[number + 1 :]
                name = place if len(parts) == 1 else f"{place}.l{number}".removeprefix(".")
                found[name] = hidden_dynamics(
                    part,
                    x,
                    own[number],
                    name=name,
                    loss=functools.partial(_loss_above, network, batch, loss, layer, above),
                    count=count,
                    skip=skip,
                    statistics=statistics,
                    seed=seed,
                )
                with torch.no_grad():
                    x, _ = part(x, own[number])
    return found


def _calls(
    network: nn.Module, batch: Any, loss: NetworkLoss
) -> dict[str, tuple[RecurrentLayer, Tensor, Tensor | States | None]]:
    calls: dict[str, tuple[RecurrentLayer, Tensor, Tensor | States | None]] = {}

    def called(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "hx", "reset", "mask"), args, strict=False)) | kwargs
        inputs, shown = given["input"], f"{type(layer).__name__} {name}".strip()
        if name in calls:
            raise ValueError(
                f"network_dynamics takes layers that run once in a pass, {shown} runs repeatedly"
            )
        if isinstance(inputs, PackedSequence):
            raise ValueError(
                f"network_dynamics takes sequences of one length, {shown} reads packed ones"
            )
        for argument in ("reset", "mask"):
            if given.get(argument) is not None:
                raise ValueError(
                    f"network_dynamics takes sequences without resets and padding, {shown} gets "
                    f"{argument}: use a batch that needs neither"
                )
        if layer.batch_first and inputs.dim() == 3:
            inputs = inputs.transpose(0, 1)
        check_sequences(f"network_dynamics: {shown}", inputs)
        calls[name] = layer, inputs, given.get("hx")

    hooks = [
        module.register_forward_pre_hook(functools.partial(called, name), with_kwargs=True)
        for name, module in network.named_modules()
        if isinstance(module, RecurrentLayer)
    ]
    try:
        with torch.no_grad():
            loss(network, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        raise ValueError(
            "network_dynamics needs recurrent layers of ln_zoo that read whole sequences, this "
            f"{type(network).__name__} runs none"
        )
    return calls


def _own_states(states: Tensor | States | None, number: int) -> Tensor | States | None:
    if states is None or isinstance(states, Tensor):
        return None if states is None else states[number : number + 1]
    return tuple(state[number : number + 1] for state in states)


def _loss_above(
    network: nn.Module,
    batch: Any,
    loss: NetworkLoss,
    layer: RecurrentLayer,
    above: Sequence[tuple[RecurrentLayer, Tensor | States | None]],
    outputs: Tensor,
) -> Tensor:
    """The network's loss, given outputs (T, N, H) of one of the layers of a module.

    ``above`` has the module's further layers, with their initial states.
    """
    for part, states in above:
        outputs, _ = part(outputs, states)
    with _outputs_replaced(layer, outputs):
        return loss(network, batch)


@contextmanager
def _outputs_replaced(layer: RecurrentLayer, outputs: Tensor) -> Iterator[None]:
    """Replace a layer's outputs by (T, N, H), and its last h by the last of them."""

    def replaced(_: nn.Module, args: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
        last = as_states(type(layer).__name__, layer.cell, given[1])
        assert last is not None
        h, *others = last
        h = torch.cat([h[:-1], outputs[-1:]])
        shown = outputs.transpose(0, 1) if layer.batch_first else outputs
        return shown, (h, *others) if others else h

    hook = layer.register_forward_hook(replaced)
    try:
        yield
    finally:
        hook.remove()


# Tables


def dynamics_table(found: Sequence[Dynamics]) -> str:
    """A Markdown table of growth per step of perturbations and gradients, and gains of sites."""
    if not found:
        raise ValueError("dynamics_table needs at least one measurement, got none")
    most = max(each.growth.shape[-1] for each in found)
    further = [f"exponent {number}" for number in range(2, most + 1)]
    head = [
        "layer",
        "perturbation, by step",
        "exponent (least to greatest)",
        *further,
        "gradient, by step back",
        "share of the state in the pre-activations",
        "gains of the sites",
    ]
    rows = []
    for each in found:
        first = each.exponents[:, 0]
        spread = f" ({float(first.min()):.4f} to {float(first.max()):.4f})" * (len(first) > 1)
        others = [f"{value:.4f}" for value in each.exponents[:, 1:].mean(0).tolist()]
        row = [
            f"{each.group} {each.name}".strip(),
            _percent(each.factor),
            f"{float(first.mean()):.4f}{spread}",
            *others,
            *[""] * (most - 1 - len(others)),
            _percent(each.gradient_factor),
            f"{each.sites.share:.2f}",
            ", ".join(f"{role} {gain:.3g}" for role, gain in each.sites.gains.items()),
        ]
        rows.append(row)
    return markdown_table(head, rows, numeric=len(head) - 1)


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def write_dynamics(found: Sequence[Dynamics], path: Path) -> None:
    """Write a CSV file: group, layer, step t from 1, `Dynamics.sizes`, gradient norm."""
    rows = (
        [each.group, each.name, t, f"{size:.5g}", f"{norm:.4g}"]
        for each in found
        for t, (size, norm) in enumerate(zip(each.sizes, each.gradients, strict=True), 1)
    )
    write_csv(path, ["group", "layer", "t", "log_perturbation", "gradient_norm"], rows)
