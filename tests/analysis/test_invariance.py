"""Table 1 of the paper, computed, against the equations; and what eps does to it."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cli_support import rows_of
from layer_results import randomised
from reference import layer_norm
from rich.console import Console
from torch import Tensor, nn
from unchanged import unchanged

from ln_zoo.analysis import (
    InvarianceTable,
    eps_deviation,
    eps_effect,
    invariance,
    invariance_table,
    measure_invariance,
    random_inputs,
    write_eps_effect,
)
from ln_zoo.layers import Linear
from ln_zoo.norms import (
    INVARIANCES,
    BatchNorm,
    Identity,
    LayerNorm,
    Norm,
    RMSNorm,
    WeightNorm,
    population_statistics,
)
from ln_zoo.plots import plot_eps_effect
from ln_zoo.testing import invariance_deviations

F64 = torch.float64
FACTORS = (0.25, 3.0)
#: Mostly dark, in float32.
PIXELS = torch.rand(30, 20, generator=torch.Generator().manual_seed(0)) ** 4

#: The corrected table, columns in its order; the paper has the first three rows.
TABLE_1 = {
    BatchNorm(): "yes no yes yes yes no",
    WeightNorm(): "yes no yes no no no",
    LayerNorm(): "yes yes no yes no yes",
    RMSNorm(): "yes no no yes no yes",
    Identity(): "no no no no no no",
}


def made(norm: Norm, inputs: int = 8, features: int = 6, seed: int = 1) -> Linear:
    torch.manual_seed(seed)
    return randomised(Linear(inputs, features, norm=norm, dtype=F64))


@pytest.mark.parametrize(("norm", "row"), TABLE_1.items(), ids=repr)
@pytest.mark.parametrize(
    "options",
    [
        *({"seed": seed} for seed in range(3)),
        *({"weight_scale": scale} for scale in (1e-6, 1e6)),
        {"inputs": PIXELS, "features": 2},
        {"inputs": PIXELS, "features": 11},
    ],
    ids=lambda options: "-".join(options),
)
def test_table_1(norm: Norm, row: str, options: dict[str, Any]) -> None:
    table = invariance_table([norm], **options)
    cells = table.rows[0].cells
    assert tuple(cells) == INVARIANCES
    for word, cell in zip(row.split(), cells.values(), strict=True):
        assert cell.deviation <= 1e-12 if word == "yes" else cell.deviation > 0.1
        assert (cell.verdict, cell.declared) == (word, word == "yes")
        assert cell.exact == cell.deviation
    assert table.agrees


def test_all_rows_by_default() -> None:
    rows = invariance_table().rows
    assert [row.label for row in rows] == [
        "BatchNorm", "BatchNorm, frozen", "WeightNorm", "LayerNorm", "RMSNorm", "Identity",
    ]  # fmt: skip
    assert [row.frozen for row in rows] == [False, True, False, False, False, False]
    rows = invariance_table([LayerNorm(), BatchNorm()], always_frozen=True).rows
    assert [row.frozen for row in rows] == [False, True, False, True]
    words = [[cell.verdict for cell in row.cells.values()] for row in rows[:2]]
    assert words[0] == words[1]


#: The order in which the maps come; the last four again for each factor.
ORDER = (
    "weight_matrix_recentering", "dataset_recentering", "weight_matrix_rescaling",
    "weight_vector_rescaling", "dataset_rescaling", "example_rescaling",
)  # fmt: skip


class Recorder(nn.Linear):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0], dtype=F64)
        self.weight = nn.Parameter(weight)
        self.runs: list[tuple[Tensor, Tensor]] = []

    def __deepcopy__(self, memo: dict) -> Recorder:
        return self

    def forward(self, input: Tensor) -> Tensor:
        self.runs.append((self.weight.detach(), input))
        return super().forward(input)


def test_the_maps_are_those_of_the_paper() -> None:
    w, x = made(Identity()).weight.detach().clone(), random_inputs()
    layer = Recorder(w)
    deviations = measure_invariance(layer, x, FACTORS)
    before, *runs = layer.runs
    unit, example = (int(a.square().sum(1).argmax()) for a in (w, x))
    # One vector is added to all rows.
    gamma, shift = runs[0][0] - w, runs[1][1] - x
    for moved in (gamma, shift):
        torch.testing.assert_close(moved, moved[:1].expand_as(moved))
        assert moved[0].abs().min() > 1e-3
    expected = [(w, x), (w + gamma, x), (w, x + shift)]
    for delta in FACTORS:
        one_row, one_example = w.clone(), x.clone()
        one_row[unit] *= delta
        one_example[example] *= delta
        expected += [(delta * w, x), (one_row, x), (w, delta * x), (w, one_example)]
    for run, pair in zip([before, *runs], expected, strict=True):
        torch.testing.assert_close(run, pair, rtol=1e-15, atol=1e-15)
    plain = x @ w.T
    spread = (plain - plain.mean(0)).abs().max()
    moves = [float((data @ mapped.T - plain).abs().max() / spread) for mapped, data in runs]
    for number, name in enumerate(ORDER):
        of_map = moves[number::4] if number > 1 else moves[number : number + 1]
        assert deviations[name] == pytest.approx(max(of_map), rel=1e-9)


def by_hand(norm: Norm, layer: Linear, w: Tensor, x: Tensor, eps: float = 0.0) -> Tensor:
    b, site = layer.bias.detach(), layer.site
    if isinstance(norm, WeightNorm):
        return x @ (site.scale.detach()[:, None] * w / w.norm(dim=1)[:, None]).T + b
    a = x @ w.T
    if isinstance(norm, Identity):
        return a + b
    center = not isinstance(norm, RMSNorm)
    z = layer_norm(a.T, eps).T if norm.batch_dependent else layer_norm(a, eps, center=center)
    return site.gain.detach() * z + b


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("norm", TABLE_1, ids=repr)
def test_deviations_are_those_of_the_equations(norm: Norm, eps: float) -> None:
    if "eps" in vars(norm):
        norm = dataclasses.replace(norm, eps=eps)
    layer, x = made(norm), random_inputs()
    recorder = Recorder(layer.weight.detach().clone())
    measure_invariance(recorder, x, (2.0,))
    before, *outputs = (by_hand(norm, layer, w, data, eps) for w, data in recorder.runs)
    spread = (before - before.mean(0)).abs().max()
    expected = [float((output - before).abs().max() / spread) for output in outputs]
    found = measure_invariance(layer, x, (2.0,))
    assert set(found) == set(INVARIANCES)
    assert [found[name] for name in ORDER] == pytest.approx(expected, rel=1e-9, abs=1e-14)


def test_frozen_statistics_and_devices_are_those_of_the_inputs() -> None:
    layer, x = made(BatchNorm()), random_inputs()
    training = layer(x).detach()
    with population_statistics(layer, "total_variance"):
        layer(x)
    torch.testing.assert_close(layer.eval()(x), training, rtol=0, atol=1e-12)
    recomputed, frozen = (measure_invariance(layer, x, frozen=each) for each in (False, True))
    assert recomputed["dataset_recentering"] < 1e-12 < frozen["dataset_recentering"]
    inputs = torch.empty(4, 8, device="meta")
    layer = invariance._layer(LayerNorm(), inputs, 6, 0, 1.0, None)
    assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("norm", "affine"),
    [(BatchNorm(), True), (WeightNorm(), True), (LayerNorm(), False), (RMSNorm(), False)],
    ids=str,
)
def test_batch_and_weight_norm_are_reparameterisations(norm: Norm, affine: bool) -> None:
    """Paper, section 4: some plain layer has the same outputs, but none has layer norm's."""
    torch.manual_seed(0)
    layer, x = randomised(Linear(8, 6, norm=norm, dtype=F64)), random_inputs()
    layer(x)
    outputs = layer.eval()(x).detach()
    extended = torch.cat([x, x.new_ones(len(x), 1)], 1)
    fitted = extended @ torch.linalg.lstsq(extended, outputs).solution
    missed = (outputs - fitted).abs().max() / (outputs - outputs.mean(0)).abs().max()
    assert missed < 1e-12 if affine else missed > 0.1


@dataclasses.dataclass(frozen=True)
class BatchScale(Norm):
    """A user's own: divides by the batch's root mean square, of which it keeps an average."""

    share: float = 1.0
    batch_dependent: ClassVar[bool] = True

    def init_params(self, site) -> None:
        site.add_buffer("scale", (site.features,), 1.0)

    def normalize(self, site, a: Tensor, step: int | None = None) -> Tensor:
        if not site.training:
            return a / site.scale
        scale = a.square().mean(0).sqrt()
        site.scale.lerp_(scale.detach(), self.share)
        return a / scale


def test_a_norm_with_statistics_of_its_own() -> None:
    recomputed, frozen = invariance_table([BatchScale()]).rows
    words = [cell.verdict for cell in recomputed.cells.values()]
    assert words == ["yes", "no", "yes", "yes", "no", "no"]
    assert [cell.verdict for cell in frozen.cells.values()] == ["no"] * 6
    layer, x = made(BatchScale()), random_inputs()
    a = x @ layer.weight.detach().T
    z = a / a.square().mean(0).sqrt()
    found = measure_invariance(layer, x, (3.0,), frozen=True)["dataset_rescaling"]
    assert found == pytest.approx(float(2 * z.abs().max() / (z - z.mean(0)).abs().max()))


def test_running_averages_are_frozen_at_those_of_the_inputs() -> None:
    """As if they had been taken in one pass; one pass alone leaves nine tenths of the start."""
    x = random_inputs()
    one, averaged = (made(norm) for norm in (BatchScale(), BatchScale(0.1)))
    wanted, found = (measure_invariance(each, x, frozen=True) for each in (one, averaged))
    assert found == pytest.approx(wanted, rel=1e-9)
    assert torch.equal(averaged.site.scale, torch.ones_like(averaged.site.scale))
    averaged.site.scale.zero_()  # which cannot be divided by
    assert measure_invariance(averaged, x, frozen=True) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.1, 1e-4, 0.0, None])
def test_torchs_batch_norm_is_frozen_at_the_statistics_of_the_inputs(momentum) -> None:
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 6, dtype=F64), nn.BatchNorm1d(6, 1e-30, momentum, dtype=F64)
    layer, x = nn.Sequential(linear, norm), random_inputs()
    with torch.no_grad():  # units of several sizes, so that one start does not suit all
        linear.weight *= torch.tensor([0.01, 0.1, 1.0, 3.0, 10.0, 100.0], dtype=F64)[:, None]
    for _ in range(3):  # what was there before counts for nothing
        layer(5 * x.exp())
    found = measure_invariance(layer, x, (3.0,), weight="0.weight", frozen=True)
    a = (x @ linear.weight.T + linear.bias).detach()
    fixed = nn.Linear(6, 6, dtype=F64)  # variances over N - 1, as torch keeps them
    with torch.no_grad():
        fixed.weight.copy_((1 / a.std(0)).diag())
        fixed.bias.copy_(-a.mean(0) / a.std(0))
    wanted = measure_invariance(nn.Sequential(linear, fixed), x, (3.0,), weight="0.weight")
    assert found == pytest.approx(wanted, rel=1e-9)


def test_statistics_that_are_not_those_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Linear do not converge"):
        measure_invariance(made(BatchScale(0.0)), 3 * random_inputs(), frozen=True)
    monkeypatch.setattr(invariance, "_PASSES", 30)
    with pytest.raises(ValueError, match="Linear did not converge in 30 passes"):
        measure_invariance(made(BatchScale(0.1)), random_inputs(), frozen=True)


def test_dropout_stays_in_its_mode() -> None:
    """Off, it has no part in frozen statistics; on, it drops the same in every run."""
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 6, dtype=F64), nn.BatchNorm1d(6, dtype=F64)
    plain, x = nn.Sequential(linear, norm), random_inputs()
    layer = nn.Sequential(linear, norm, nn.Dropout(0.5)).eval()
    first = nn.Sequential(nn.Dropout(0.5), linear, norm).eval()
    for frozen in (False, True):
        wanted = measure_invariance(plain.eval(), x, weight="0.weight", frozen=frozen)
        for module, name in ((layer, "0.weight"), (first, "1.weight")):
            found = measure_invariance(module, x, weight=name, frozen=frozen)
            assert found == pytest.approx(wanted, rel=1e-12)
    layer.train()
    random = torch.get_rng_state()
    found = measure_invariance(layer, x, weight="0.weight")
    assert torch.equal(torch.get_rng_state(), random)
    names = ["weight_matrix_rescaling", "weight_vector_rescaling", "dataset_rescaling"]
    # Of nothing but eps, beside which dropping at random would be 1.
    assert max(found[name] for name in (*names, "dataset_recentering")) < 1e-2
    frozen = measure_invariance(layer, x, weight="0.weight", frozen=True)
    assert frozen == measure_invariance(layer, x, weight="0.weight", frozen=True)
    assert frozen["dataset_rescaling"] > 0.1


def test_no_generator_but_the_cpus_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would seed those of all devices, which only a fork would put back."""

    def refuse(*_: object) -> None:
        raise AssertionError("all devices seeded")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    monkeypatch.setattr(torch.random, "manual_seed", refuse)
    random = torch.get_rng_state()
    invariance_table([LayerNorm(), BatchNorm(), BatchScale(0.1)], eps=None)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("norm", TABLE_1, ids=repr)
@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_of_the_layer_is_changed(norm: Norm, frozen: bool) -> None:
    layer = made(norm)
    with unchanged(layer):
        measure_invariance(layer, random_inputs(), frozen=frozen)


# eps


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize(
    "norm", [*TABLE_1, BatchNorm(unbiased=True), LayerNorm(eps=0.1), BatchNorm(eps=1.0)], ids=repr
)
def test_as_shipped_the_formula_predicts_every_deviation(norm: Norm, scale: float) -> None:
    row, *_ = invariance_table([norm], eps=None, weight_scale=scale).rows
    for name, cell in row.cells.items():
        assert cell.agrees
        assert (cell.predicted is not None) == (cell.verdict == "yes")
        if cell.predicted is not None:
            assert cell.deviation == pytest.approx(cell.predicted, rel=1e-6, abs=1e-12)
            scales = name.endswith("rescaling") and "eps" in vars(norm)
            assert (cell.predicted > 0) == scales
        else:
            assert cell.exact > 0.1


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 3.0, 100.0])
def test_formula(factor: float) -> None:
    """At its ends; between them against measurements below."""
    large = torch.tensor(1e9, dtype=F64)
    expected = (1 - factor**-2) / 2e9
    assert float(eps_deviation(large, 1.0, factor)) == pytest.approx(expected, rel=1e-6)
    assert float(eps_deviation(large / 1e18, 1.0, factor)) == pytest.approx(factor - 1, rel=1e-4)
    assert eps_deviation(large, 0.0, factor) == 0


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize(
    "norm", [BatchNorm(), BatchNorm(unbiased=True), LayerNorm(), RMSNorm(eps=1e-8)], ids=repr
)
def test_effect_of_eps_is_that_of_the_formula(norm: Norm, eps: float | None) -> None:
    effects = eps_effect(norm, eps, (0.25, 3.0))
    assert [effect.factor for effect in effects] == [0.25, 3.0]
    for effect in effects:
        assert effect.eps == (norm.eps if eps is None else eps)
        assert len(effect.ratios) == 25
        torch.testing.assert_close(effect.measured, effect.predicted, rtol=1e-5, atol=0)
        root = ((effect.ratios + 1) / (effect.ratios + effect.factor**-2)).sqrt() - 1
        torch.testing.assert_close(effect.measured, root.abs(), rtol=1e-4, atol=1e-13)
        # From O(1) where the variance is far below eps to nothing where it is far above.
        assert effect.measured[0] == pytest.approx(abs(effect.factor - 1), rel=1e-2)
        assert effect.measured[-1] < 1e-7


@dataclasses.dataclass(frozen=True)
class EpsOutside(Norm):
    eps: float = 1e-5
    invariances: ClassVar[frozenset[str] | None] = RMSNorm.invariances

    def normalize(self, site, a: Tensor, step: int | None = None) -> Tensor:
        return a / (site.mean(a.square()).sqrt() + self.eps)


@dataclasses.dataclass(frozen=True)
class EpsUnused(Norm):
    eps: float = 1e-5


def test_a_norm_that_the_formula_is_not_meant_for() -> None:
    (row,) = invariance_table([EpsOutside()], eps=None).rows
    assert row.cells["weight_matrix_rescaling"].verdict == "yes"
    assert all(cell.predicted is None for cell in row.cells.values())
    for norm in (EpsOutside(), EpsUnused()):
        with pytest.raises(ValueError, match=type(norm).__name__):
            eps_effect(norm)
    (row,) = invariance_table([EpsUnused()], eps=None).rows
    assert row.cells["example_rescaling"].verdict == "no"
    # The formula is checked at an eps of the size of the variances, which this norm refuses.
    exact, shipped = (invariance_table([Bounded()], eps) for eps in (0.0, None))
    assert exact.agrees
    assert shipped.agrees
    assert exact.rows[0].cells["example_rescaling"].predicted == 0
    assert shipped.rows[0].cells["example_rescaling"].predicted is None
    assert invariance_deviations(Bounded())["example_rescaling"] < 1e-12
    with pytest.raises(ValueError, match=r"Bounded\(.* cannot be measured at eps=.* 1e-2 at most"):
        eps_effect(Bounded())


@dataclasses.dataclass(frozen=True)
class Claims(Norm):
    """RMS norm that says it does not care for shifts, and does not know that examples may scale."""

    strength: float = 1.0
    eps: float = 1e-5
    sizes: tuple[int, ...] = dataclasses.field(default_factory=tuple)
    invariances: ClassVar[frozenset[str] | None] = frozenset(
        {"weight_matrix_rescaling", "weight_matrix_recentering", "dataset_rescaling"}
    )

    def normalize(self, site, a: Tensor, step: int | None = None) -> Tensor:
        return self.strength * a / (site.mean(a.square()) + self.eps).sqrt()


@dataclasses.dataclass(frozen=True)
class SaysNothing(Claims):
    invariances: ClassVar[frozenset[str] | None] = None


WRONG = {"weight_matrix_recentering": "no", "example_rescaling": "yes"}


def test_claims_that_do_not_hold_are_marked() -> None:
    table = invariance_table([Claims(), LayerNorm()])
    found = {name: cell.verdict for name, cell in table.rows[0].cells.items() if not cell.agrees}
    assert found == WRONG
    assert not table.agrees
    assert all(cell.agrees for cell in table.rows[1].cells.values())
    # Without claims there is nothing to disagree with.
    table = invariance_table([SaysNothing()])
    assert table.agrees
    cells = table.rows[0].cells.values()
    assert [cell.verdict for cell in cells] == TABLE_1[RMSNorm()].split()
    assert {cell.declared for cell in cells} == {None}


def test_labels_tell_norms_apart() -> None:
    norms = [Claims(), Claims(strength=2.0, sizes=(1, 2)), LayerNorm(eps=0.5), BatchNorm()]
    labels = [row.label for row in invariance_table(norms, eps=None).rows]
    assert labels == [
        "Claims", "Claims(strength=2.0, sizes=(1, 2))", "LayerNorm(eps=0.5)",
        "BatchNorm", "BatchNorm, frozen",
    ]  # fmt: skip
    assert invariance_table([LayerNorm(eps=0.5)], eps=1e-3).rows[0].label == "LayerNorm"


class Plain(Norm):
    eps = 1e-5

    def normalize(self, site, a: Tensor, step: int | None = None) -> Tensor:
        return a - site.mean(a)


def test_norms_that_are_no_dataclasses() -> None:
    """A norm whose eps is not a field: what is left of the invariance can hardly be told."""

    class HiddenEps(Norm):
        def normalize(self, site, a: Tensor, step: int | None = None) -> Tensor:
            return a / (site.mean(a.square()) + 1e-5).sqrt()

        invariances: ClassVar[frozenset[str] | None] = RMSNorm.invariances

    cell = invariance_table([HiddenEps()]).rows[0].cells["weight_matrix_rescaling"]
    assert (cell.verdict, cell.agrees) == ("?", False)
    (row,) = invariance_table([Plain()]).rows
    assert row.label == "Plain"
    yes = [name for name, cell in row.cells.items() if cell.verdict == "yes"]
    assert yes == ["weight_matrix_recentering"]
    with pytest.raises(ValueError, match="eps above 0"):
        eps_effect(Plain(), 1e-3)


@dataclasses.dataclass(frozen=True)
class Bounded(Claims):
    invariances: ClassVar[frozenset[str] | None] = RMSNorm.invariances

    def __post_init__(self) -> None:
        if self.eps > 1e-2:
            raise ValueError("eps must be 1e-2 at most")


@dataclasses.dataclass(frozen=True)
class NeedsEps(Claims):
    def __post_init__(self) -> None:
        if self.eps <= 0:
            raise ValueError("eps must be positive")


@dataclasses.dataclass(frozen=True)
class Misspelt(Claims):
    invariances: ClassVar[frozenset[str] | None] = frozenset({"case_scaling"})


BAD_NUMBERS = (-1.0, math.nan, math.inf)
WITHOUT_EPS = ((WeightNorm(), None), (Identity(), 1e-3), (LayerNorm(), 0.0))
WRONG_FACTORS = [(), (1.0,), (-1.0,), (2.0, 0.0), (math.inf,), (math.nan,)]
WRONG_SCALES = (0.0, *BAD_NUMBERS)
WRONG_RATIOS = [[], [0.0], [-1.0], [1.0, math.nan], [math.inf]]
LAYER, X = made(LayerNorm()), random_inputs()


WRONG_TYPES: list[tuple[Callable[[], object], str]] = [
    (lambda: invariance_table([LayerNorm]), "norms.*LayerNorm"),
    (lambda: invariance_table(LayerNorm()), "LayerNorm.*not iterable"),
    (lambda: eps_effect("LayerNorm"), "'LayerNorm'"),
]
WRONG_VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: invariance_table([Misspelt()]), "Misspelt.*case_scaling.*weight_matrix"),
    (lambda: invariance_table([NeedsEps()]), "NeedsEps.*eps=0.*eps must be positive"),
    (lambda: measure_invariance(LAYER, X / 0), "output.*Linear.*finite"),
    (lambda: measure_invariance(LAYER, X.float()), "Linear.*dtype"),
    (lambda: measure_invariance(LAYER, X[:, :7]), r"Linear.*\(16, 7\)"),
    (lambda: measure_invariance(LAYER, X[:, :7], frozen=True), r"Linear.*\(16, 7\)"),
    (lambda: measure_invariance(LAYER, X[:1].expand(4, -1)), "Linear.*same"),
    (lambda: invariance_table([LayerNorm()], features=1), "not finite.*eps"),
    (lambda: invariance_table(features=0), "features.*1.*0"),
    (lambda: eps_effect(LayerNorm(), features=-1), "features.*1.*-1"),
    *((lambda a=a: eps_effect(*a), "eps above 0") for a in WITHOUT_EPS),
    *((lambda f=f: invariance_table(factors=f), "factors") for f in WRONG_FACTORS),
    *((lambda r=r: eps_effect(LayerNorm(), ratios=r), "ratios") for r in WRONG_RATIOS),
    *((lambda e=e: invariance_table([Claims()], eps=e), "eps.*0") for e in BAD_NUMBERS),
    *((lambda w=w: invariance_table(weight_scale=w), "weight_scale") for w in WRONG_SCALES),
]


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [*((TypeError, *of) for of in WRONG_TYPES), *((ValueError, *of) for of in WRONG_VALUES)],
)
def test_arguments_that_do_not_fit(
    error: type[Exception], call: Callable[[], object], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("shape", [(16,), (0, 8), (1, 8), (4, 0)])
def test_inputs_that_do_not_fit(shape: tuple[int, ...]) -> None:
    inputs = torch.ones(shape, dtype=F64)
    for call in (
        lambda: invariance_table(inputs=inputs),
        lambda: eps_effect(LayerNorm(), inputs=inputs),
        lambda: measure_invariance(LAYER, inputs),
    ):
        with pytest.raises(ValueError, match=rf"inputs.*\(N, I\).*{re.escape(str(shape))}"):
            call()


@dataclasses.dataclass(frozen=True)
class Odd_Norm(Claims):
    text: str = ""


SHOWN = invariance_table([Claims(), BatchNorm(), SaysNothing()], eps=None)


def printed(table: InvarianceTable, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_markdown() -> None:
    head, rule, *rows, empty, caption = SHOWN.markdown().splitlines()
    assert head.count("|") == rule.count("|") == 8
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["Claims", "BatchNorm", "BatchNorm, frozen", "SaysNothing"]
    claims, batch, frozen, silent = ([cell.split()[:2] for cell in row[1:]] for row in cells)
    assert claims == [
        ["yes", "(yes)"], ["**no", "(yes)!**"], ["no", "(no)"],
        ["yes", "(yes)"], ["no", "(no)"], ["**yes", "(no)!**"],
    ]  # fmt: skip
    assert batch == [[word, f"({word})"] for word in TABLE_1[BatchNorm()].split()]
    assert frozen == [["no", "(-)"]] * 6
    assert silent == [[word, "(-)"] for word in TABLE_1[RMSNorm()].split()]
    first = SHOWN.rows[0].cells["weight_matrix_rescaling"]
    assert cells[0][1] == f"yes (yes) {first.deviation:.1e} ≈ {first.predicted:.1e}"
    assert not empty
    assert "eps as shipped" in caption
    assert "!: not as declared" in caption


def test_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(SHOWN.csv())))
    assert len(rows) == 4 * 6
    flat = [(row, name, cell) for row in SHOWN.rows for name, cell in row.cells.items()]
    for found, (row, name, cell) in zip(rows, flat, strict=True):
        assert (found["norm"], found["map"]) == (row.norm, name)
        assert found["statistics"] == ("frozen" if row.frozen else "recomputed")
        assert found["invariant"] == cell.verdict
        assert found["declared"] == {True: "yes", False: "no", None: ""}[cell.declared]
        assert found["agrees"] == ("yes" if cell.agrees else "no")
        numbers = [cell.deviation, cell.exact, cell.predicted]
        shown = [found[name] for name in ("deviation", "deviation_without_eps", "formula")]
        expected = ["" if n is None else pytest.approx(n, rel=1e-3) for n in numbers]
        assert [float(text) if text else "" for text in shown] == expected
        assert found["eps"] == "shipped"
    assert {row["map"] for row in rows if row["agrees"] == "no"} == set(WRONG)


def test_latex() -> None:
    table = invariance_table([Claims(sizes=(3,)), LayerNorm()], eps=1e-4)
    comment, begin, *lines, end = table.latex().splitlines()
    assert comment.startswith("% ")
    assert (begin, end) == (r"\begin{tabular}{lcccccc}", r"\end{tabular}")
    rows = [line for line in lines if line != r"\hline"]
    assert len(lines) - len(rows) == 3
    assert all(row.count("&") == 6 and row.endswith(r" \\") for row in rows)
    assert all(row.count("{") == row.count("}") for row in rows)
    assert rows[3].startswith("LayerNorm & yes (yes) $")
    assert r"\textbf{no (yes)!}" in rows[2]
    assert r"\cdot 10^{-" in rows[3]
    assert r"\approx" in rows[3]
    assert "e-" not in rows[3]
    table = invariance_table([Odd_Norm(text="50% & {x}^2 \\ ~$#")])
    row = table.latex().splitlines()[6]
    assert row.startswith(r"Odd\_Norm(text='50\% \& \{x\}\textasciicircum{}2 ")
    assert r"\textbackslash{}\textbackslash{} \textasciitilde{}\$\#')" in row
    # Factors that are powers of 2 leave nothing but 0; a great one moves the output far.
    for factors, wanted in (((0.5, 2.0), "yes (yes) $0$"), ((1e3,), r"$1 \cdot 10^{3}$")):
        lines = invariance_table(factors=factors).latex()
        assert wanted in lines
        assert not re.search(r"\de[+-]?\d", lines)
    assert "yes (yes) 0 |" in invariance_table(factors=(0.5, 2.0)).markdown()


def test_a_terminal_of_80_characters() -> None:
    shown = printed(invariance_table(eps=None))
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    assert "…" not in shown
    assert shown.count("yes (yes)") == 4 + 2 + 4 + 3
    assert shown.count("no (no)") == 2 + 4 + 2 + 3 + 6
    assert shown.count("no (-)") == 6
    assert shown.count("\nfrozen") == 1
    assert "≈" in shown
    assert "(yes)!" in printed(SHOWN)
    # Square brackets are no markup.
    assert "text='[red]')" in printed(invariance_table([Odd_Norm(text="[red]")]), 120)


def test_picture_and_its_numbers(tmp_path: Path) -> None:
    effects = [effect for norm in (BatchNorm(), LayerNorm()) for effect in eps_effect(norm)]
    plot_eps_effect(effects, tmp_path / "new" / "eps.svg", "a title")
    drawn = (tmp_path / "new" / "eps.svg").read_text()
    for text in ("a title", "BatchNorm", "LayerNorm", "weights times 0.25", "weights times 3"):
        assert f"<!-- {text} -->" in drawn
    write_eps_effect(effects, tmp_path / "other" / "eps.csv")
    rows = rows_of(tmp_path / "other" / "eps.csv")
    assert len(rows) == 4 * 25
    first, row = effects[0], rows[3]
    assert (row["norm"], float(row["factor"])) == ("BatchNorm", first.factor)
    found = [float(row[name]) for name in ("variance_by_eps", "measured", "formula")]
    expected = [float(a[3]) for a in (first.ratios, first.measured, first.predicted)]
    assert found == pytest.approx(expected, rel=1e-3)
