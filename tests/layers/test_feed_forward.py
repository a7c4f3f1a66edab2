"""Linear and Conv2d with every norm against loops over examples and features, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import mean_and_variance
from torch import Tensor, nn

from ln_zoo.layers import Conv2d, Linear
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
EPS = 1e-3
NORMS: list[Norm] = [LayerNorm(eps=EPS), RMSNorm(eps=EPS), BatchNorm(eps=EPS), WeightNorm()]
every_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)


def randomize(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-1, 1)
        for name, buffer in layer.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    return layer


def expected(sums: Tensor, norm: Norm, layer: nn.Module) -> Tensor:
    """Normalises sums (N, F, positions), then gain and bias by feature."""
    out = torch.empty_like(sums)
    if isinstance(norm, BatchNorm):
        for f in range(sums.shape[1]):
            if layer.training:
                mean, var = mean_and_variance(sums[:, f].flatten())
            else:
                mean, var = layer.site.running_mean[f], layer.site.running_var[f]
            out[:, f] = (sums[:, f] - mean) / (var + EPS) ** 0.5
    else:
        for n, example in enumerate(sums):
            mean, var = mean_and_variance(example.flatten())
            if isinstance(norm, RMSNorm):
                out[n] = example / (example.square().sum() / example.numel() + EPS) ** 0.5
            elif isinstance(norm, LayerNorm):
                out[n] = (example - mean) / (var + EPS) ** 0.5
            else:
                out[n] = example
    if layer.site.gain is not None:
        out = out * layer.site.gain.view(-1, 1)
    return out if layer.bias is None else out + layer.bias.view(-1, 1)


def weight_of(layer: nn.Module, norm: Norm) -> Tensor:
    if not isinstance(norm, WeightNorm):
        return layer.weight
    rows = zip(layer.site.scale, layer.weight, strict=True)
    return torch.stack([g * w / w.square().sum() ** 0.5 for g, w in rows])


@every_norm
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_linear(norm: Norm, bias: bool, training: bool) -> None:
    layer = randomize(Linear(3, 4, bias, norm=norm, dtype=F64)).train(training)
    x = torch.randn(5, 3, dtype=F64)
    sums = (x @ weight_of(layer, norm).T).unsqueeze(-1)
    wanted = expected(sums, norm, layer).squeeze(-1)
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-9)


@every_norm
def test_linear_on_more_axes(norm: Norm) -> None:
    """All leading axes are examples."""
    layer = randomize(Linear(3, 4, norm=norm, dtype=F64))
    x = torch.randn(2, 5, 3, dtype=F64)
    output = layer(x)
    torch.testing.assert_close(output, layer(x.flatten(0, 1)).view(2, 5, 4), rtol=0, atol=1e-12)


@every_norm
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1, "padding_mode": "circular", "stride": 2}, {"groups": 2, "bias": False}],
    ids=str,
)
def test_conv2d(norm: Norm, training: bool, options: dict[str, Any]) -> None:
    layer = randomize(Conv2d(4, 6, (3, 2), norm=norm, dtype=F64, **options)).train(training)
    plain = nn.Conv2d(4, 6, (3, 2), dtype=F64, **options | {"bias": False})
    x = torch.randn(3, 4, 6, 5, dtype=F64)
    with torch.no_grad():
        plain.weight.copy_(weight_of(layer, norm))
        sums = plain(x)
    wanted = expected(sums.flatten(2), norm, layer).view_as(sums)
    torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-9)


@every_norm
def test_conv2d_on_one_example(norm: Norm) -> None:
    layer = randomize(Conv2d(4, 6, 3, norm=norm, dtype=F64))
    x = torch.randn(4, 6, 5, dtype=F64)
    output = layer(x)
    assert output.shape == (6, 4, 3)
    torch.testing.assert_close(output, layer(x.unsqueeze(0)).squeeze(0), rtol=0, atol=0)


@every_norm
@pytest.mark.parametrize("cls", [Linear, Conv2d])
def test_gradients(cls: type, norm: Norm) -> None:
    arguments = (3, 4) if cls is Linear else (2, 3, 2)
    layer = randomize(cls(*arguments, norm=norm, dtype=F64))
    names, values = zip(*layer.named_parameters(), strict=True)
    shape = (4, 3) if cls is Linear else (2, 2, 3, 3)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(shape, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *values))


def test_conv2d_has_a_gain_for_each_channel() -> None:
    assert Conv2d(2, 6, 3, norm=LayerNorm()).site.gain.shape == (6,)
    assert Conv2d(2, 6, 3, norm=WeightNorm()).site.scale.shape == (6,)
    assert Conv2d(2, 6, 3, norm=BatchNorm()).site.running_mean.shape == (6,)


def test_a_batch_of_one_row_cannot_train() -> None:
    with pytest.raises(ValueError, match="BatchNorm needs at least 2 examples"):
        Linear(3, 4, norm=BatchNorm())(torch.randn(1, 3))
    with pytest.raises(ValueError, match="BatchNorm needs at least 2 examples"):
        Conv2d(2, 6, 3, norm=BatchNorm())(torch.randn(1, 2, 3, 3))


@pytest.mark.parametrize("norm", [LayerNorm, "layer"])
def test_norm_takes_an_object_only(norm: Any) -> None:
    with pytest.raises(TypeError, match=r"norm must be an instance of .*, such as LayerNorm\(\)"):
        Conv2d(2, 6, 3, norm=norm)
