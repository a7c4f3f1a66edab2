"""Initial values against their formulas, and what they must leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor, nn
from unchanged import unchanged

from ln_zoo.layers import (
    GRU,
    LSTM,
    RNN,
    Conv2d,
    Linear,
    data_dependent_init,
    orthogonal_,
    orthogonal_init,
)
from ln_zoo.layers.initialization import has_fresh_scale, scaled_layers
from ln_zoo.norms import BatchNorm, LayerNorm, WeightNorm

F64 = torch.float64
WN = WeightNorm()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Linear(6, 8, norm=WN, dtype=F64), nn.ReLU(),
        Linear(8, 7, norm=WN, dtype=F64), nn.ReLU(),
        Linear(7, 3, dtype=F64),
    )  # fmt: skip


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Conv2d(2, 4, 3, padding=1, norm=WN, dtype=F64), nn.ReLU(), nn.MaxPool2d(2),
        Conv2d(4, 6, 3, stride=2, groups=2, norm=WN, dtype=F64), nn.ReLU(), nn.Flatten(),
        Linear(24, 5, norm=WN, dtype=F64),
    )  # fmt: skip


def inputs(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(shape[1:], generator=generator, dtype=F64) * 3
    return 2 + spread * torch.randn(shape, generator=generator, dtype=F64)


def outputs_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What each layer with weight norm gives, features last."""
    found: dict[str, Tensor] = {}
    for name, layer in scaled_layers(model).items():

        def keep(layer: Any, _: Any, output: Tensor, name: str = name) -> None:
            found[name] = output.detach().movedim(layer.site.axis, -1).flatten(0, -2)

        layer.register_forward_hook(keep)
    model(x)
    return found


def assert_standard(rows: Tensor) -> None:
    """Each column has mean 0 and variance 1."""
    assert rows.mean(0).abs().max() < 1e-10
    assert (rows.square().mean(0) - 1).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("make", "x", "names"),
    [(mlp, inputs(50, 6), ["0", "2"]), (convnet, inputs(20, 2, 10, 11), ["0", "3", "6"])],
    ids=["mlp", "convnet"],
)
def test_every_feature_has_mean_0_and_variance_1(make, x: Tensor, names: list[str]) -> None:
    model = make()
    assert data_dependent_init(model, x) == names
    found = outputs_of(model, x)
    assert list(found) == names
    for rows in found.values():
        assert_standard(rows)


def test_scale_and_bias_are_those_of_the_formula() -> None:
    """Two layers by hand, one feature and one example after the other."""
    model, x = mlp(), inputs(9, 6)
    weights = [model[i].weight.detach().clone() for i in (0, 2)]
    data_dependent_init(model, x)
    rows = x.tolist()
    for layer, weight in zip((model[0], model[2]), weights, strict=True):
        assert torch.equal(layer.weight, weight)
        columns = []
        for f, w in enumerate(weight.tolist()):
            length = sum(v * v for v in w) ** 0.5
            t = [sum(v * u for v, u in zip(w, row, strict=True)) / length for row in rows]
            mu = sum(t) / len(t)
            sigma = (sum((u - mu) ** 2 for u in t) / len(t)) ** 0.5
            assert layer.site.scale[f].item() == pytest.approx(1 / sigma, rel=1e-12)
            assert layer.bias[f].item() == pytest.approx(-mu / sigma, rel=1e-12)
            columns.append([max(0.0, (u - mu) / sigma) for u in t])
        rows = [list(row) for row in zip(*columns, strict=True)]


def test_a_feature_that_does_not_vary_keeps_its_scale() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[2] = 0.0
        model[0].weight[2, 1] = 0.7  # reads the constant column alone
        model[0].weight[5] = 0.0  # reads nothing
    model[0].reset_norm()
    x = inputs(50, 6)
    x[:, 1] = 0.1
    data_dependent_init(model, x)
    layer = model[0]
    assert layer.site.scale[2].item() == 0.7
    assert layer.bias[2].item() == pytest.approx(-0.07, rel=1e-12)
    assert [layer.site.scale[5].item(), layer.bias[5].item()] == [0, 0]
    rows = outputs_of(model, x)["0"]
    assert rows.mean(0).abs().max() < 1e-10
    others = [f for f in range(8) if f not in (2, 5)]
    assert (rows[:, others].square().mean(0) - 1).abs().max() < 1e-10
    assert rows[:, [2, 5]].abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_rounding_is_no_variation(dtype: torch.dtype) -> None:
    """Equal rows are summed up in blocks, which may differ in the last digits."""
    torch.manual_seed(0)
    layer = Linear(784, 300, norm=WN, dtype=dtype)
    scale = layer.site.scale.detach().clone()
    x = torch.rand(784).to(dtype).expand(501, 784)
    assert data_dependent_init(layer, x) == [""]
    assert torch.equal(layer.site.scale, scale)
    assert layer(x).abs().max() < (0.02 if dtype == torch.bfloat16 else 1e-5)


def test_a_layer_without_bias_gets_a_scale_alone() -> None:
    torch.manual_seed(0)
    layer = Linear(6, 4, bias=False, norm=WN, dtype=F64)
    x = inputs(50, 6)
    data_dependent_init(layer, x)
    rows = layer(x)
    assert (rows.var(0, correction=0) - 1).abs().max() < 1e-10
    assert rows.mean(0).abs().max() > 1


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = Linear(6, 6, norm=WN, dtype=F64)
        self.late = Linear(6, 6, norm=WN, dtype=F64)
        self.early = Linear(6, 6, norm=WN, dtype=F64)

    def forward(self, x: Tensor, times: Tensor, *, shift: float = 0.0) -> Tensor:
        return self.late(self.early(self.early(x * times + shift)))


def test_order_is_that_of_the_pass_and_the_first_use_counts() -> None:
    torch.manual_seed(0)
    model, x, times = Twice(), inputs(50, 6), torch.full((6,), 2.0, dtype=F64)
    assert data_dependent_init(model, [x, times]) == ["early", "late"]
    assert has_fresh_scale(model.unused)
    first = model.early(x * times)
    assert_standard(first)
    late = model(x, times)
    assert (late.square().mean(0) - 1).abs().max() < 1e-10
    assert not model.early._forward_pre_hooks
    assert not model.unused._forward_pre_hooks


class Mixed(nn.Module):
    """Dropout, batch norm, a recurrent layer, and noise of its own beside weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = Linear(6, 5, norm=BatchNorm(), dtype=F64)
        self.frozen = Linear(5, 5, norm=WN, dtype=F64).requires_grad_(False)
        self.drop = nn.Dropout(0.5)
        self.recurrent = LSTM(5, 4, norm=WN, dtype=F64)
        self.last = Linear(4, 3, norm=WN, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.frozen(self.batch(x)))
        output, _ = self.recurrent(x + 0.1 * torch.randn_like(x))
        return self.last(output)


def test_nothing_else_is_touched() -> None:
    torch.manual_seed(0)
    model, x = Mixed(), inputs(3, 20, 6)
    model(x).sum().backward()
    model.drop.eval()
    model.batch.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    kept = {name: g.clone() for name, g in gradients.items() if g is not None}
    needs = [p.requires_grad for p in model.parameters()]
    random = torch.get_rng_state()

    assert data_dependent_init(model, x) == ["frozen", "last"]
    set_now = {"frozen.site.scale", "frozen.bias", "last.site.scale", "last.bias"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in set_now), name
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == needs
    assert all(p.grad_fn is None for p in model.parameters())
    for name, p in model.named_parameters():
        assert p.grad is gradients[name]
        assert p.grad is None or torch.equal(p.grad, kept[name])
    assert torch.equal(torch.get_rng_state(), random)

    # Batch norm before it used the batch, as in training; dropout was off.
    model.batch.train()
    sums = model.frozen(model.batch(x)).flatten(0, 1)
    assert_standard(sums)


def test_a_pass_that_fails_leaves_all_as_it_was() -> None:
    model, x = mlp(), inputs(50, 6)
    model[4] = Linear(9, 3, dtype=F64)
    with unchanged(model):
        refuses("mat1 and mat2 shapes", data_dependent_init, model, x, error=RuntimeError)


def test_sums_that_are_not_finite_are_refused() -> None:
    model, x = mlp(), inputs(50, 6)
    x[3, 2] = float("nan")
    with unchanged(model):
        refuses("of 0 are not finite", data_dependent_init, model, x)


@pytest.mark.parametrize(
    "model", [Linear(3, 4, norm=LayerNorm()), nn.Linear(3, 4), LSTM(3, 4, norm=WN)]
)
def test_a_model_without_such_layers_is_refused(model: nn.Module) -> None:
    refuses(rf"WeightNorm.*{type(model).__name__}", data_dependent_init, model, torch.randn(5, 3))


def test_a_fresh_scale_is_told_from_others() -> None:
    layer = Linear(6, 4, norm=WN)
    assert has_fresh_scale(layer)
    assert has_fresh_scale(layer.double())
    assert has_fresh_scale(layer.bfloat16())
    layer = layer.float()
    layer.reset_parameters()
    with torch.no_grad():
        layer.site.scale[1] *= 1.001
    assert not has_fresh_scale(layer)
    layer.reset_norm()
    assert has_fresh_scale(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not has_fresh_scale(layer)


@pytest.mark.parametrize("candidate", ["identity", "orthogonal"])
@pytest.mark.parametrize(("cls", "block"), [(LSTM, 2), (GRU, 2), (RNN, 0)])
def test_orthogonal_recurrent_weights(cls: type, block: int, candidate: str) -> None:
    layer = cls(3, 6, num_layers=2, bidirectional=True, norm=WN, dtype=F64)
    orthogonal_init(layer, candidate, forget_bias=0.5)
    eye = torch.eye(6, dtype=F64)
    for suffix, inputs in (("l0", 3), ("l0_reverse", 3), ("l1", 12), ("l1_reverse", 12)):
        w_ih = getattr(layer, f"weight_ih_{suffix}")
        product = w_ih @ w_ih.T if inputs > len(w_ih) else w_ih.T @ w_ih
        assert torch.allclose(product, torch.eye(len(product), dtype=F64))
        blocks = list(getattr(layer, f"weight_hh_{suffix}").split(6))
        chosen = blocks.pop(block)
        assert chosen.equal(eye) == (candidate == "identity")
        assert torch.allclose(chosen @ chosen.T, eye)
        if blocks:
            gates = torch.cat([each.T for each in blocks], dim=1)
            assert torch.allclose(gates @ gates.T, eye)
        for number, bias in enumerate(getattr(layer, f"bias_ih_{suffix}").split(6)):
            assert (bias == (0.5 if cls is LSTM and number == 1 else 0.0)).all()
        assert (getattr(layer, f"bias_hh_{suffix}") == 0).all()
        scale = layer.sites[suffix]["recurrent"].scale
        assert torch.allclose(scale, getattr(layer, f"weight_hh_{suffix}").norm(dim=1))


def test_orthogonal_with_a_projection() -> None:
    layer = LSTM(3, 6, proj_size=4, dtype=F64)
    before = layer.weight_hr_l0.clone()
    orthogonal_init(layer)
    assert layer.weight_hh_l0[12:18].equal(torch.eye(6, 4, dtype=F64))
    assert layer.weight_hr_l0.equal(before)


@pytest.mark.parametrize("candidate", ["identity", "orthogonal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_orthogonal_in_half_precision(dtype: torch.dtype, candidate: str) -> None:
    """The matrices of float32, rounded."""
    whole, half = (LSTM(3, 6, norm=WN, dtype=kind) for kind in (torch.float32, dtype))
    for layer in (whole, half):
        orthogonal_init(layer, candidate, generator=torch.Generator().manual_seed(5))
    for name, value in whole.named_parameters():
        rounded = half.get_parameter(name)
        assert rounded.dtype == dtype
        if "scale" not in name:  # norms of rows, of those that were rounded
            assert rounded.equal(value.to(dtype)), name


def test_orthogonal_draws_what_torch_draws() -> None:
    for shape in ((5, 3), (3, 5), (4, 2, 3)):
        for dtype in (torch.float32, F64):
            ours, theirs = torch.empty(2, *shape, dtype=dtype)
            torch.manual_seed(3)
            assert orthogonal_(ours) is ours
            torch.manual_seed(3)
            assert ours.equal(nn.init.orthogonal_(theirs))


def test_orthogonal_draws_from_the_generator_it_is_given() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    layers = [LSTM(3, 6, dtype=F64) for _ in range(2)]
    torch.set_rng_state(state)
    for layer in layers:
        orthogonal_init(layer, generator=torch.Generator().manual_seed(5))
    assert layers[0].weight_hh_l0.equal(layers[1].weight_hh_l0)
    assert torch.get_rng_state().equal(state)


def test_orthogonal_bad_argument() -> None:
    with pytest.raises(ValueError, match="candidate must be 'identity' or 'orthogonal', got 'eye'"):
        orthogonal_init(RNN(3, 5), "eye")
