"""Fisher information of normalised GLMs against expectations taken outcome by outcome."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator

import pytest
import torch
from reference import layer_norm
from torch import Tensor
from torch.nn import functional

from ln_zoo.analysis import (
    GLM,
    closed_form_fisher,
    empirical_fisher,
    exact_fisher,
    fisher,
    gain_block,
    gain_step,
    invariant_directions,
    kl_divergence,
    monte_carlo_fisher,
    null_space_basis,
    random_glm,
    squared_distance,
)

F64 = torch.float64
FAMILIES = ["gaussian", "bernoulli", "categorical"]
NORMS = ["none", "bn", "wn", "ln"]
NORMALIZED = NORMS[1:]
EXACT = 1e-12
W = slice(-2)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def natural_by_hand(model: GLM, theta: Tensor) -> Tensor:
    """s (N, H), with batch norm's statistics over all examples."""
    rows = theta.view(model.units, -1)
    w, b = rows[:, : model.features], rows[:, model.features]
    a = model.inputs @ w.T
    if model.norm == "none":
        return a + b
    if model.norm == "wn":
        z = model.inputs @ functional.normalize(w).T
    else:
        z = layer_norm(a, model.eps) if model.norm == "ln" else layer_norm(a.T, model.eps).T
    return rows[:, model.features + 1] * z + b


def log_likelihood_by_hand(model: GLM, s: Tensor, y: Tensor) -> Tensor:
    """Of one example, from eq. 10, less what does not depend on s."""
    log_partition = {
        "gaussian": (s**2).sum() / 2,
        "bernoulli": (1 + s.exp()).log().sum(),
        "categorical": s.exp().sum().log(),
    }
    return ((s * y).sum() - log_partition[model.family]) / model.dispersion


def outcomes(model: GLM, s: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Probabilities and outputs y of an example; Gaussian ones have points of equal covariance."""
    if model.family == "categorical":
        for p, y in zip(s.exp() / s.exp().sum(), torch.eye(len(s), dtype=F64), strict=True):
            yield float(p), y
        return
    for bits in itertools.product([0.0, 1.0], repeat=len(s)):
        y = torch.tensor(bits, dtype=F64)
        if model.family == "gaussian":
            yield 0.5 ** len(s), s + model.dispersion**0.5 * (2 * y - 1)
        else:
            p = 1 / (1 + (-s).exp())
            yield float(torch.where(y == 1, p, 1 - p).prod()), y


def fisher_by_hand(model: GLM, labels: Tensor | None = None) -> Tensor:
    """Mean of score score^T over the outcomes of each example, or over given labels."""
    theta = model.parameters().requires_grad_()
    s = natural_by_hand(model, theta)
    total = torch.zeros(len(theta), len(theta), dtype=F64)
    for n, line in enumerate(s):
        seen = outcomes(model, line.detach()) if labels is None else [(1.0, labels[n])]
        for probability, y in seen:
            likelihood = log_likelihood_by_hand(model, line, y)
            (score,) = torch.autograd.grad(likelihood, theta, retain_graph=True)
            total += probability * torch.outer(score, score)
    return total / len(s)


def small(family: str, norm: str, **changes: object) -> GLM:
    model = random_glm(family, norm, units=3, features=2, examples=5, seed=1)
    if family == "gaussian":
        changes = {"dispersion": 2.5, **changes}
    return dataclasses.replace(model, **changes)


@pytest.mark.parametrize(("norm", "eps"), [*((n, 0.0) for n in NORMS), ("bn", 0.3), ("ln", 0.3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_is_the_mean_over_examples_and_outcomes(family: str, norm: str, eps: float) -> None:
    model = small(family, norm, eps=eps)
    expected = natural_by_hand(model, model.parameters())
    torch.testing.assert_close(model.natural_parameters(), expected, rtol=EXACT, atol=EXACT)
    wanted = fisher_by_hand(model)
    assert relative(exact_fisher(model), wanted) <= EXACT
    assert relative(closed_form_fisher(model), wanted) <= EXACT


def test_toys_of_one_seed_differ_in_family_and_norm_only() -> None:
    toys = [random_glm(family, norm, seed=5) for family in FAMILIES for norm in NORMS]
    for name in ("inputs", "weight", "bias"):
        assert all(torch.equal(getattr(toy, name), getattr(toys[0], name)) for toy in toys)
    assert not torch.equal(random_glm(seed=6).weight, toys[0].weight)


def eq_13_for_layer_norm(model: GLM) -> Tensor:
    """Eq. 13 and 14 by loops: r_i = [g_i chi_i / sigma, 1, z_i], the unit's own term alone."""
    units, size = model.units, model.features + 2
    z, covariance = model.normalized(), model.covariance()
    total = torch.zeros(units * size, units * size, dtype=F64)
    for n, x in enumerate(model.inputs):
        a = model.weight @ x
        sigma = (a - a.mean()).square().mean().sqrt()
        r = []
        for i in range(units):
            chi = x - x / units - z[n, i] * (z[n, i] / units * x)
            r.append(torch.cat([model.gain[i] / sigma * chi, torch.ones(1), z[n, i : i + 1]]))
        for i, j in itertools.product(range(units), repeat=2):
            block = covariance[n, i, j] / model.dispersion**2 * torch.outer(r[i], r[j])
            total[i * size : (i + 1) * size, j * size : (j + 1) * size] += block
    return total / len(model.inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_eq_13_as_printed(family: str) -> None:
    for norm in ("none", "bn", "wn"):
        model = small(family, norm)
        assert torch.equal(closed_form_fisher(model, paper_form=True), closed_form_fisher(model))
    model = small(family, "ln")
    found = closed_form_fisher(model, paper_form=True)
    assert relative(found, eq_13_for_layer_norm(model)) <= EXACT
    # The blocks of gains and biases are right, those of the weights are not.
    size = model.features + 2
    both = [m.view(3, size, 3, size) for m in (found, exact_fisher(model))]
    assert relative(*(m[:, -2:, :, -2:] for m in both)) <= EXACT
    assert relative(*(m[:, W, :, W] for m in both)) > 0.1


def test_eq_35() -> None:
    """Each summand as printed, with |w_i| |w_j|."""
    for family in FAMILIES:
        model = small(family, "none")
        norms = torch.linalg.vector_norm(model.weight, dim=1)
        a, covariance = model.sums(), model.covariance() / model.dispersion**2
        right = torch.zeros(3, 3, dtype=F64)
        for n, i, j in itertools.product(range(5), range(3), range(3)):
            right[i, j] += covariance[n, i, j] * a[n, i] * a[n, j] / (norms[i] * norms[j]) / 5
        assert relative(gain_block(model), right) <= EXACT


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gain_block_is_the_metric_of_gain_steps(family: str, norm: str) -> None:
    model = small(family, norm)
    step = torch.tensor([0.3, -1.0, 2.0], dtype=F64)
    full, block = gain_step(model, step), gain_block(model)
    as_printed = gain_block(model, paper_form=True)
    if norm == "bn":  # eq. 32 lacks the product of normalised inputs
        assert relative(as_printed, model.covariance().mean(0) / model.dispersion**2) <= EXACT
    else:
        assert torch.equal(as_printed, block)
    ds2 = step @ block @ step / 2
    torch.testing.assert_close(full @ exact_fisher(model) @ full / 2, ds2, rtol=EXACT, atol=0)
    torch.testing.assert_close(squared_distance(model, full), ds2, rtol=EXACT, atol=0)
    if norm == "none":
        moved = model.with_parameters(model.parameters() + full)
        before, grown = (each.weight.norm(dim=1) for each in (model, moved))
        torch.testing.assert_close(grown, (before + step).abs())
    else:
        blocks = exact_fisher(model).view(3, model.features + 2, 3, model.features + 2)
        assert relative(block, blocks[:, -1, :, -1]) <= EXACT


@pytest.mark.parametrize(("norm", "lost"), [("none", 0), ("bn", 4), ("wn", 4), ("ln", 6)])
def test_ranks(norm: str, lost: int) -> None:
    """H = 4, D = 5: a rank for each unit under batch and weight norm, D + 1 under layer norm."""
    for family in ("gaussian", "bernoulli"):
        model = random_glm(family, norm)
        matrix = exact_fisher(model)
        null = null_space_basis(matrix)
        assert null.shape[1] == lost == len(matrix) - torch.linalg.matrix_rank(matrix, rtol=1e-12)
        directions = invariant_directions(model)
        assert directions.shape == (len(matrix), lost)
        # The same space: projecting one onto the other loses nothing.
        torch.testing.assert_close(null @ (null.T @ directions), directions)
        for basis in (null, directions):
            torch.testing.assert_close(basis.T @ basis, torch.eye(lost, dtype=F64))
    # An example gives each unit one direction.
    few = random_glm("gaussian", "none", units=2, features=5, examples=3)
    assert null_space_basis(exact_fisher(few)).shape == (12, 6)


@pytest.mark.parametrize("norm", NORMALIZED)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_along_invariant_directions_change_nothing(family: str, norm: str) -> None:
    model = small(family, norm)
    theta, s = model.parameters(), model.natural_parameters()
    for direction in invariant_directions(model).T:
        assert float(squared_distance(model, direction)) < 1e-24
    rows = torch.zeros(3, model.features + 2, dtype=F64)
    rows[:, W] = model.weight if norm == "ln" else torch.tensor([[0.5], [2], [3]]) * model.weight
    if norm == "ln":
        rows[:, W] += torch.tensor([2.0, -3.0], dtype=F64)
    moved = model.with_parameters(theta + rows.flatten())
    torch.testing.assert_close(moved.natural_parameters(), s, rtol=1e-10, atol=1e-10)
    inside = invariant_directions(model)
    torch.testing.assert_close(inside @ (inside.T @ rows.flatten()), rows.flatten())


@pytest.mark.parametrize("family", FAMILIES)
def test_kl_is_that_of_the_outcomes(family: str) -> None:
    model = small(family, "ln")
    step = torch.linspace(-0.5, 0.7, 12, dtype=F64)
    before = natural_by_hand(model, model.parameters())
    after = natural_by_hand(model, model.parameters() + step)
    total = torch.zeros((), dtype=F64)
    for s, moved in zip(before, after, strict=True):
        for probability, y in outcomes(model, s):
            here, there = (log_likelihood_by_hand(model, each, y) for each in (s, moved))
            total += probability * (here - there) / len(before)
    torch.testing.assert_close(kl_divergence(model, step), total, rtol=EXACT, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_error_falls_as_the_root_of_the_draws(family: str) -> None:
    model = random_glm(family, "bn", examples=50)
    exact = exact_fisher(model)

    def error(draws: int) -> float:
        found = (monte_carlo_fisher(model, draws, seed) for seed in range(8))
        return statistics.mean(relative(each, exact) for each in found)

    errors = [error(draws) for draws in (10, 100, 1000)]
    # 1.5 is six standard deviations of the ratio; 1 / M would give 10, no convergence 1.
    assert errors[0] / errors[1] == pytest.approx(10**0.5, abs=1.5)
    assert errors[1] / errors[2] == pytest.approx(10**0.5, abs=1.5)
    assert errors[2] < 0.03


def test_sampling_is_by_its_seed_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_glm("bernoulli", "wn", examples=20)
    state = torch.get_rng_state()
    first = monte_carlo_fisher(model, 5, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(monte_carlo_fisher(model, 5, seed=1), first)
    assert not torch.equal(monte_carlo_fisher(model, 5, seed=2), first)
    # Samples do not repeat the numbers of data of the same seed.
    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    model = GLM(x, torch.eye(4, dtype=F64), torch.zeros(4, dtype=F64))
    assert abs(float(((model.sample(seed=0)[0] - x) * x).mean())) < 0.1
    model = random_glm("gaussian", "ln", examples=50, dispersion=2.0)
    monkeypatch.setattr(fisher, "_CHUNK", 50 * 4 * 300)  # 300, 300, 300 and 100 draws
    found = monte_carlo_fisher(model, 1000)
    assert relative(found, exact_fisher(model)) < 0.05


def test_samples_have_mean_and_covariance_of_the_model() -> None:
    for family in FAMILIES:
        model = small(family, "ln")
        y = model.sample(20_000, seed=4)
        assert y.shape == (20_000, 5, 3)
        mean = y.mean(0)
        s = model.natural_parameters()
        wanted = {"gaussian": s, "bernoulli": s.sigmoid(), "categorical": s.softmax(1)}
        torch.testing.assert_close(mean, wanted[family], rtol=0, atol=0.06)
        centred = y - mean
        covariance = torch.einsum("mni,mnj->nij", centred, centred) / len(y)
        torch.testing.assert_close(covariance, model.covariance(), rtol=0, atol=0.1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_empirical_fisher_takes_the_labels_of_the_data(family: str, norm: str) -> None:
    model = small(family, norm)
    classes = torch.tensor([2, 0, 1, 1, 2])
    y = functional.one_hot(classes, 3).double()
    assert relative(empirical_fisher(model, y), fisher_by_hand(model, y)) <= EXACT
    if family == "categorical":
        for integers in (classes, classes.to(torch.uint8)):
            assert torch.equal(empirical_fisher(model, integers), empirical_fisher(model, y))


GOOD = random_glm("bernoulli", "ln", units=3, features=2, examples=5)
ONE_UNIT = {"weight": GOOD.weight[:1], "bias": GOOD.bias[:1], "gain": GOOD.gain[:1]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "poisson"}, "family.*'poisson'"),
        ({"norm": "LayerNorm"}, "norm.*'LayerNorm'"),
        ({"gain": None}, "norm='ln'.*gain"),
        ({"norm": "none"}, "norm='none'"),
        ({"dispersion": 2.0}, "dispersion.*2.0"),
        ({"family": "gaussian", "dispersion": 0.0}, "dispersion.*0.0"),
        ({"family": "gaussian", "dispersion": math.nan}, "dispersion.*nan"),
        ({"family": "gaussian", "dispersion": math.inf}, "dispersion.*inf"),
        ({"eps": -1.0}, "eps.*-1.0"),
        ({"eps": math.nan}, "eps.*nan"),
        ({"norm": "wn", "eps": 0.1}, "eps.*norm='wn'.*0.1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_models_that_do_not_fit(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GOOD, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": GOOD.inputs[:, :1]},
        {"bias": GOOD.bias[:2]},
        {"gain": GOOD.gain[:, None]},
        {"inputs": GOOD.inputs.float()},
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_torch(changes: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match=r"match|multiplied|dtype"):
        dataclasses.replace(GOOD, **changes)


def test_a_sigma_of_0_is_refused() -> None:
    """F would be NaN, in which nothing is a null direction."""
    weight, inputs = GOOD.weight.clone(), GOOD.inputs.clone()
    weight[1] = 0
    inputs[2] = 0
    inputs[:, 1] = 0.1  # a constant column alone is allowed
    dataclasses.replace(GOOD, norm="bn", inputs=torch.cat([GOOD.inputs[:, :1], inputs[:, 1:]], 1))
    column = torch.tensor([[0.0, 1.0], [1.0, 0.3], [1.0, 1.0]], dtype=F64)
    constant = dataclasses.replace(GOOD, norm="wn", weight=column, inputs=inputs)
    for model, changes, words in (
        (GOOD, {"norm": "wn", "weight": weight}, r"'wn'.*unit\(s\) 1:"),
        (GOOD, {"norm": "bn", "weight": weight}, r"'bn'.*unit\(s\) 1:.*eps"),
        (constant, {"norm": "bn"}, r"'bn'.*unit\(s\) 0:"),
        (GOOD, ONE_UNIT, r"'ln'.*example\(s\) 0, 1, 2, 3, 4:"),
        (GOOD, {"norm": "bn", "inputs": inputs[:1]}, r"'bn'.*unit\(s\) 0, 1, 2:"),
        (GOOD, {"inputs": 0 * inputs}, r"'ln'.*example\(s\) 0, 1, 2, 3, 4:.*eps"),
        (GOOD, {"weight": GOOD.weight[:1].expand(3, 2)}, r"'ln'.*example\(s\) 0, 1, 2, 3, 4:"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(model, **changes)
    model = dataclasses.replace(constant, norm="bn", eps=1e-5)
    assert bool(exact_fisher(model).isfinite().all())


def test_distances_of_many_steps_at_once() -> None:
    model = random_glm("gaussian", "ln", units=3, features=2, examples=5)
    steps = 0.1 * torch.eye(12, dtype=F64)
    for distance in (kl_divergence, squared_distance):
        found = torch.vmap(lambda step, of=distance: of(model, step))(steps)
        torch.testing.assert_close(found, torch.stack([distance(model, step) for step in steps]))
        for shape in ((11,), (), (1,), (2, 12)):
            with pytest.raises(ValueError, match=rf"\(12,\).*{re.escape(str(tuple(shape)))}"):
                distance(model, torch.zeros(shape))
        with pytest.raises(TypeError, match=r"torch.float64.*torch.float32"):
            distance(model, torch.zeros(12))


SOFTMAX, BERNOULLI, GAUSSIAN = (
    dataclasses.replace(GOOD, family=family) for family in ("categorical", "bernoulli", "gaussian")
)
CLASSES = torch.tensor([0, 1, 2, 3, 0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SOFTMAX.with_parameters(torch.zeros(11)), r"\(12,\).*\(11,\)"),
        (lambda: SOFTMAX.with_parameters(torch.zeros(12)), "torch.float64.*torch.float32"),
        (lambda: gain_step(SOFTMAX, torch.zeros(12)), r"gains.*\(3,\).*\(12,\)"),
        (lambda: gain_step(SOFTMAX, torch.zeros(3)), "gains.*torch.float64.*torch.float32"),
        (lambda: monte_carlo_fisher(SOFTMAX, 0), "draws.*1.*0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError if "torch." in words else ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: empirical_fisher(SOFTMAX, CLASSES), "smaller than num_classes"),
        (lambda: empirical_fisher(SOFTMAX, CLASSES.double()), "LongTensor"),
        (lambda: empirical_fisher(SOFTMAX, torch.ones(5, 3)), "support.*OneHot"),
        (lambda: empirical_fisher(BERNOULLI, torch.full((5, 3), 0.5)), "support.*Boolean"),
        (lambda: empirical_fisher(GAUSSIAN, torch.full((5, 3), math.nan)), "support.*Real"),
        (lambda: null_space_basis(torch.ones(3, 2)), "square"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_do_not_fit_are_refused_by_torch(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        call()
