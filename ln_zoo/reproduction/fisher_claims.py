"""Tests of the claims of Ba et al. 2016, section 5.2, about the geometry of learning.

Measured on models of `ln_zoo.analysis.random_glm` in float64, with eps = 0. Derivations:
`docs/results/fisher.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from ln_zoo.analysis.fisher import (
    GLM,
    Family,
    Normalization,
    closed_form_fisher,
    empirical_fisher,
    exact_fisher,
    gain_block,
    invariant_directions,
    kl_divergence,
    monte_carlo_fisher,
    null_space_basis,
    random_glm,
    squared_distance,
)
from ln_zoo.utils.tables import csv_table, markdown_table, rich_table, write_csv

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_FAMILIES: tuple[Family, ...] = get_args(Family)
_NAMES = {"none": "none", "bn": "BN", "wn": "WN", "ln": "LN"}
Measure = Callable[[GLM], float]
#: Tolerance for rounding in float64.
_EXACT = 1e-12
#: Random models over which errors of printed formulas are reported.
_MODELS = 16
#: Smallest relative error that counts as wrong, not as rounding.
_WRONG = 0.01
#: Step lengths for the remainder of the KL divergence.
_STEPS = [2.0**-k for k in range(2, 11)]
#: Directions to average over, since the third order may vanish along one.
_DIRECTIONS = 8
#: Runs to average over at each number of draws.
_RUNS = 6
#: Examples for the empirical matrix, enough to make its sampling error small.
_MANY = 20_000


@dataclasses.dataclass(frozen=True)
class FisherCheck:
    """One claim and its measurement."""

    source: str  #: equation or section of the paper
    claim: str  #: the measured quantity
    expected: str  #: the correct value, or a property of it
    measured: str
    agrees: bool  #: whether both agree, up to rounding or the stated tolerance


@dataclasses.dataclass(frozen=True)
class FisherPanel:
    """One panel of the picture: lines by name over x; ``power``: their expected exponent in x."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: dict[str, list[float]]
    power: float | None = None


@dataclasses.dataclass(frozen=True)
class FisherStudy:
    """All claims, and the panels of the picture; a `rich` renderable."""

    checks: list[FisherCheck]
    #: Absolute eigenvalues of F in descending order; KL - 1/2 step^T F step in nats, root mean
    #: square over directions (both Bernoulli, by normalisation); relative errors of the sampled F
    #: (batch norm) and of eq. 13 as printed for LN, by family.
    panels: tuple[FisherPanel, FisherPanel, FisherPanel, FisherPanel]

    @property
    def agrees(self) -> bool:
        """Whether all measurements agree."""
        return all(check.agrees for check in self.checks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        table = rich_table()
        for heading in _HEADINGS:
            table.add_column(heading)
        for check in self.checks:
            *texts, verdict = _texts(check)
            style = "green" if check.agrees else "bold red"
            # Text, because rich parses brackets in str as markup.
            table.add_row(*map(Text, texts), Text(verdict, style))
        yield table

    def markdown(self) -> str:
        """The claims as a Markdown table."""
        return markdown_table(_HEADINGS, map(_texts, self.checks))

    def csv(self) -> str:
        """The claims as comma-separated values."""
        return csv_table(_HEADINGS, map(_texts, self.checks))


_HEADINGS = ["source", "claim", "expected", "measured", "agrees"]


def _texts(check: FisherCheck) -> list[str]:
    words = [check.source, check.claim, check.expected, check.measured]
    return [*words, "yes" if check.agrees else "no"]


def study_fisher(
    units: int = 4, features: int = 5, examples: int = 200, draws: int = 500_000, seed: int = 0
) -> FisherStudy:
    """Measure every claim about the Fisher information of normalised GLMs.

    Args:
        units: H, at least 3.
        features: D, at least 2.
        examples: N, at least 2 (D + 2), so that data add no null direction.
        draws: largest number of sampled outputs over all examples, at least 100 N; a hundredth and
            a tenth of it are used too.
        seed: seed of the models.
    """
    for name, value, least in (
        ("units", units, 3),
        ("features", features, 2),
        ("examples", examples, 2 * (features + 2)),
        ("draws", draws, 100 * examples),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")

    def make(family: Family, norm: Normalization, size: int = units) -> GLM:
        return random_glm(family, norm, size, features, examples, seed)

    norms = get_args(Normalization)
    models = [make(family, norm) for family in _FAMILIES for norm in norms]
    bernoulli = {_NAMES[norm]: make("bernoulli", norm) for norm in norms}
    spectra = {name: _spectrum(exact_fisher(model)) for name, model in bernoulli.items()}
    printed = closed_form_fisher(bernoulli["LN"], paper_form=True)
    spectra["LN, eq. 13 as printed"] = _spectrum(printed)
    remainders = {name: _remainders(model, _STEPS, seed) for name, model in bernoulli.items()}
    numbers = [draws // 100 // examples, draws // 10 // examples, draws // examples]
    drawn = [number * examples for number in numbers]
    sampling: dict[str, list[float]] = {
        family: _sampling_errors(make(family, "bn"), numbers, seed) for family in _FAMILIES
    }
    sizes = [4, 16, 64]
    deviations: dict[str, list[float]] = {
        family: [_printed_error(make(family, "ln", size)) for size in sizes] for family in _FAMILIES
    }
    checks = [
        *_formula_checks(models),
        *_printed_checks(deviations, models, features, examples, seed),
        *_scale_checks(models),
        *_null_checks(models),
        *_step_checks(models, seed),
        *_input_scale_checks(models),
        *_kl_checks(models, seed),
        *_sampling_checks(drawn, sampling),
        *_empirical_checks(units, features, seed),
    ]
    error, places = "relative error of F", range(1, len(spectra["LN"]) + 1)
    panels = (
        FisherPanel("eigenvalues of F, Bernoulli", "place", "eigenvalue", places, spectra),
        FisherPanel(
            "KL less its quadratic form, Bernoulli", "length of the step", "nats",
            _STEPS, remainders, 3,
        ),
        FisherPanel("F from sampled outputs, BN", "sampled outputs", error, drawn, sampling, -0.5),
        FisherPanel("eq. 13 as printed, LN", "units H", error, sizes, deviations, -0.5),
    )  # fmt: skip
    return FisherStudy(checks, panels)


# Measures


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _ratio(after: Tensor, before: Tensor) -> float:
    """The factor from ``before`` to ``after``; NaN if they are not proportional."""
    ratio = (after * before).sum() / before.square().sum()
    proportional = _relative(after, ratio * before) <= _EXACT
    return float(ratio) if proportional else float("nan")


def _spectrum(fisher: Tensor) -> list[float]:
    return sorted(torch.linalg.eigvalsh(fisher).abs().tolist(), reverse=True)


def _blocks(model: GLM) -> Tensor:
    """F as (H, D + 2, H, D + 2): unit and index in [w, b, g], twice."""
    size = model.parameters().numel() // model.units
    return closed_form_fisher(model).view(model.units, size, model.units, size)


def _printed_error(model: GLM) -> float:
    return _relative(closed_form_fisher(model, paper_form=True), closed_form_fisher(model))


def _random_directions(model: GLM, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    theta = model.parameters()
    steps = torch.randn(_DIRECTIONS, len(theta), generator=generator, dtype=theta.dtype)
    return steps / steps.norm(dim=1, keepdim=True)


def _remainders(model: GLM, lengths: Sequence[float], seed: int) -> list[float]:
    squares = torch.zeros(len(lengths), dtype=torch.float64)
    for step in _random_directions(model, seed):
        quadratic = squared_distance(model, step)
        kl = torch.stack([kl_divergence(model, length * step) for length in lengths])
        squares += (kl - quadratic * torch.tensor(lengths, dtype=torch.float64).square()).square()
    return (squares / _DIRECTIONS).sqrt().tolist()


def _sampling_errors(model: GLM, numbers: Sequence[int], seed: int) -> list[float]:
    exact = closed_form_fisher(model)
    return [
        statistics.mean(
            _relative(monte_carlo_fisher(model, number, seed * _RUNS + run), exact)
            for run in range(_RUNS)
        )
        for number in numbers
    ]


def _weight_gradient(model: GLM, targets: Tensor) -> Tensor:
    weight = model.weight.clone().requires_grad_()
    outputs = dataclasses.replace(model, weight=weight).distribution()
    (gradient,) = torch.autograd.grad(-outputs.log_prob(targets).mean(), weight)
    return gradient


def _labels(model: GLM, seed: int) -> Tensor:
    """Outputs (N, H) of another random model at the same inputs."""
    other = random_glm(model.family, "none", model.units, model.features, 2, seed + 1)
    other = dataclasses.replace(other, inputs=model.inputs)
    return other.sample(seed=seed)[0]


# Claims


def _exact(source: str, claim: str, errors: Iterable[float]) -> FisherCheck:
    worst = max(errors)
    return FisherCheck(source, claim, f"<= {_EXACT:g}", f"{worst:.1g}", worst <= _EXACT)


def _equal(
    source: str, claim: str, expected: float, models: Iterable[GLM], measure: Measure
) -> FisherCheck:
    """The worst value by normalisation, all of which must equal the expected one."""
    found: dict[str, list[float]] = {}
    for model in models:
        found.setdefault(_NAMES[model.norm], []).append(measure(model))

    def off(value: float) -> float:
        return abs(value - expected) if value == value else math.inf

    worst = {name: max(values, key=off) for name, values in found.items()}
    text = ", ".join(f"{name} {value:.6g}" for name, value in worst.items())
    agrees = all(off(value) <= _EXACT * max(1, expected) for value in worst.values())
    return FisherCheck(source, claim, f"{expected:g}", text, agrees)


def _of(models: Iterable[GLM], norms: str, families: str = " ".join(_FAMILIES)) -> list[GLM]:
    return [m for m in models if m.norm in norms.split() and m.family in families.split()]


def _formula_checks(models: Sequence[GLM]) -> list[FisherCheck]:
    return [
        _exact(
            "12-14", "closed forms against autograd, 3 families x 4 norms",
            (_relative(closed_form_fisher(model), exact_fisher(model)) for model in models),
        ),
        _exact(
            "8, 9", "Hessian of KL at 0 against F",
            (_relative(_kl_hessian(model), exact_fisher(model)) for model in models),
        ),
        _exact(
            "33, 34", "gain block of LN, WN against that of F",
            (
                _relative(gain_block(model), _blocks(model)[:, -1, :, -1])
                for model in _of(models, "ln wn")
            ),
        ),
    ]  # fmt: skip


def _kl_hessian(model: GLM) -> Tensor:
    zero = torch.zeros_like(model.parameters())
    return torch.func.hessian(lambda step: kl_divergence(model, step))(zero)


def _gain_error(model: GLM) -> float:
    return _relative(gain_block(model, paper_form=True), gain_block(model))


def _printed_checks(
    deviations: dict[str, list[float]], models: Sequence[GLM], features: int, examples: int,
    seed: int,
) -> Iterator[FisherCheck]:  # fmt: skip
    by_units = list(zip(*deviations.values(), strict=True))
    yield FisherCheck(
        "13, 14", "LN as printed: relative error of F, H = 4, 16, 64",
        "not 0, falls with H",
        ", ".join(f"{100 * min(v):.0f}-{100 * max(v):.0f}" for v in by_units) + " %",
        all(a > b > _WRONG for few in deviations.values() for a, b in itertools.pairwise(few)),
    )  # fmt: skip
    coupled: tuple[Family, ...] = ("bernoulli", "categorical")
    for family in coupled:
        errors = [
            _gain_error(random_glm(family, "bn", 4, features, examples, seed + k))
            for k in range(_MODELS)
        ]
        middle = statistics.median(errors)
        yield FisherCheck(
            "32", f"BN as printed: relative error of the gain block, {family}, {_MODELS} models",
            "not 0",
            f"{100 * middle:.0f} ({100 * min(errors):.0f}-{100 * max(errors):.0f}) %",
            min(errors) > _WRONG,
        )  # fmt: skip
    yield _exact(
        "32", "the same for independent Gaussian outputs",
        map(_gain_error, _of(models, "bn", "gaussian")),
    )  # fmt: skip
    yield _exact(
        "35", "no norm, |w_i| |w_j|: WN's block at equal function",
        (
            _relative(gain_block(model), gain_block(_as_weight_norm(model)))
            for model in _of(models, "none")
        ),
    )  # fmt: skip


def _as_weight_norm(model: GLM) -> GLM:
    norms = torch.linalg.vector_norm(model.weight, dim=1)
    return dataclasses.replace(model, norm="wn", gain=norms)


def _doubled(model: GLM) -> GLM:
    return dataclasses.replace(model, weight=2 * model.weight)


def _scale_checks(models: Sequence[GLM]) -> Iterator[FisherCheck]:
    w, rest = slice(-2), slice(-2, None)
    for claim, rows, columns, expected in (
        ("W doubled: curvature F_ww (the paper: 1/2)", w, w, 0.25),
        ("W doubled: mixed blocks F_wb, F_wg", w, rest, 0.5),
        ("W doubled: blocks of gains and biases", rest, rest, 1.0),
    ):

        def ratio(model: GLM, rows: slice = rows, columns: slice = columns) -> float:
            after, before = _blocks(_doubled(model)), _blocks(model)
            return _ratio(after[:, rows, :, columns], before[:, rows, :, columns])

        yield _equal("5.2.2", claim, expected, _of(models, "bn wn ln"), ratio)

    def neighbours(model: GLM) -> float:
        weight = model.weight.clone()
        weight[0] *= 2
        after = _blocks(dataclasses.replace(model, weight=weight))
        return _ratio(after[0, w, 1:, w], _blocks(model)[0, w, 1:, w])

    own = _of(models, "bn wn", "categorical")
    yield _equal("5.2.2", "w_i doubled: F_wiwj, w_j as it was", 0.5, own, neighbours)


def _null_checks(models: Sequence[GLM]) -> Iterator[FisherCheck]:
    (printed,) = _of(models, "ln", "bernoulli")
    size = printed.parameters().numel()

    def rank(fisher: Tensor) -> int:
        return size - null_space_basis(fisher).shape[1]

    for norm, lost in (("bn", printed.units), ("wn", printed.units), ("ln", printed.features + 1)):
        own = _of(models, norm, "gaussian bernoulli")  # the classes of a softmax have further ones
        ranks = {rank(exact_fisher(model)) for model in own}
        yield FisherCheck(
            "5.2.2", f"{_NAMES[norm]}: rank of F, of {size}", f"{size - lost}",
            ", ".join(map(str, sorted(ranks))), ranks == {size - lost},
        )  # fmt: skip
    found = rank(closed_form_fisher(printed, paper_form=True))
    claim = "LN as printed: rank, null directions lost"
    yield FisherCheck("13, 14", claim, f"{size}", str(found), found == size)


def _step_checks(models: Sequence[GLM], seed: int) -> list[FisherCheck]:
    def along(model: GLM) -> float:
        theta = model.parameters().requires_grad_()
        targets = _labels(model, seed)
        outputs = model.with_parameters(theta).distribution()
        (gradient,) = torch.autograd.grad(outputs.log_prob(targets).mean(), theta)
        return float((invariant_directions(model).T @ gradient).norm() / gradient.norm())

    def growth(model: GLM) -> float:
        step = _weight_gradient(model, _labels(model, seed))
        step *= model.weight.norm() / step.norm()  # for an exact difference of squares
        grown = (model.weight - step).square().sum() - model.weight.square().sum()
        return float(grown / step.square().sum())

    def turn(model: GLM) -> float:
        targets = _labels(model, seed)
        once, twice = (
            _turn(each.weight, _weight_gradient(each, targets)) for each in (model, _doubled(model))
        )
        return float(twice / once)

    own = _of(models, "bn wn ln")
    claim = "gradient along w_i (LN: W, and added up over units)"
    return [
        _exact("5.2.2", claim, map(along, own)),
        _equal("5.2.2", "SGD step d: growth of |W|^2 / |d|^2", 1.0, own, growth),
        _equal("5.2.2", "SGD step, W doubled: tangent of its turn", 0.25, own, turn),
    ]


def _turn(weight: Tensor, step: Tensor) -> Tensor:
    """Tangent of the angle between a weight matrix before and after a step."""
    after = weight - step
    along = (after * weight).sum() / weight.norm()
    return (after - along * weight / weight.norm()).norm() / along


def _input_scale_checks(models: Sequence[GLM]) -> Iterator[FisherCheck]:
    kappa = 3.0

    def growth(model: GLM) -> float:
        # Without a norm, smaller weights keep the outputs and C.
        weight = model.weight / kappa if model.norm == "none" else model.weight
        scaled = dataclasses.replace(model, inputs=kappa * model.inputs, weight=weight)
        return _ratio(gain_block(scaled), gain_block(model))

    for norm, expected in (("bn", 1.0), ("ln", 1.0), ("wn", kappa**2), ("none", kappa**2)):
        # With weight norm, C is constant only if it does not depend on s.
        own = _of(models, norm, "gaussian") if norm == "wn" else _of(models, norm)
        check = _equal(
            "32-35", f"{_NAMES[norm]}: gain block, inputs times 3", expected, own, growth
        )
        yield dataclasses.replace(check, measured=check.measured.split()[-1])


def _kl_checks(models: Sequence[GLM], seed: int) -> list[FisherCheck]:
    (linear,) = _of(models, "none", "gaussian")
    ratios = []
    for model in models:
        if model is not linear:
            longer, shorter = _remainders(model, _STEPS[-2:], seed)
            ratios.append(longer / shorter)
    return [
        FisherCheck(
            "8", "KL less its quadratic form, per halving of the step", "8",
            f"{min(ratios):.3f} to {max(ratios):.3f}",
            all(abs(ratio - 8) < 0.4 for ratio in ratios),
        ),
        _exact(
            "8", "the same for Gaussian, no norm: KL is quadratic",
            (
                _relative(kl_divergence(linear, step), squared_distance(linear, step))
                for step in _random_directions(linear, seed)
            ),
        ),
    ]  # fmt: skip


def _sampling_checks(
    draws: Sequence[int], sampling: dict[str, list[float]]
) -> Iterator[FisherCheck]:
    for family, errors in sampling.items():
        logs = ([math.log(number) for number in numbers] for numbers in (draws, errors))
        slope = statistics.linear_regression(*logs).slope
        yield FisherCheck(
            "9", f"sampled F, {family}: error over number of draws, exponent", "-0.5",
            f"{slope:.2f} ({', '.join(f'{100 * error:.1f}' for error in errors)} %)",
            abs(slope + 0.5) < 0.15,
        )  # fmt: skip


def _empirical_checks(units: int, features: int, seed: int) -> list[FisherCheck]:
    model = random_glm("bernoulli", "bn", units, features, _MANY, seed)
    exact = closed_form_fisher(model)
    targets = (model.sample(seed=seed)[0], _labels(model, seed))
    right, wrong = (_relative(empirical_fisher(model, y), exact) for y in targets)
    claim = f"empirical F, {_MANY:,} labels of the model: relative error"
    other = "the same, labels of another model"
    return [
        FisherCheck("9", claim, "about 0", f"{100 * right:.1f} %", right < 0.1),
        FisherCheck("9", other, "not 0", f"{100 * wrong:.0f} %", wrong > 2 * right),
    ]


def write_fisher_curves(study: FisherStudy, path: Path) -> None:
    """Write the curves to a CSV file with the columns panel, line, x, y."""
    rows = (
        [panel.title, name, x, f"{y:.4g}"]
        for panel in study.panels
        for name, values in panel.lines.items()
        for x, y in zip(panel.x, values, strict=False)
    )
    write_csv(path, ["panel", "line", "x", "y"], rows)
