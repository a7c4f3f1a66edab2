"""Running averages of batch normalisation, its gains, and gradients of equal examples.

Against the equations: tests/layers/test_feed_forward.py and test_against_reference.py.
"""

import numpy as np
import pytest
import torch
from refusals import refuses

from ln_zoo.layers import GRU, LSTM, Conv2d, Linear
from ln_zoo.norms import BatchNorm, Site

DOUBLE = {"dtype": torch.float64}


def averages(values, momentum):
    """A plain average of the first 1 / momentum batches, then the exponential one."""
    running = np.zeros_like(values[0])
    for count, value in enumerate(values, start=1):
        weight = max(1 / count, momentum)
        running = (1 - weight) * running + weight * value
    return running


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("axis", "shape"), [(-1, (6, 3)), (-1, (2, 3, 3)), (1, (2, 3, 2, 2))])
def test_running_averages(axis, shape, unbiased):
    torch.manual_seed(0)
    site = Site(BatchNorm(momentum=0.25, unbiased=unbiased), "sum", 3, axis=axis, **DOUBLE)
    means, variances = [], []
    for batch in range(1, 9):
        a = 2 + 3 * torch.randn(*shape, **DOUBLE)
        site(a)
        examples = a.movedim(axis, -1).reshape(-1, 3).numpy()
        means.append(examples.mean(0))
        variances.append(examples.var(0, ddof=1))
        for running, values in ((site.running_mean, means), (site.running_var, variances)):
            np.testing.assert_allclose(running, averages(values, 0.25), rtol=1e-12, atol=1e-12)
        assert site.num_batches_tracked == batch
    np.testing.assert_allclose(averages(means[:4], 0.25), np.mean(means[:4], 0))


def test_one_row_cannot_train_but_positions_of_one_image_can():
    layer = Conv2d(2, 3, 1, norm=BatchNorm())
    assert torch.isfinite(layer(torch.randn(1, 2, 2, 2))).all()
    refuses(r"BatchNorm .*at least 2 .* got 1", layer, torch.randn(1, 2, 1, 1))
    refuses(r"BatchNorm .*at least 2 .* got 1", Linear(3, 4, norm=BatchNorm()), torch.randn(1, 3))


def test_recurrent_gain_is_its_own():
    for options, gain in (({}, 0.1), ({"recurrent_gain": 0.4}, 0.4)):
        site = Site(BatchNorm(**options), "recurrent", 3, recurrent=True)
        assert torch.equal(site.gain, torch.full((3,), gain))
    assert torch.equal(Site(BatchNorm(gain=0.7), "sum", 3).gain, torch.full((3,), 0.7))


def test_running_averages_follow_float64_and_back():
    layer = Linear(5, 4, norm=BatchNorm())
    assert layer.double().site.running_var.dtype == torch.float64
    assert layer.half().site.running_var.dtype == torch.float64
    assert layer.float().site.running_var.dtype == torch.float32
    assert layer.site.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("noise", [0.1, 0.0])
@pytest.mark.parametrize("cls", [LSTM, GRU])
def test_noise_on_the_initial_state_keeps_gradients_finite(cls, noise, monkeypatch):
    """Of 100 units that read the same 784 pixels in all examples, as in images' margins.

    Without noise, float32 overflows (Cooijmans et al. 2017).
    """
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    torch.manual_seed(0)
    layer = cls(1, 100, norm=BatchNorm(max_steps=784))
    assert layer.sites["l0"]["input"].norm.recurrent_gain == 0.1
    x = torch.rand(784, 1, 1).expand(784, 8, 1)
    h = noise * torch.randn(1, 8, 100)
    output, _ = layer(x, (h, torch.zeros_like(h)) if cls is LSTM else h)
    assert output.isfinite().all()
    (output[-1] * torch.randn(8, 100)).sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters()) == (noise > 0)
