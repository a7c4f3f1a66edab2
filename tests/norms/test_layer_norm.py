"""Layer and RMS normalisation against the equations, written out in NumPy, and against torch's."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ln_zoo.layers import Conv2d, Linear
from ln_zoo.norms import LayerNorm, RMSNorm, Site

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def layer_norm_rows(a, gain, eps):
    """Eq. 3 and 4: statistics over the H summed inputs of each row."""
    rows = []
    for row in a.reshape(-1, a.shape[-1]):
        mu = sum(row) / len(row)
        sigma = np.sqrt(sum((row - mu) ** 2) / len(row) + eps)
        rows.append(gain / sigma * (row - mu))
    return np.array(rows).reshape(a.shape)


def rms_norm_rows(a, gain, eps):
    """Zhang and Sennrich's eq. 4: each row divided by its root mean square."""
    rows = []
    for row in a.reshape(-1, a.shape[-1]):
        rows.append(gain * row / np.sqrt(sum(row**2) / len(row) + eps))
    return np.array(rows).reshape(a.shape)


@pytest.mark.parametrize(
    ("norm", "reference"),
    [(LayerNorm(eps=0.01), layer_norm_rows), (RMSNorm(eps=0.01), rms_norm_rows)],
)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 1, 4, 5)])
def test_linear_equals_the_equations(norm, reference, shape):
    torch.manual_seed(0)
    layer = randomise(Linear(5, 7, norm=norm, dtype=torch.float64))
    x = torch.randn(*shape, dtype=torch.float64)
    weight, bias, gain = (t.detach().numpy() for t in (layer.weight, layer.bias, layer.site.gain))
    expected = reference(x.numpy() @ weight.T, gain, norm.eps) + bias
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "reference"),
    [(LayerNorm(eps=0.01), layer_norm_rows), (RMSNorm(eps=0.01), rms_norm_rows)],
)
def test_groups_have_statistics_of_their_own(norm, reference):
    torch.manual_seed(0)
    site = randomise(Site(norm, "input", 9, groups=(6, 3), dtype=torch.float64))
    a = torch.randn(4, 2, 9, dtype=torch.float64)
    gain = site.gain.detach().numpy()
    expected = np.concatenate(
        [
            reference(a.numpy()[..., :6], gain[:6], norm.eps),
            reference(a.numpy()[..., 6:], gain[6:], norm.eps),
        ],
        axis=-1,
    )
    np.testing.assert_allclose(site(a).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("norm", "reference"),
    [(LayerNorm(eps=0.01), layer_norm_rows), (RMSNorm(eps=0.01), rms_norm_rows)],
)
def test_convolutions_share_statistics_over_channels_and_positions(norm, reference):
    torch.manual_seed(0)
    site = randomise(Site(norm, "sum", 3, axis=1, own_shift=True, dtype=torch.float64))
    a = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    gain, shift = site.gain.detach().numpy(), site.shift.detach().numpy()
    whole = reference(a.numpy().reshape(2, -1), 1.0, norm.eps).reshape(a.shape)
    expected = whole * gain[None, :, None, None] + shift[None, :, None, None]
    np.testing.assert_allclose(site(a).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


# Its three forms in convolutions

FORMS = ["channel", "unit", "position"]


def convolution_by_hand(a, form, gain, shift, eps):
    """Eq. 3 and 4 for sums (N, C, H, W): the units of one example, or of one position of it."""
    out = np.empty_like(a)
    for n, example in enumerate(a):
        if form == "position":
            for h in range(example.shape[1]):
                for w in range(example.shape[2]):
                    out[n, :, h, w] = layer_norm_rows(example[:, h, w], 1.0, eps)
        else:
            out[n] = layer_norm_rows(example.reshape(-1), 1.0, eps).reshape(example.shape)
    along = (slice(None), None, None)
    return out * (gain if gain.ndim == 3 else gain[along]) + (
        shift if shift.ndim == 3 else shift[along]
    )


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", FORMS)
def test_convolutions_equal_the_equations(form, memory):
    torch.manual_seed(0)
    norm = LayerNorm(eps=0.01, convolution=form)
    layer = Conv2d(2, 3, 2, bias=True, norm=norm, positions=(4, 5), dtype=torch.float64)
    randomise(layer)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    sums = F.conv2d(x, layer.weight).detach().numpy()
    shape = (3, 4, 5) if form == "unit" else (3,)
    assert layer.site.gain.shape == shape
    shift = torch.zeros(3) if layer.site.shift is None else layer.site.shift
    assert shift.shape == shape
    gain, shift = layer.site.gain.detach().numpy(), shift.detach().numpy()
    expected = convolution_by_hand(sums, form, gain, shift, norm.eps)
    expected += layer.bias.detach().numpy()[:, None, None]
    x = x.to(memory_format=memory)
    np.testing.assert_allclose(layer(x).detach().numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layer(x[1]).detach().numpy(), expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_convolution_with_a_single_sum_gives_its_bias(form, training):
    """It is its own mean, so that nothing but the bias is left."""
    norm = LayerNorm(convolution=form)
    layer = Conv2d(3, 1, 1, norm=norm, positions=(1, 1), dtype=torch.float64).train(training)
    x = torch.randn(1, 3, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.bias.view(1, 1, 1, 1), **TIGHT)
    torch.testing.assert_close(layer(torch.cat([x, x]))[:1], layer(x), **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_gradients_in_convolutions(form):
    torch.manual_seed(0)
    norm = LayerNorm(convolution=form)
    layer = randomise(Conv2d(2, 3, 2, norm=norm, positions=(2, 2), dtype=torch.float64))
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(lambda *_: layer(x).tanh(), inputs)
    assert torch.autograd.gradgradcheck(lambda *_: layer(x).tanh(), inputs)


def test_a_gain_and_a_shift_for_each_unit_start_at_one_and_zero():
    layer = Conv2d(2, 3, 2, norm=LayerNorm(gain=0.5, convolution="unit"), positions=(4, 5))
    assert torch.equal(layer.site.gain, torch.full((3, 4, 5), 0.5))
    assert torch.equal(layer.site.shift, torch.zeros(3, 4, 5))
    with torch.no_grad():
        layer.site.gain.zero_()
    layer.reset_parameters()
    assert torch.equal(layer.site.gain, torch.full((3, 4, 5), 0.5))


@pytest.mark.parametrize("form", FORMS)
def test_the_form_changes_nothing_outside_convolutions(form):
    torch.manual_seed(0)
    layer, plain = (Linear(5, 4, norm=norm) for norm in (LayerNorm(convolution=form), LayerNorm()))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 5)
    assert torch.equal(layer(x), plain(x))


def test_units_need_positions_and_keep_to_them():
    norm = LayerNorm(convolution="unit")
    with pytest.raises(ValueError, match=r'"unit".*positions=\(H, W\)'):
        Conv2d(2, 3, 3, norm=norm)
    layer = Conv2d(2, 3, 3, norm=norm, positions=(2, 4))
    message = r"positions=\(2, 4\), got .*\(2, 1\): set positions=\(2, 1\)"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 2, 4, 3))  # would broadcast


def test_an_unknown_form_is_refused():
    message = "convolution must be one of channel, unit, position, got 'layer'"
    with pytest.raises(ValueError, match=message):
        LayerNorm(convolution="layer")


def gradients(output, inputs):
    torch.manual_seed(1)
    return torch.autograd.grad((output * torch.randn_like(output)).sum(), inputs)


def test_linear_equals_torch_layer_norm_with_its_gradients():
    torch.manual_seed(0)
    layer = randomise(Linear(5, 7, norm=LayerNorm(), dtype=torch.float64))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, layer.weight, layer.bias, layer.site.gain)
    expected = F.layer_norm(x @ layer.weight.T, (7,), layer.site.gain, layer.bias)
    torch.testing.assert_close(layer(x), expected, **TIGHT)
    torch.testing.assert_close(gradients(layer(x), inputs), gradients(expected, inputs), **TIGHT)


def test_convolution_site_equals_torch_group_norm_of_one_group():
    torch.manual_seed(0)
    site = randomise(Site(LayerNorm(), "sum", 6, axis=1, own_shift=True, dtype=torch.float64))
    a = torch.randn(2, 6, 3, 3, dtype=torch.float64, requires_grad=True)
    inputs = (a, site.gain, site.shift)
    expected = F.group_norm(a, 1, site.gain, site.shift)
    torch.testing.assert_close(site(a), expected, **TIGHT)
    torch.testing.assert_close(gradients(site(a), inputs), gradients(expected, inputs), **TIGHT)


def test_site_equals_torch_rms_norm_with_its_gradients():
    torch.manual_seed(0)
    site = randomise(Site(RMSNorm(eps=1e-6), "sum", 6, dtype=torch.float64))
    twin = nn.RMSNorm(6, eps=1e-6, dtype=torch.float64)
    with torch.no_grad():
        twin.weight.copy_(site.gain)
    a = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(site(a), twin(a), **TIGHT)
    torch.testing.assert_close(
        gradients(site(a), (a, site.gain)), gradients(twin(a), (a, twin.weight)), **TIGHT
    )


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()])
def test_gain_one_and_no_shift_but_where_there_is_no_bias(norm):
    site = Site(norm, "input", 4)
    assert torch.equal(site.gain, torch.ones(4))
    assert site.shift is None
    assert torch.equal(Site(norm, "cell", 4, own_shift=True).shift, torch.zeros(4))
    assert torch.equal(Site(type(norm)(gain=0.1), "input", 4).gain, torch.full((4,), 0.1))


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()])
def test_rows_of_zeros_have_finite_gradients(norm):
    site = Site(norm, "recurrent", 4)
    a = torch.zeros(2, 4, requires_grad=True)
    site(a).square().sum().backward()
    assert torch.equal(site(a), torch.zeros(2, 4))
    assert torch.isfinite(a.grad).all()


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
def test_eps_out_of_range_is_refused(norm, eps):
    with pytest.raises(ValueError, match=f"{norm.__name__}: eps must be a finite number >= 0"):
        norm(eps=eps)


def test_large_mean_costs_no_precision_in_float32():
    """E[a^2] - E[a]^2 would lose every digit here."""
    a = 1e4 + torch.randn(3, 50, dtype=torch.float64)
    wide = Site(LayerNorm(), "sum", 50, dtype=torch.float64)(a.float().double())
    narrow = Site(LayerNorm(), "sum", 50)(a.float())
    torch.testing.assert_close(narrow.double(), wide, rtol=2e-3, atol=2e-3)
