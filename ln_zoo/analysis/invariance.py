"""Invariance of normalised layers, measured (Ba et al. 2016, section 5.1, Table 1).

Weights and data of a layer are transformed and its outputs compared. The maps are the columns of
the paper's table, by their names in `ln_zoo.norms.INVARIANCES`:

- ``weight_matrix_rescaling``: all of W times δ;
- ``weight_matrix_recentering``: one vector γ added to every row of W (eq. 6);
- ``weight_vector_rescaling``: one row w_i times δ;
- ``dataset_rescaling``: all inputs times δ;
- ``dataset_recentering``: one vector added to every input;
- ``example_rescaling``: one input times δ (eq. 7).

Gains and biases are unchanged, and δ > 0: a negative δ flips the sign of normalised sums.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ln_zoo.analysis.stepping import cpu_seed, same_random_numbers
from ln_zoo.layers import Linear
from ln_zoo.norms import (
    INVARIANCES,
    BatchNorm,
    Identity,
    LayerNorm,
    Norm,
    RMSNorm,
    Site,
    WeightNorm,
    batch_dependent,
    batch_statistics,
    keeps_statistics,
    population_statistics,
)
from ln_zoo.norms.base import check_norm
from ln_zoo.utils.checks import check_at_least, check_not_negative
from ln_zoo.utils.tables import csv_table, markdown_table, rich_table, write_csv

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: Largest relative change of the output that counts as invariant, in float64 without eps.
INVARIANT = 1e-12
#: Smallest relative change of the output that counts as not invariant.
VARIANT = 1e-3
#: The rows of Table 1, and two for comparison.
NORMS: tuple[Norm, ...] = (BatchNorm(), WeightNorm(), LayerNorm(), RMSNorm(), Identity())

#: Passes within which running averages must converge: about 250 at a momentum of 0.1.
_PASSES = 5000
_FACTORS = (0.25, 3.0)
_FEATURES = 6
_HEADINGS = {
    "weight_matrix_rescaling": ("W", "rescaled"),
    "weight_matrix_recentering": ("W", "re-centred"),
    "weight_vector_rescaling": ("one w", "rescaled"),
    "dataset_rescaling": ("data", "rescaled"),
    "dataset_recentering": ("data", "re-centred"),
    "example_rescaling": ("one example", "rescaled"),
}


def random_inputs(examples: int = 16, features: int = 8, seed: int = 0) -> Tensor:
    """Standard normal inputs, (N, I), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, features, generator=generator, dtype=torch.float64)


def measure_invariance(
    layer: nn.Module,
    inputs: Tensor,
    factors: Sequence[float] = _FACTORS,
    *,
    weight: str = "weight",
    frozen: bool = False,
    seed: int = 0,
) -> dict[str, float]:
    """Change of a layer's output under each map of the paper's Table 1.

    Batch-dependent norms use the statistics of all inputs, recomputed after each map, or frozen
    before any map. The example and the row of W with the largest norm are rescaled. Random numbers
    of the layer (dropout in training) are equal in all runs. The layer and torch's generators are
    unchanged.

    Args:
        layer: any module with a matrix of weights, such as `ln_zoo.layers.Linear`, ideally in
            float64. Modules other than norms of ln_zoo keep their mode.
        inputs: (N, I), several different examples, with dtype and device of the weights.
        factors: positive values of δ; the largest deviation counts.
        weight: name of the parameter W, (F, I).
        frozen: use statistics from before any map, as in evaluation. For running averages (of your
            own norms or torch's batch norm), inputs pass through the layer in training mode until
            its output in evaluation mode converges.
        seed: seed of the vectors that are added: normal, with the root mean square of W or of the
            inputs.

    Returns:
        For each name of `ln_zoo.norms.INVARIANCES`, the largest change of the output, divided by
        the spread of the output: its largest distance from the mean over examples.

    Raises:
        ValueError: if an output is not finite, or equal for all examples; if running statistics do
            not converge to the inputs'.

    Example:
        >>> from ln_zoo.norms import LayerNorm
        >>> layer = Linear(8, 5, norm=LayerNorm(eps=0.0), dtype=torch.float64)
        >>> found = measure_invariance(layer, random_inputs())
        >>> [name for name, deviation in found.items() if deviation > 1e-3]
        ['weight_vector_rescaling', 'dataset_recentering']
    """
    _check(inputs, factors)
    layer = copy.deepcopy(layer)
    if frozen:
        _freeze(layer, inputs)
    matrix = layer.get_parameter(weight).detach()
    before = _output(layer, weight, matrix, inputs, frozen)
    spread = _spread(before)
    if not spread:
        raise ValueError(f"the output of this {type(layer).__name__} is the same for all examples")
    found = dict.fromkeys(INVARIANCES, 0.0)
    for name, mapped, data, _ in _maps(matrix, inputs, factors, seed):
        after = _output(layer, weight, mapped, data, frozen)
        found[name] = max(found[name], _size(after - before) / spread)
    return found


class _Map(NamedTuple):
    """Weights (F, I), inputs (N, I), and the factor of the sums (1 for shifts), of one map."""

    name: str
    weight: Tensor
    inputs: Tensor
    factor: Tensor


def _maps(weight: Tensor, inputs: Tensor, factors: Sequence[float], seed: int) -> Iterator[_Map]:
    generator = torch.Generator().manual_seed(seed)
    gamma, shift = (
        a.square().mean().sqrt() * torch.randn(a.shape[1], generator=generator).to(a)
        for a in (weight, inputs)
    )
    one = inputs.new_ones(())
    yield _Map("weight_matrix_recentering", weight + gamma, inputs, one)
    yield _Map("dataset_recentering", weight, inputs + shift, one)
    unit, example = (a.norm(dim=1).argmax() for a in (weight, inputs))
    for delta in factors:
        units, examples = torch.ones_like(weight[:, 0]), torch.ones_like(inputs[:, :1])
        units[unit] = examples[example] = delta
        yield _Map("weight_matrix_rescaling", delta * weight, inputs, delta * one)
        yield _Map("weight_vector_rescaling", units[:, None] * weight, inputs, units)
        yield _Map("dataset_rescaling", weight, delta * inputs, delta * one)
        yield _Map("example_rescaling", weight, examples * inputs, examples)


def _output(layer: nn.Module, name: str, weight: Tensor, inputs: Tensor, frozen: bool) -> Tensor:
    with contextlib.nullcontext() if frozen else batch_statistics(layer):
        return _run(layer, inputs, {name: weight})


def _run(layer: nn.Module, inputs: Tensor, replaced: dict[str, Tensor] | None = None) -> Tensor:
    try:
        with torch.no_grad(), same_random_numbers(layer):
            output: Tensor = functional_call(layer, replaced or {}, (inputs,))
    except RuntimeError as error:
        raise ValueError(
            f"this {type(layer).__name__} does not take inputs {tuple(inputs.shape)}: {error}"
        ) from error
    if not output.isfinite().all():
        raise ValueError(
            f"the output of this {type(layer).__name__} is not finite: without eps every variance "
            "must be positive; use different examples, and at least 2 features"
        )
    return output


def _freeze(layer: nn.Module, inputs: Tensor) -> None:
    """Set all running statistics to the inputs', and switch to evaluation mode."""
    keepers = [m for m in layer.modules() if isinstance(m, Site) or [*m.buffers(recurse=False)]]
    _set_training(keepers, True)
    if keeps_statistics(layer):
        with population_statistics(layer, "total_variance"):
            _run(layer, inputs)
    _set_training(keepers, False)
    averaging = [
        m
        for m in keepers
        if [*m.buffers()] and not (isinstance(m, Site) and m.norm.keeps_statistics)
    ]
    if not averaging:
        return
    for module in averaging:
        # With its own momentum it might never converge.
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.momentum = 1.0
    name, found = type(layer).__name__, inputs.new_full((), math.inf)
    moved, passes = math.inf, 0
    # At least two: initial statistics need not be finite.
    while passes < 2 or moved > 64 * torch.finfo(found.dtype).eps * _size(found):
        if passes == _PASSES:
            raise ValueError(
                f"the running averages of this {name} did not converge in {passes} passes, its "
                f"output still changes by {moved:.1e}: use a larger momentum"
            )
        _set_training(averaging, True)
        wanted = _run(layer, inputs)
        _set_training(averaging, False)
        before, found = found, _run(layer, inputs)
        moved, passes = _size(found - before), passes + 1
    # Buffers of a norm that mixes no examples need not be statistics.
    over_examples = batch_dependent(layer) or not any(isinstance(m, Site) for m in averaging)
    # More than the difference of variances over N - 1 and N examples.
    away = _size(found - wanted)
    if over_examples and away > min(0.5, 2 / len(inputs)) * _spread(wanted):
        raise ValueError(
            f"the running statistics of this {name} do not converge to those of the inputs: after "
            f"{passes} passes outputs in evaluation and training mode differ by {away:.2g}; "
            "evaluation must use the statistics that training collects"
        )


def _set_training(modules: Sequence[nn.Module], mode: bool) -> None:
    for module in modules:
        # Sites pass the mode on to their norm's modules; others are set one by one.
        if isinstance(module, Site):
            module.train(mode)
        else:
            module.training = mode


def _check(inputs: Tensor, factors: Sequence[float]) -> None:
    if inputs.dim() != 2 or len(inputs) < 2 or not inputs.shape[1]:
        raise ValueError(
            "inputs must be (N, I), at least 2 examples of at least 1 number, got "
            f"{tuple(inputs.shape)}"
        )
    if not factors or not all(0 < factor < math.inf and factor != 1 for factor in factors):
        raise ValueError(
            f"factors must be one or more positive numbers other than 1, got {[*factors]}"
        )


def _size(a: Tensor) -> float:
    return float(a.abs().max())


def _spread(output: Tensor) -> float:
    return _size(output - output.mean(0))


# The effect of eps


def eps_deviation(variance: Tensor, eps: float, factor: float | Tensor) -> Tensor:
    """Relative change of a normalised sum that eps causes when sums are rescaled.

    If sums a are multiplied by δ > 0, (a - μ) / sqrt(σ² + eps) changes by the factor sqrt((σ² +
    eps) / (σ² + eps / δ²)). The result is this factor minus 1: about eps (1 - δ⁻²) / 2σ² if σ² is
    much larger than eps, δ - 1 if much smaller. ``variance`` is σ² (or the mean square that eps is
    added to) before the map; ``factor`` is δ, broadcast against it.

    Example:
        >>> eps_deviation(torch.tensor([1.0, 1e-5, 1e-15], dtype=torch.float64), 1e-5, 2.0)
        tensor([3.7500e-06, 2.6491e-01, 1.0000e+00], dtype=torch.float64)
    """
    square = torch.as_tensor(factor, dtype=variance.dtype).square()
    # sqrt(1 + x) - 1, accurate for small x.
    x = eps * (1 - 1 / square) / (variance + eps / square)
    return torch.expm1(torch.log1p(x) / 2)


@dataclasses.dataclass(frozen=True)
class EpsEffect:
    """Effect of eps on the invariance of one norm to rescaled weights."""

    norm: str  #: label of the norm
    eps: float
    factor: float  #: δ, the factor of the weight matrix
    ratios: Tensor  #: σ² / eps before the map, (P,)
    measured: Tensor  #: relative change of a normalised sum, (P,)
    predicted: Tensor  #: absolute value of `eps_deviation`, (P,)


def eps_effect(
    norm: Norm,
    eps: float | None = None,
    factors: Sequence[float] = _FACTORS,
    ratios: Sequence[float] | None = None,
    inputs: Tensor | None = None,
    features: int = _FEATURES,
    seed: int = 0,
) -> list[EpsEffect]:
    """Measure the effect of eps on invariance to rescaled weights, for each factor.

    The weights of a `Linear` layer are scaled so that the variance has a given ratio to eps, then
    multiplied by δ. The result is for the largest normalised sum.

    Args:
        norm: a norm, a dataclass with a field ``eps``.
        eps: replaces the norm's eps.
        factors: values of δ.
        ratios: positive values of σ² / eps; default: 25, from 1e-4 to 1e8.
        inputs: (N, I); default: `random_inputs`.
        features: number F of units.
        seed: seed of the layer's parameters.

    Raises:
        ValueError: for a norm without a dataclass field eps or with an eps of 0; if the norm does
            not divide by a root to which it adds eps, or refuses the values of eps that this check
            needs.
    """
    inputs = _in_float64(inputs, factors, features)
    ratios = torch.logspace(-4, 8, 25).tolist() if ratios is None else [*ratios]
    if not ratios or not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"ratios must be one or more positive, finite numbers, got {ratios}")
    check_norm(norm)
    norm = _with_eps(norm, eps)
    if not _has_eps(norm) or not getattr(norm, "eps", 0):
        raise ValueError(
            f"{norm!r} has no eps above 0 in a dataclass field of that name: nothing to measure"
        )
    eps = float(norm.eps)  # type: ignore[attr-defined]
    make = functools.partial(_layer, norm, inputs, features, seed, 1.0)
    layer, variances = make(eps), _variances(make, inputs)
    place = _sums(layer, layer.weight.detach(), inputs).abs().argmax()
    variance = math.inf if variances is None else float(variances.flatten()[place])
    if variance == math.inf:
        raise ValueError(
            f"{norm!r} does not divide by a root to which it adds eps: the formula does not apply"
        )

    def value(factor: float) -> Tensor:
        return _sums(layer, factor * layer.weight.detach(), inputs).flatten()[place].cpu()

    scales = [(ratio * eps / variance) ** 0.5 for ratio in ratios]
    before = torch.stack([value(scale) for scale in scales])
    found = torch.tensor([*ratios], dtype=torch.float64)
    effects = []
    for factor in factors:
        after = torch.stack([value(factor * scale) for scale in scales])
        predicted = eps_deviation(found * eps, eps, factor).abs()
        measured = (after / before - 1).abs()
        effects.append(EpsEffect(_label(norm, eps), eps, factor, found, measured, predicted))
    return effects


def _variances(make: Callable[[float], Linear], inputs: Tensor) -> Tensor | None:
    """σ² of each sum, (N, F), computed from outputs with and without eps.

    Sums normalised without eps are sqrt(1 + eps / σ²) times those with eps. Infinite where eps has
    no effect; ``None`` if two values of eps give different σ². ``make`` returns the layer for an
    eps, and raises ValueError if the norm refuses it.
    """
    plain = make(0.0)
    weight = plain.weight.detach()
    sums = _sums(plain, weight, inputs)
    typical = float((inputs @ weight.T).square().mean())
    one, other = (
        eps / ((sums / _sums(make(eps), weight, inputs)).square() - 1)
        for eps in (typical, 4 * typical)
    )
    # Sums near 0 have too few digits, and contribute little to a deviation.
    counted = sums.abs() > 1e-6 * _size(sums)
    one, other = (torch.where(counted, each, math.inf) for each in (one, other))
    return one if torch.allclose(one, other, rtol=1e-6, atol=0) else None


def _predictions(
    make: Callable[[float], Linear],
    layer: Linear,
    inputs: Tensor,
    factors: Sequence[float],
    seed: int,
) -> dict[str, float | None]:
    """Deviations in `measure_invariance` that eps explains."""
    norm, weight = layer.site.norm, layer.weight.detach()
    eps = getattr(norm, "eps", 0.0)
    if not eps:
        return dict.fromkeys(INVARIANCES, 0.0)
    try:
        variances = _variances(make, inputs) if _has_eps(norm) else None
    except ValueError:  # the norm refuses this eps
        variances = None
    if variances is None:
        return dict.fromkeys(INVARIANCES)
    sums = _sums(layer, weight, inputs)
    found: dict[str, float | None] = dict.fromkeys(INVARIANCES, 0.0)
    for name, *_, factor in _maps(weight, inputs, factors, seed):
        moved = _size(eps_deviation(variances, eps, factor) * sums) / _spread(sums)
        found[name] = max(found[name] or 0.0, moved)
    return found


def _sums(layer: Linear, weight: Tensor, inputs: Tensor) -> Tensor:
    """Normalised pre-activations with their gains, (N, F), over the statistics of all inputs."""
    assert layer.bias is not None
    return _output(layer, "weight", weight, inputs, frozen=False) - layer.bias.detach()


def _layer(
    norm: Norm, inputs: Tensor, features: int, seed: int, weight_scale: float, eps: float | None
) -> Linear:
    """A layer with random weights, gains and biases, independent of eps and device."""
    norm = _with_eps(norm, eps)
    with cpu_seed(seed), torch.no_grad():
        layer = Linear(inputs.shape[1], features, norm=norm, device="cpu", dtype=torch.float64)
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        layer.weight.mul_(weight_scale)
    return layer.to(inputs.device)


def _in_float64(inputs: Tensor | None, factors: Sequence[float], features: int) -> Tensor:
    check_at_least(1, features=features)
    if inputs is None:
        inputs = random_inputs()
    _check(inputs, factors)
    return inputs.double()


def _has_eps(norm: Norm) -> bool:
    return any(field.name == "eps" and field.init for field in _fields(norm))


def _with_eps(norm: Norm, eps: float | None) -> Norm:
    """The norm with this eps; unchanged for ``None``, and without such a field."""
    if eps is None or not _has_eps(norm):
        return norm
    check_not_negative(eps=eps)
    try:
        return dataclasses.replace(norm, eps=eps)  # type: ignore[type-var]
    except ValueError as error:
        raise ValueError(f"{norm!r} cannot be measured at eps={eps:g}: {error}") from error


def _fields(norm: Norm) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(norm) if dataclasses.is_dataclass(norm) else ()


def _label(norm: Norm, eps: float | None) -> str:
    shown = []
    for field in _fields(norm):
        value, default = getattr(norm, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if repr(value) != repr(default) and not (field.name == "eps" and eps is not None):
            shown.append(f"{field.name}={value!r}")
    return f"{type(norm).__name__}({', '.join(shown)})" if shown else type(norm).__name__


# The table


@dataclasses.dataclass(frozen=True)
class InvarianceCell:
    """One norm under one map."""

    deviation: float  #: largest change of the output, divided by its spread
    exact: float  #: the same without eps
    #: Deviation by `eps_deviation`; None if the norm is not invariant without eps, or the formula
    #: does not apply.
    predicted: float | None
    #: Whether the norm declares this invariance; None without declaration, and for frozen
    #: statistics.
    declared: bool | None

    @property
    def verdict(self) -> str:
        """``"yes"``: invariant; ``"no"``; ``"?"``: between the two thresholds."""
        if self.exact <= INVARIANT:
            return "yes"
        return "no" if self.exact > VARIANT else "?"

    @property
    def agrees(self) -> bool:
        """Whether the verdict matches the declaration, if there is one."""
        return self.declared is None or self.verdict == _word(self.declared)


@dataclasses.dataclass(frozen=True)
class InvarianceRow:
    """One norm under all maps."""

    norm: str  #: label of the norm
    frozen: bool  #: statistics from before the map, as in evaluation, instead of recomputed ones
    cells: dict[str, InvarianceCell]  #: a cell for each name of `ln_zoo.norms.INVARIANCES`

    @property
    def label(self) -> str:
        """The norm, with ``, frozen`` for frozen statistics."""
        return f"{self.norm}, frozen" if self.frozen else self.norm


@dataclasses.dataclass(frozen=True)
class InvarianceTable:
    """The paper's Table 1, measured; a `rich` renderable."""

    #: One for each norm, and one with frozen statistics for norms that mix examples.
    rows: list[InvarianceRow]
    eps: float | None  #: eps of all norms; None: each had its own

    @property
    def agrees(self) -> bool:
        """Whether all cells match their declaration."""
        return all(cell.agrees for row in self.rows for cell in row.cells.values())

    @property
    def caption(self) -> str:
        eps = "as shipped" if self.eps is None else f"{self.eps:g}"
        formula = "" if self.eps == 0 else "; ≈ the deviation that eps explains"
        return (
            "invariant (declared by the norm), and largest change of the output as a part of "
            f"its spread; eps {eps}, verdict without it{formula}; !: not as declared"
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        styles = {"yes": "green", "no": "yellow", "?": "magenta"}
        table = rich_table()
        table.add_column("", overflow="fold")
        for heading in _HEADINGS.values():
            table.add_column("\n".join(heading), no_wrap=True)
        for row in self.rows:
            cells = []
            for cell in row.cells.values():
                style = styles[cell.verdict] if cell.agrees else "bold red"
                rest = "".join(f"\n{text}" for text in self._numbers(cell))
                cells.append(Text.assemble((_verdict(cell), style), (rest, "dim")))
            # As Text: square brackets of a norm's fields would be read as markup.
            table.add_row(Text(f"{row.norm}\nfrozen" if row.frozen else row.norm), *cells)
        yield table
        yield Text(f"\n{self.caption}")

    def markdown(self) -> str:
        """A Markdown table and its caption."""
        rows = []
        for row in self.rows:
            cells = []
            for cell in row.cells.values():
                verdict = _verdict(cell) if cell.agrees else f"**{_verdict(cell)}**"
                cells.append(f"{verdict} {' '.join(self._numbers(cell))}")
            rows.append([row.label, *cells])
        head = ["", *map(" ".join, _HEADINGS.values())]
        return f"{markdown_table(head, rows)}\n\n*{self.caption}*"

    def latex(self) -> str:
        r"""A LaTeX ``tabular``, which needs no package; the caption is a comment above."""
        lines = [f"% {self.caption}", rf"\begin{{tabular}}{{l{'c' * len(_HEADINGS)}}}", r"\hline"]
        for line in zip(*_HEADINGS.values(), strict=True):
            lines.append(rf" & {' & '.join(line)} \\")
        lines.append(r"\hline")
        for row in self.rows:
            cells = []
            for cell in row.cells.values():
                verdict = _verdict(cell) if cell.agrees else rf"\textbf{{{_verdict(cell)}}}"
                numbers = " ".join(self._numbers(cell))
                numbers = re.sub(r"(\S+)e\+?(-?)0*(\d+)", r"\1 \\cdot 10^{\2\3}", numbers)
                cells.append(f"{verdict} ${numbers.replace('≈', chr(92) + 'approx')}$")
            lines.append(rf"{_in_latex(row.label)} & {' & '.join(cells)} \\")
        return "\n".join([*lines, r"\hline", r"\end{tabular}"])

    def csv(self) -> str:
        """Comma-separated values: a line for each cell, numbers to 4 digits."""
        head = ["norm", "statistics", "eps", "map", "invariant", "declared", "agrees"]
        head += ["deviation", "deviation_without_eps", "formula"]
        rows = []
        for row in self.rows:
            statistics = "frozen" if row.frozen else "recomputed"
            eps = "shipped" if self.eps is None else f"{self.eps:g}"
            for name, cell in row.cells.items():
                declared = "" if cell.declared is None else _word(cell.declared)
                formula = "" if cell.predicted is None else f"{cell.predicted:.4g}"
                words = [cell.verdict, declared, _word(cell.agrees)]
                numbers = [f"{cell.deviation:.4g}", f"{cell.exact:.4g}", formula]
                rows.append([row.norm, statistics, eps, name, *words, *numbers])
        return csv_table(head, rows)

    def _numbers(self, cell: InvarianceCell) -> list[str]:
        return [
            _number(cell.deviation),
            *([f"≈ {_number(cell.predicted)}"] if cell.predicted else []),
        ]


def _word(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.2g}" if value >= 0.01 else f"{value:.1e}"


def _verdict(cell: InvarianceCell) -> str:
    declared = "-" if cell.declared is None else _word(cell.declared)
    return f"{cell.verdict} ({declared}){'' if cell.agrees else '!'}"


def _in_latex(text: str) -> str:
    # Character by character, so that replacements are not replaced again.
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    return "".join(special.get(character, character) for character in text)


def invariance_table(
    norms: Sequence[Norm] = NORMS,
    eps: float | None = 0.0,
    inputs: Tensor | None = None,
    features: int = _FEATURES,
    factors: Sequence[float] = _FACTORS,
    weight_scale: float = 1.0,
    seed: int = 0,
    *,
    always_frozen: bool = False,
) -> InvarianceTable:
    """Compute the paper's Table 1 for any norms.

    `measure_invariance` runs on a `Linear` layer with random weights, gains and biases in float64.
    Verdicts are without eps, since no invariance is exact with it; the deviation with eps is given
    too. Statistics over the data set (batch norm) are recomputed after the map; in a second row,
    for batch-dependent norms, they are frozen before it.

    Args:
        norms: the norms. A norm without a field ``eps`` is used unchanged.
        eps: eps of all norms; ``None``: each uses its own.
        inputs: (N, I), on the device to compute on; default: `random_inputs`.
        features: number F of units; most norms need at least 2.
        factors: values of δ; the largest deviation counts.
        weight_scale: factor of the weights before measuring; with 1e-3, variances are about the
            usual eps.
        seed: seed of the layers' parameters and of the vectors that maps add.
        always_frozen: add a row with frozen statistics for all norms.

    Raises:
        ValueError: if a norm declares an unknown invariance or refuses an eps of 0; if an output is
            not finite.

    Example:
        >>> table = invariance_table([LayerNorm(), WeightNorm()])
        >>> for row in table.rows:
        ...     print(row.norm, *(cell.verdict for cell in row.cells.values()))
        LayerNorm yes yes no yes no yes
        WeightNorm yes no yes no no no
    """
    inputs = _in_float64(inputs, factors, features)
    if not 0 < weight_scale < math.inf:
        raise ValueError(f"weight_scale must be positive and finite, got {weight_scale}")
    rows = []
    for norm in norms:
        check_norm(norm)
        unknown = set(norm.invariances or ()) - set(INVARIANCES)
        if unknown:
            raise ValueError(
                f"{type(norm).__name__} declares the invariances {sorted(unknown)}, which are not "
                f"among {', '.join(INVARIANCES)}"
            )
        make = functools.partial(_layer, norm, inputs, features, seed, weight_scale)
        layer, plain = make(eps), make(0.0)
        for frozen in (False, True) if norm.batch_dependent or always_frozen else (False,):
            found, exact = (
                measure_invariance(each, inputs, factors, frozen=frozen, seed=seed)
                for each in (layer, plain)
            )
            predicted: dict[str, float | None] = dict.fromkeys(INVARIANCES)
            if not frozen:
                predicted |= _predictions(make, layer, inputs, factors, seed)
            declared = None if frozen else norm.invariances
            cells = {
                name: InvarianceCell(
                    found[name],
                    exact[name],
                    predicted[name] if exact[name] <= INVARIANT else None,
                    None if declared is None else name in declared,
                )
                for name in INVARIANCES
            }
            rows.append(InvarianceRow(_label(norm, eps), frozen, cells))
    return InvarianceTable(rows, eps)


def write_eps_effect(effects: Sequence[EpsEffect], path: Path) -> None:
    """Write a CSV file with a line for each norm, δ and ratio."""
    rows = (
        [effect.norm, f"{effect.eps:g}", f"{effect.factor:g}", *(f"{x:.4g}" for x in numbers)]
        for effect in effects
        for numbers in zip(effect.ratios, effect.measured, effect.predicted, strict=True)
    )
    write_csv(path, ["norm", "eps", "factor", "variance_by_eps", "measured", "formula"], rows)
