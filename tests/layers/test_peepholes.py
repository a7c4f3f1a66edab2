"""Peepholes (Graves 2013, eq. 7-11) and clipped derivatives (there, 2.1), with any norm."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from engines import names_of, note_kernels
from layer_results import assert_close, gradients, randomised
from torch import Tensor

from ln_zoo.kernels.native.build import compiler_missing
from ln_zoo.layers import LSTM, LSTMCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm
from ln_zoo.ops import clip_derivative, lstm_cell

F64 = torch.float64
OPTIONS = [
    {"peephole": True},
    {"derivative_bound": 0.1},
    {"peephole": True, "derivative_bound": 0.1},
]
BOTH: dict[str, Any] = OPTIONS[-1]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def randomise(module: Any) -> Any:
    torch.manual_seed(6)
    return randomised(module)


@every_option
def test_a_step_without_gradients_is_the_same(options: dict[str, Any]) -> None:
    """Cells skip checks when they need no gradients."""
    cell = randomise(LSTMCell(3, 5, norm=LayerNorm(), **options))
    x, state = torch.randn(2, 3), (torch.randn(2, 5), torch.randn(2, 5))
    expected = cell(x, state)
    with torch.no_grad():
        first, second = cell(x, state), cell(x, state)
    assert_close(first, expected, 1e-6)
    assert_close(second, first, 0)


def test_parameters_by_name_and_number() -> None:
    layer = LSTM(3, 400, 2, norm=LayerNorm(), bidirectional=True, peephole=True)
    names = {name for name, _ in layer.named_parameters() if "peephole" in name}
    assert names == {f"weight_peephole_l{n}{side}" for n in (0, 1) for side in ("", "_reverse")}
    assert all(layer.get_parameter(name).shape == (3, 400) for name in names)
    plain = LSTM(3, 400, 2, norm=LayerNorm(), bidirectional=True)
    numbers = [sum(a.numel() for a in of.parameters()) for of in (layer, plain)]
    assert numbers[0] - numbers[1] == 4 * 3 * 400
    assert not hasattr(LSTMCell(3, 4), "weight_peephole")
    assert LSTMCell(3, 4, peephole=True).weight_peephole.shape == (3, 4)
    assert LSTM(3, 4, peephole=True, proj_size=2).weight_peephole_l0.shape == (3, 4)


@pytest.mark.parametrize("cls", [LSTM, LSTMCell])
def test_they_are_drawn_as_other_weights_are(cls: type) -> None:
    torch.manual_seed(0)
    module = cls(3, 100, peephole=True)
    (weight,) = (a for name, a in module.named_parameters() if "peephole" in name)
    assert weight.abs().max() <= 0.1
    assert weight.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.1)
    with torch.no_grad():
        weight.fill_(7)
    module.reset_parameters()
    assert weight.abs().max() <= 0.1
    assert weight.std() > 0.05


def test_copies_behave_the_same() -> None:
    x = torch.randn(4, 2, 3)
    for cls in (LSTM, LSTMCell):
        module = randomise(cls(3, 5, norm=LayerNorm(), **BOTH))
        given = x if cls is LSTM else x[0]
        expected = gradients([module(given)[0] * 9], module.parameters())
        with torch.no_grad():
            module(given)  # what a cell remembers of it must not be in the way
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            found = gradients([twin(given)[0] * 9], twin.parameters())
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bound", [0.5, 10.0])
def test_a_number_passes_and_its_gradient_is_clipped(bound: float) -> None:
    a = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0], dtype=F64, requires_grad=True)
    same = clip_derivative(a, bound)
    assert torch.equal(same, a)
    coming = torch.tensor([0.1, -0.1, 100.0, -100.0, float("nan")], dtype=F64)
    same.backward(coming)
    expected = torch.tensor([0.1, -0.1, bound, -bound, float("nan")], dtype=F64)
    torch.testing.assert_close(a.grad, expected, equal_nan=True)


def clipped_backward(
    w: dict[str, Tensor], x: Tensor, d_out: Tensor, bound: float, peephole: bool
) -> dict[str, Tensor]:
    """The way back by hand, step by step, each gate's derivative clipped where it arises."""
    T, N, _ = x.shape
    H = w["hh"].shape[1]
    p = w["peephole"] if peephole else x.new_zeros(3, H)
    h, c = x.new_zeros(N, H), x.new_zeros(N, H)
    kept = []
    for now in x:
        sums = now @ w["ih"].T + h @ w["hh"].T + w["b_ih"] + w["b_hh"]
        i, f, g, o = sums.chunk(4, 1)
        i, f, g = (i + p[0] * c).sigmoid(), (f + p[1] * c).sigmoid(), g.tanh()
        after = f * c + i * g
        o = (o + p[2] * after).sigmoid()
        kept.append((h, c, i, f, g, o, after))
        h, c = o * after.tanh(), after
    found = {name: torch.zeros_like(a) for name, a in w.items()} | {"x": torch.zeros_like(x)}
    dh, dc = x.new_zeros(N, H), x.new_zeros(N, H)
    for t in reversed(range(T)):
        h, c, i, f, g, o, after = kept[t]
        dh = dh + d_out[t]
        do = (dh * after.tanh() * o * (1 - o)).clamp(-bound, bound)
        dc = dc + dh * o * (1 - after.tanh() ** 2) + do * p[2]
        di = (dc * g * i * (1 - i)).clamp(-bound, bound)
        df = (dc * c * f * (1 - f)).clamp(-bound, bound)
        dg = (dc * i * (1 - g**2)).clamp(-bound, bound)
        d = torch.cat([di, df, dg, do], 1)
        found["x"][t] = d @ w["ih"]
        found["ih"] += d.T @ x[t]
        found["hh"] += d.T @ h
        found["b_ih"] += d.sum(0)
        found["b_hh"] += d.sum(0)
        if peephole:
            found["peephole"] += torch.stack(
                [(a * b).sum(0) for a, b in ((di, c), (df, c), (do, after))]
            )
        dc = dc * f + di * p[0] + df * p[1]
        dh = d @ w["hh"]
    return found


@pytest.mark.parametrize("bound", [0.02, 0.3, 1e6])
@pytest.mark.parametrize("peephole", [True, False])
def test_derivatives_are_clipped_where_they_arise(bound: float, peephole: bool) -> None:
    layer = randomise(LSTM(3, 5, peephole=peephole, derivative_bound=bound, dtype=F64))
    x = torch.randn(6, 4, 3, dtype=F64, requires_grad=True)
    names = {"ih": "weight_ih", "hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}
    if peephole:
        names["peephole"] = "weight_peephole"
    w = {key: getattr(layer, f"{name}_l0") for key, name in names.items()}
    d_out = torch.randn(6, 4, 5, dtype=F64)
    with torch.no_grad():
        expected = clipped_backward(w, x, d_out, bound, peephole)
    output, _ = layer(x)
    found = torch.autograd.grad(output, [*w.values(), x], d_out)
    assert_close(found, list(expected.values()))
    cell, state, outputs = layer.to_cell(), None, []
    for now in x:
        state = cell(now, state)
        outputs.append(state[0])
    sources = [*(getattr(cell, name) for name in names.values()), x]
    found_by_steps = torch.autograd.grad(torch.stack(outputs), sources, d_out)
    assert_close(found_by_steps, list(expected.values()))
    free = LSTM(3, 5, peephole=peephole, dtype=F64)
    free.load_state_dict(layer.state_dict())
    unclipped = torch.autograd.grad(free(x)[0], x, d_out)[0]
    assert_close([output], [free(x)[0]])  # nothing changes on the way there
    assert torch.allclose(unclipped, found[-1]) == (bound == 1e6)


@pytest.mark.parametrize("norm", [LayerNorm(eps=1e-3), BatchNorm()], ids=repr)
def test_the_bound_holds_behind_the_norm(norm: Norm) -> None:
    """Each example and step adds at most the bound to the gradient of a bias."""
    layer = randomise(LSTM(3, 5, norm=norm, derivative_bound=1e-3, dtype=F64))
    layer(torch.randn(6, 4, 3, dtype=F64))[0].sum().mul(1e6).backward()
    assert layer.bias_ih_l0.grad.abs().max() <= 6 * 4 * 1e-3 * (1 + 1e-12)
    assert layer.bias_ih_l0.grad.abs().max() > 1e-3


@pytest.mark.parametrize("cls", [LSTM, LSTMCell])
@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_bounds_that_are_not_positive_are_refused(cls: type, bound: float) -> None:
    with pytest.raises(ValueError, match=f"derivative_bound .*{bound}"):
        cls(3, 4, derivative_bound=bound)


@every_option
@pytest.mark.parametrize("norm", [Identity(), LayerNorm(), BatchNorm()], ids=repr)
def test_only_generated_kernels_take_them(
    norm: Norm, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    picked = note_kernels(monkeypatch)
    LSTM(3, 5, norm=norm, **options)(torch.randn(20, 2, 3))
    generated = not norm.batch_dependent and compiler_missing() is None
    assert names_of(picked) == ["generated" if generated else None]
    assert not lstm_cell(**options).has_kernels


def test_gradients_of_gradients() -> None:
    layer = LSTM(2, 3, norm=LayerNorm(), peephole=True, derivative_bound=100.0, dtype=F64)
    x = torch.randn(3, 2, 2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("mode", ["autocast", "bfloat16"])
def test_half_precision(mode: str) -> None:
    torch.manual_seed(9)
    layer = LSTM(3, 4, norm=LayerNorm(), peephole=True, derivative_bound=10.0)
    x = torch.randn(5, 6, 3)
    expected, (_, c_n) = layer(x)
    if mode == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        output, (_, c) = layer(x)
    assert output.dtype == torch.bfloat16
    assert c.dtype == layer.weight_peephole_l0.dtype
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.05)
    torch.testing.assert_close(c.float(), c_n, rtol=0, atol=0.1)
    output.float().sum().backward()
    assert layer.weight_peephole_l0.grad.isfinite().all()
