"""Weight normalisation against its definition, its identities and torch's parametrisation."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from ln_zoo.layers import Linear
from ln_zoo.norms import BatchNorm, Site, WeightNorm

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


@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 3, 3)])
def test_rows_have_the_norm_of_the_scale_and_the_direction_of_the_weight(shape):
    torch.manual_seed(0)
    weight = torch.randn(*shape, **DOUBLE)
    site = Site(WeightNorm(), "sum", 4, weight=weight, **DOUBLE)
    torch.testing.assert_close(site.scale.detach(), weight.flatten(1).norm(dim=1), **TIGHT)
    with torch.no_grad():
        site.scale.copy_(torch.tensor([0.5, 2.0, -1.0, 0.0]))
    used = site.weight(weight)
    assert used.shape == shape
    for row, v, g in zip(used, weight, site.scale, strict=True):
        torch.testing.assert_close(row, g * v / math.sqrt(v.square().sum()), **TIGHT)


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


def test_gradients_are_those_of_the_paper():
    """Salimans and Kingma, eq. 3: of the scale and of the direction, from that of w itself."""
    layer = linear()
    loss_of(layer).backward()
    plain = nn.Linear(5, 4, **DOUBLE)
    with torch.no_grad():
        plain.weight.copy_(layer.site.weight(layer.weight))
        plain.bias.copy_(layer.bias)
    loss_of(plain).backward()
    for i in range(4):
        v, g, grad_w = layer.weight[i], layer.site.scale[i], plain.weight.grad[i]
        grad_g = grad_w @ v / v.norm()
        torch.testing.assert_close(layer.site.scale.grad[i], grad_g, **TIGHT)
        grad_v = g / v.norm() * grad_w - g * grad_g / v.norm().square() * v
        torch.testing.assert_close(layer.weight.grad[i], grad_v.detach(), **TIGHT)


def test_gradient_is_orthogonal_to_the_weight():
    layer = linear()
    loss_of(layer).backward()
    assert layer.weight.grad.norm() > 0.01
    assert (layer.weight * layer.weight.grad).sum(1).abs().max() < 1e-15


def test_norms_grow_under_plain_gradient_descent_as_pythagoras_says():
    layer = linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(20):
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        loss_of(layer).backward()
        optimizer.step()
        step = (layer.weight - before).norm(dim=1) / before.norm(dim=1)
        growth = layer.weight.norm(dim=1) / before.norm(dim=1)
        assert (growth > 1).all()
        torch.testing.assert_close(growth, (1 + step.square()).sqrt(), **TIGHT)


def test_scaling_the_weight_keeps_the_output_and_divides_the_gradient():
    layer = linear()
    x = torch.randn(3, 5, **DOUBLE)
    output = layer(x)
    loss_of(layer).backward()
    grads = [p.grad.clone() for p in (layer.weight, layer.site.scale, layer.bias)]
    layer.zero_grad()
    with torch.no_grad():
        layer.weight.mul_(8)
    torch.testing.assert_close(layer(x), output, **TIGHT)
    loss_of(layer).backward()
    torch.testing.assert_close(8 * layer.weight.grad, grads[0], **TIGHT)
    torch.testing.assert_close(layer.site.scale.grad, grads[1], **TIGHT)
    torch.testing.assert_close(layer.bias.grad, grads[2], **TIGHT)


def test_equals_batch_norm_on_whitened_inputs():
    """Zero mean and identity covariance make the variance of v.x the square of |v|."""
    torch.manual_seed(0)
    x = torch.randn(40, 5, **DOUBLE)
    x = x - x.mean(0)
    # x = U S V' has covariance V S^2 V' / n: U sqrt(n) is white.
    white = torch.linalg.svd(x, full_matrices=False)[0] * math.sqrt(40)
    torch.testing.assert_close(white.T @ white / 40, torch.eye(5, **DOUBLE), **TIGHT)

    weight_layer = linear()
    batch_layer = Linear(5, 4, norm=BatchNorm(eps=0.0), **DOUBLE)
    with torch.no_grad():
        batch_layer.weight.copy_(weight_layer.weight)
        batch_layer.bias.copy_(weight_layer.bias)
        batch_layer.site.gain.copy_(weight_layer.site.scale)
    torch.testing.assert_close(batch_layer(white), weight_layer(white), **TIGHT)


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


def test_a_layer_of_zeros_can_be_made_and_reset():
    layer = Linear(5, 4, norm=WeightNorm())
    nn.init.zeros_(layer.weight)
    layer.reset_norm()
    assert torch.equal(layer.site.scale, torch.zeros(4))
    assert torch.equal(layer(torch.ones(1, 5))[0], layer.bias)


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


def test_sums_are_left_alone():
    site = Site(WeightNorm(), "sum", 4, weight=torch.randn(4, 3))
    a = torch.randn(2, 4, dtype=torch.bfloat16)
    assert site(a) is a
    assert site.gain is None
    assert site.to_spec().identity
