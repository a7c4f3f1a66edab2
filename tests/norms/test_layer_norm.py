"""Layer and RMS normalisation: forms in convolutions, statistics of each gate, first gains.

Against the equations: tests/layers/test_feed_forward.py and test_against_reference.py.
"""

import pytest
import torch
from refusals import refuses

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, Linear
from ln_zoo.norms import LayerNorm, RMSNorm, Site

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
#: Sizes of the groups of features that share statistics, for six units.
GATES = {LSTM: (24,), GRU: (12, 6), RNN: (6,)}


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
    refuses(r'"unit".* positions=', Conv2d, 2, 3, 3, norm=norm)
    layer = Conv2d(2, 3, 3, norm=norm, positions=(2, 4))
    with pytest.raises(ValueError, match=r"positions=\(2, 4\), got .*\(2, 1\)"):
        layer(torch.randn(1, 2, 4, 3))  # would broadcast


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


@pytest.mark.parametrize("cls", GATES)
def test_per_gate_groups_are_gates(cls):
    joint, alone = (cls(3, 6, norm=LayerNorm(per_gate=value)) for value in (False, True))
    # One set of weights fits both.
    shapes = [{name: a.shape for name, a in of.state_dict().items()} for of in (joint, alone)]
    assert shapes[0] == shapes[1]
    last = "sum" if cls is RNN else "recurrent"
    for layer, groups in ((joint, GATES[cls]), (alone, (6,) * (sum(GATES[cls]) // 6))):
        assert layer.sites["l0"][last].to_spec().groups == groups


@pytest.mark.parametrize("form", ["channel", "unit", "position"])
def test_per_gate_changes_nothing_without_gates_nor_the_form_without_positions(form):
    x = {Linear: torch.randn(4, 3), Conv2d: torch.randn(2, 3, 5, 5), RNN: torch.randn(5, 4, 3)}
    for cls, given in x.items():
        norms = [LayerNorm(convolution=form, per_gate=per_gate) for per_gate in (False, True)]
        options = {"kernel_size": 3, "positions": (3, 3)} if cls is Conv2d else {}
        outputs = []
        for norm in norms if cls is Conv2d else (LayerNorm(), *norms):
            torch.manual_seed(1)
            found = cls(3, 6, norm=norm, **options)(given)
            outputs.append(found[0] if cls is RNN else found)
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    site = Site(LayerNorm(per_gate=True), "input", 9, groups=(6, 3))
    assert site.to_spec().groups == (6, 3)


def test_gates_of_one_unit_are_their_biases():
    layer = LSTM(3, 1, norm=LayerNorm(per_gate=True), dtype=torch.float64)
    torch.nn.init.constant_(layer.sites["l0"]["cell"].shift, 0.3)
    o = (layer.bias_ih_l0 + layer.bias_hh_l0)[3].sigmoid()
    expected = (o * torch.tensor(0.3, dtype=torch.float64).tanh()).expand(5, 4, 1)
    torch.testing.assert_close(layer(torch.randn(5, 4, 3, dtype=torch.float64))[0], expected)
