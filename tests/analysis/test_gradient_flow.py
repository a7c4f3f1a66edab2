"""Gradients through time against loops written from the equations, and what they show."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import rows_of
from reference import read
from torch import Tensor
from torch.nn import functional as F
from unchanged import unchanged

from ln_zoo.analysis import (
    GradientFlow,
    expected_tanh_derivative,
    gradient_flow,
    gradient_flow_table,
    gradient_norms,
    initial_dynamics,
    random_sequences,
    write_gradient_flow,
)
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm
from ln_zoo.plots import plot_gradient_flow

F64 = torch.float64
T, N, I, H = 6, 5, 3, 4  # noqa: E741
EPS = 1e-5


@pytest.mark.parametrize(("gain", "tolerance"), [(0.1, 1e-10), (1, 1e-10), (2, 1e-8), (5, 5e-4)])
def test_expected_derivative_against_a_sum_over_a_fine_grid(gain: float, tolerance: float) -> None:
    z = np.linspace(-12, 12, 200_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    value = (density / np.cosh(gain * z) ** 2).sum() * (z[1] - z[0])
    assert expected_tanh_derivative(gain) == pytest.approx(value, abs=tolerance)


def by_hand(
    layer: LSTM | GRU | RNN, x: Tensor, h: Tensor, c: Tensor, loss: Callable[[Tensor], Tensor]
) -> Tensor:
    """Norms of the total gradients by h_1, ..., h_T, through a disturbance of each state."""
    cell = {LSTM: "LSTM", GRU: "GRU", RNN: "RNN_TANH"}[type(layer)]
    d = read(cell, copy.deepcopy(layer).train(), "l0")
    disturbances = torch.zeros(x.shape[0], *h.shape, dtype=F64, requires_grad=True)
    state: Tensor | None = c
    outputs = []
    for t, disturbance in enumerate(disturbances.unbind()):
        h, state = d.step(x[t], h, state, t)
        h = h + disturbance
        outputs.append(h)
    (gradients,) = torch.autograd.grad(loss(torch.stack(outputs)), disturbances)
    return gradients.square().sum((1, 2)).sqrt()


def squares(outputs: Tensor) -> Tensor:
    weights = torch.arange(1, outputs.numel() + 1, dtype=F64).view_as(outputs).cos()
    return (weights * outputs.square()).sum()


def made(cls: type, norm: Norm, **options) -> LSTM | GRU | RNN:
    torch.manual_seed(0)
    layer = cls(I, H, norm=norm, dtype=F64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-1, 1)
    return layer


NORMS = [LayerNorm(eps=EPS), BatchNorm(eps=EPS), WeightNorm(), Identity()]


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_norms_are_those_of_a_loop_by_hand(cls: type, norm: Norm) -> None:
    """Time comes first for any layout of the layer."""
    layer = made(cls, norm, batch_first=norm == WeightNorm())
    x, h, c = (torch.randn(*size, dtype=F64) for size in ((T, N, I), (N, H), (N, H)))
    states = (h[None], c[None]) if cls is LSTM else h[None]
    expected = by_hand(layer, x, h, c, squares)
    found = gradient_norms(layer, x, states, squares)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_defaults_are_zero_states_and_a_softmax_on_the_last_one() -> None:
    layer, x, zeros = made(RNN, LayerNorm()), torch.randn(T, N, I, dtype=F64), torch.zeros(N, H)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(10, H, generator=generator, dtype=F64) / 2
    labels = torch.randint(10, (N,), generator=generator)

    def loss(outputs: Tensor) -> Tensor:
        return F.cross_entropy(outputs[-1] @ weights.T, labels)

    expected = by_hand(layer, x, zeros.double(), zeros, loss)
    torch.testing.assert_close(gradient_norms(layer, x), expected, rtol=1e-10, atol=0)


def test_nothing_of_the_layer_is_changed() -> None:
    layer = made(LSTM, BatchNorm(max_steps=3)).eval().requires_grad_(False)
    x = torch.randn(T, N, I, dtype=F64)
    with unchanged(layer), torch.no_grad():
        found = gradient_norms(layer, x)
    # Batch statistics even in evaluation mode, and at steps beyond the last that is kept.
    expected = by_hand(layer, x, *torch.zeros(2, N, H, dtype=F64), lambda h: h[-1].sum())
    torch.testing.assert_close(
        gradient_norms(layer, x, loss=lambda h: h[-1].sum()), expected, rtol=1e-10, atol=1e-18
    )
    assert (found > 0).all()


def test_tiny_gradients_count_and_unseen_states_have_none() -> None:
    layer, x = made(RNN, Identity()), torch.randn(T, N, I, dtype=F64)
    plain = gradient_norms(layer, x, loss=lambda h: h[-1].sum())
    tiny = gradient_norms(layer, x, loss=lambda h: 1e-200 * h[-1].sum())
    torch.testing.assert_close(1e200 * tiny, plain, rtol=1e-12, atol=0)
    layer, x = made(GRU, LayerNorm()), torch.randn(T, N, I, dtype=F64)
    found = gradient_norms(layer, x, loss=lambda h: h[2].sum())
    assert (found > 0).tolist() == [True] * 3 + [False] * 3


# What they show: 300 steps, most of them blank, as in images of digits


def orders(**options) -> dict[float | None, float]:
    """By gain: by how many orders of magnitude the gradient grows on its way back to h_1."""
    values, kept = (random_sequences(300, 20, seed=seed) for seed in (0, 1))
    flows = gradient_flow(values * (kept < 0.2), hidden_size=50, norms=[BatchNorm], **options)
    return {flow.gain: float((flow.norms[0] / flow.norms[-1]).log10()) for flow in flows}


def test_gain_1_loses_the_gradient_that_gain_01_keeps() -> None:
    batch_norm = orders(gains=(0.1, 0.3, 0.7, 1.0))
    assert abs(batch_norm[0.1]) < 3
    assert abs(batch_norm[0.3]) < 3
    assert batch_norm[0.7] < -8
    assert batch_norm[1.0] < -30
    # From a random orthogonal start gradients grow instead.
    found = orders(gains=(0.1, 0.7, 1.0), candidate="orthogonal")
    assert abs(found[0.1]) < 2
    assert 5 < found[0.7] < found[1.0]


def test_steps_without_variance_blow_gradients_up() -> None:
    """Equal inputs and equal states: each such step multiplies gradients by gain / sqrt(eps)."""
    inputs = random_sequences(12, 8)
    inputs[:6] = 0.0
    flows = gradient_flow(inputs, hidden_size=5, norms=[BatchNorm], gains=(0.1, 1.0), noise=0.0)
    for flow, gain in zip(flows, (0.1, 1.0), strict=True):
        factors = flow.norms[:4] / flow.norms[1:5]
        expected = torch.full((4,), gain / 1e-5**0.5, dtype=F64)
        torch.testing.assert_close(factors, expected, rtol=1e-9, atol=0)
    noisy = gradient_flow(inputs, hidden_size=5, norms=[BatchNorm], gains=(0.1, 1.0))
    assert all(float(flow.norms[0] / flow.norms[4]) < 10 for flow in noisy)


def test_a_gain_belongs_to_the_norms_that_have_one() -> None:
    inputs = random_sequences(5, 4)
    norms = [LayerNorm, WeightNorm, BatchNorm, Identity]
    flows = gradient_flow(inputs, "LSTM", 3, norms, gains=(0.5, 1.0))
    labels = ["LayerNorm 0.5", "LayerNorm 1", "WeightNorm", "BatchNorm 0.5", "BatchNorm 1"]
    assert [flow.label for flow in flows] == [*labels, "Identity"]
    # Weight norm starts as the plain layer.
    torch.testing.assert_close(flows[2].norms, flows[5].norms, rtol=1e-12, atol=0)
    again = gradient_flow(inputs, "LSTM", 3, norms, gains=(0.5, 1.0))
    assert all(torch.equal(a.norms, b.norms) for a, b in zip(flows, again, strict=True))
    other = gradient_flow(inputs, "LSTM", 3, norms, gains=(0.5, 1.0), seed=1)
    assert not any(torch.equal(a.norms, b.norms) for a, b in zip(flows, other, strict=True))
    # Norms that are no dataclasses have no fields, so no gain.
    x = random_sequences(9, 3)
    plain, halving, none = gradient_flow(x, "GRU", 4, [Norm, Halving, Identity])
    assert [flow.label for flow in (plain, halving, none)] == ["Norm", "Halving", "Identity"]
    assert plain.norms.equal(none.norms)
    assert not halving.norms.allclose(none.norms)


class Halving(Norm):
    def normalize(self, site, a: Tensor, step: int | None = None) -> Tensor:
        return a / 2


@pytest.mark.parametrize("wrong", [LayerNorm(), "LayerNorm", GRU, Tensor], ids=repr)
def test_norms_are_classes(wrong: object) -> None:
    x = random_sequences(9, 3)
    for call in (gradient_flow, lambda x, norms: next(initial_dynamics(x, norms=norms))):
        with pytest.raises(TypeError, match=re.escape(repr(wrong))):
            call(x, norms=[wrong])


X = torch.ones(T, N, I)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gradient_norms(GRU(I, H, num_layers=2), X), "gradient_norms.*num_layers=2"),
        (lambda: gradient_norms(GRU(I, H, bidirectional=True), X), "gradient_norms.*2 direction"),
        (lambda: gradient_norms(GRU(I + 1, H), X), "input_size"),
        (lambda: gradient_norms(GRU(I, H), X, torch.ones(1, N + 1, H)), "hidden size"),
        (lambda: gradient_flow(torch.zeros(5, 3)), r"gradient_flow.*\(5, 3\)"),
        (lambda: gradient_flow(torch.zeros(0, 2, 3)), r"gradient_flow.*\(0, 2, 3\)"),
        (lambda: gradient_flow(random_sequences(5, 4), cell="tanh"), "cell.*'tanh'"),
        (lambda: gradient_flow(random_sequences(5, 4), candidate="eye"), "candidate.*'eye'"),
        (lambda: gradient_flow_table([]), "gradient_flow_table"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit(call: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        call()


SHOWN = [
    GradientFlow(norm, gain, torch.tensor(norms, dtype=F64))
    for norm, gain, norms in (
        ("BatchNorm", 0.1, [1.0, 0.1, 0.1, 0.01]),
        ("BatchNorm", 1.0, [0.0, 1e-40, 1e-20, 0.01]),
        ("Identity", None, [float("inf"), 100.0, 1.0, 0.01]),
    )
]


def test_table_and_csv(tmp_path: Path) -> None:
    lines = gradient_flow_table(SHOWN).splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")][1:-1] for line in lines)
    assert head[3:] == [f"log10 at t = {t}" for t in (4, 3, 2, 1)]
    assert rows == [
        ["BatchNorm", "0.1", "0.990", "-2.0", "-1.0", "-1.0", "0.0"],
        ["BatchNorm", "1", "0.606", "-2.0", "-20.0", "-40.0", "-inf"],
        ["Identity", "", "", "-2.0", "0.0", "2.0", "inf"],
    ]
    path = tmp_path / "new" / "flow.csv"
    write_gradient_flow(SHOWN, path, "pixels, in order")
    rows = rows_of(path)
    assert list(rows[0]) == ["inputs", "t", "BatchNorm 0.1", "BatchNorm 1", "Identity"]
    assert [row["t"] for row in rows] == ["1", "2", "3", "4"]
    assert {row["inputs"] for row in rows} == {"pixels, in order"}
    assert [float(row["BatchNorm 1"]) for row in rows] == [0.0, 1e-40, 1e-20, 0.01]


@pytest.mark.parametrize("flows", [SHOWN, SHOWN[2:]], ids=["both", "none"])
def test_picture(tmp_path: Path, flows: list[GradientFlow]) -> None:
    path = tmp_path / "new" / "flow.svg"
    plot_gradient_flow(flows, path, "a title")
    drawn = path.read_text()
    for flow in flows:
        label = flow.label if flow.gain is None else f"gain {flow.gain:g}"
        assert f"<!-- {label} -->" in drawn
    assert "<!-- a title -->" in drawn
