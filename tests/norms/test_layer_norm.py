"""Layer and RMS normalisation against torch's, and the forms of layer norm in convolutions.

Against the equations: tests/layers/test_feed_forward.py and test_against_reference.py.
"""

import pytest
import torch

from ln_zoo.layers import Conv2d
from ln_zoo.norms import LayerNorm, RMSNorm, Site

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["channel", "unit", "position"])
def test_a_convolution_with_a_single_sum_gives_its_bias(form, training):
    """It is its own mean, so that nothing but the bias is left."""
    norm = LayerNorm(convolution=form)
    layer = Conv2d(3, 1, 1, norm=norm, positions=(1, 1), dtype=torch.float64).train(training)
    x = torch.randn(1, 3, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.bias.view(1, 1, 1, 1), **TIGHT)
    torch.testing.assert_close(layer(torch.cat([x, x]))[:1], layer(x), **TIGHT)


def test_a_gain_and_a_shift_for_each_unit_start_at_one_and_zero():
    layer = Conv2d(2, 3, 2, norm=LayerNorm(gain=0.5, convolution="unit"), positions=(4, 5))
    assert torch.equal(layer.site.gain, torch.full((3, 4, 5), 0.5))
    assert torch.equal(layer.site.shift, torch.zeros(3, 4, 5))
    with torch.no_grad():
        layer.site.gain.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.site.gain, torch.full((3, 4, 5), 0.5))


def test_units_need_positions_and_keep_to_them():
    norm = LayerNorm(convolution="unit")
    with pytest.raises(ValueError, match=r'"unit".* positions='):
        Conv2d(2, 3, 3, norm=norm)
    layer = Conv2d(2, 3, 3, norm=norm, positions=(2, 4))
    with pytest.raises(ValueError, match=r"positions=\(2, 4\), got .*\(2, 1\)"):
        layer(torch.randn(1, 2, 4, 3))  # would broadcast


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match=r"convolution .*channel, unit, position.*'layer'"):
        LayerNorm(convolution="layer")


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()])
def test_gain_one_and_no_shift_but_where_there_is_no_bias(norm):
    site = Site(norm, "input", 4)
    assert torch.equal(site.gain, torch.ones(4))
    assert site.shift is None
    assert torch.equal(Site(norm, "cell", 4, own_shift=True).shift, torch.zeros(4))
    assert torch.equal(Site(type(norm)(gain=0.1), "input", 4).gain, torch.full((4,), 0.1))


def test_large_mean_costs_no_precision_in_float32():
    """E[a^2] - E[a]^2 would lose every digit here."""
    a = 1e4 + torch.randn(3, 50, dtype=torch.float64)
    wide = Site(LayerNorm(), "sum", 50, dtype=torch.float64)(a.float().double())
    narrow = Site(LayerNorm(), "sum", 50)(a.float())
    torch.testing.assert_close(narrow.double(), wide, rtol=2e-3, atol=2e-3)
