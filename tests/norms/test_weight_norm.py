"""Rows of weight normalisation: zeros, new ones, half precision, any magnitude.

Against the equations: tests/layers/test_feed_forward.py and test_against_reference.py.
"""

import pytest
import torch

from ln_zoo.layers import Linear
from ln_zoo.norms import Site, WeightNorm


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
