"""Weight normalisation against its definition, its identities and torch's parametrisation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from ln_zoo.layers import Linear
from ln_zoo.norms import Site, WeightNorm

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
DOUBLE = {"dtype": torch.float64}


def linear(inputs=5, features=4, **options):
    """A layer whose scale differs from its row norms."""
    torch.manual_seed(0)
    layer = Linear(inputs, features, norm=WeightNorm(), **DOUBLE, **options)
    with torch.no_grad():
        layer.site.scale.add_(0.5 * torch.rand_like(layer.site.scale))
    return layer


def loss_of(layer, inputs=5):
    torch.manual_seed(1)
    x, target = torch.randn(8, inputs, **DOUBLE), torch.randn(8, layer.out_features, **DOUBLE)
    return F.mse_loss(torch.tanh(layer(x)), target)


def test_a_fresh_layer_is_the_plain_one():
    torch.manual_seed(0)
    layer = Linear(5, 4, norm=WeightNorm(), **DOUBLE)
    x = torch.randn(3, 5, **DOUBLE)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), **TIGHT)


def test_equals_torch_with_its_gradients():
    layer = linear()
    twin = weight_norm(nn.Linear(5, 4, **DOUBLE))
    pairs = [
        (layer.site.scale, twin.parametrizations.weight.original0),
        (layer.weight, twin.parametrizations.weight.original1),
        (layer.bias, twin.bias),
    ]
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(ours.view_as(theirs))
    x = torch.randn(3, 5, **DOUBLE)
    torch.testing.assert_close(layer(x), twin(x), **TIGHT)
    loss_of(layer).backward()
    loss_of(twin).backward()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad.view_as(ours), **TIGHT)


@pytest.mark.parametrize("scale", [0.0, 1.0, 10.0])
def test_a_row_of_zeros_stays_zero_with_finite_gradients(scale):
    """In torch's own parametrisation such a row is 0 / 0."""
    torch.manual_seed(0)
    layer = Linear(5, 4, norm=WeightNorm())
    with torch.no_grad():
        layer.weight[1] = 0.0
        layer.site.scale[1] = scale
    output = layer(torch.randn(3, 5))
    torch.testing.assert_close(output[:, 1], layer.bias[1].expand(3))
    output.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    assert layer.weight.grad.abs().max() < 1e3


def test_reset_norm_takes_the_scale_from_new_weights_in_place():
    layer = linear()
    scale, keys = layer.site.scale, list(layer.state_dict())
    nn.init.orthogonal_(layer.weight)
    layer.reset_norm()
    torch.testing.assert_close(layer.site.scale.detach(), torch.ones(4, **DOUBLE), **TIGHT)
    assert layer.site.scale is scale, "an optimiser made before would lose the parameter"
    assert list(layer.state_dict()) == keys
    assert scale.requires_grad
    assert scale.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_rows_are_taken_in_float32(dtype):
    """The sum of squares of these rows overflows float16."""
    weight = torch.full((2, 4), 500.0, dtype=dtype)
    site = Site(WeightNorm(), "sum", 2, weight=weight, dtype=dtype)
    assert site.scale.dtype == dtype
    torch.testing.assert_close(site.scale.detach(), torch.full((2,), 1000.0, dtype=dtype))
    used = site.weight(weight)
    assert used.dtype == dtype
    torch.testing.assert_close(used, weight)


@pytest.mark.parametrize("magnitude", [1e-15, 1e15])
def test_tiny_and_huge_rows_keep_their_direction(magnitude):
    torch.manual_seed(0)
    layer = Linear(5, 4, norm=WeightNorm(), bias=False)
    x = torch.randn(3, 5)
    expected = layer(x)
    with torch.no_grad():
        layer.weight.mul_(magnitude)
    torch.testing.assert_close(layer(x), expected)
