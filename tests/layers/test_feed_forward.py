"""Linear and Conv2d with every norm against the equations, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_results import assert_close, filled, gradients
from reference import batch_norm, layer_norm, weight_norm
from torch import Tensor, nn

from ln_zoo.layers import Conv2d, Linear
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
EPS = 1e-3
NORMS: list[Norm] = [
    *(LayerNorm(eps=EPS, convolution=form) for form in ("channel", "unit", "position")),
    *(RMSNorm(eps=EPS), BatchNorm(eps=EPS), BatchNorm(eps=EPS, unbiased=True), WeightNorm()),
]
every_norm = pytest.mark.parametrize("norm", NORMS, ids=repr)
modes = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])


def expected(sums: Tensor, norm: Norm, layer: Any) -> Tensor:
    """Normalised sums (N, F, H, W), with gain, shift and bias."""
    flat, site = sums.flatten(1), layer.site
    if isinstance(norm, BatchNorm):
        rows = sums.movedim(1, -1).flatten(0, 2)
        mean, var = site.running_mean, site.running_var
        if layer.training:
            mean, var = rows.mean(0), rows.var(0, correction=int(norm.unbiased))
        moments = (a.view(-1, 1, 1) for a in (mean, var))
        sums = batch_norm(sums, EPS, *moments)
    elif getattr(norm, "convolution", "") == "position":
        sums = layer_norm(sums.movedim(1, -1), EPS).movedim(-1, 1)
    elif not isinstance(norm, WeightNorm):
        sums = layer_norm(flat, EPS, center=isinstance(norm, LayerNorm)).view_as(sums)
    for a, combine in ((site.gain, torch.mul), (site.shift, torch.add), (layer.bias, torch.add)):
        if a is not None:
            sums = combine(sums, a if a.dim() == 3 else a.view(-1, 1, 1))
    return sums


def weight_of(layer: Any, norm: Norm) -> Tensor:
    if not isinstance(norm, WeightNorm):
        return layer.weight
    return weight_norm(layer.weight.flatten(1), layer.site.scale).view_as(layer.weight)


def check(found: Tensor, wanted: Tensor, layer: nn.Module) -> None:
    assert_close(found, wanted, 0, 1e-9)
    assert_close(*(gradients(a, layer.parameters()) for a in (found, wanted)), 0, 1e-9)


@every_norm
@modes
@pytest.mark.parametrize(("bias", "lead"), [(True, (5,)), (False, (2, 3))])
def test_linear(norm: Norm, bias: bool, lead: tuple[int, ...], training: bool) -> None:
    """All leading axes are examples."""
    layer = filled(Linear(3, 4, bias, norm=norm, dtype=F64)).train(training)
    x = torch.randn(*lead, 3, dtype=F64)
    sums = x.flatten(0, -2) @ weight_of(layer, norm).T
    wanted = expected(sums[..., None, None], norm, layer).view(*lead, 4)
    check(layer(x), wanted, layer)


@every_norm
@modes
@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1, "padding_mode": "circular", "stride": 2}, {"groups": 2, "bias": False}],
    ids=str,
)
def test_conv2d(norm: Norm, training: bool, options: dict[str, Any]) -> None:
    plain = nn.Conv2d(4, 6, (3, 2), dtype=F64, **options | {"bias": False})
    x = torch.randn(3, 4, 6, 5, dtype=F64)
    positions = tuple(plain(x).shape[2:])
    layer = Conv2d(4, 6, (3, 2), norm=norm, positions=positions, dtype=F64, **options)
    filled(layer).train(training)
    sums = torch.func.functional_call(plain, {"weight": weight_of(layer, norm)}, x)
    found, wanted = layer(x), expected(sums, norm, layer)
    check(found, wanted, layer)
    if not norm.batch_dependent:
        torch.testing.assert_close(layer(x[1]), found[1], rtol=0, atol=1e-12)
        spread = layer(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(spread, found, rtol=0, atol=1e-12)
