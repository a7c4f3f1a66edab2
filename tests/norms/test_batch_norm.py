"""Batch normalisation against torch's, and its running averages.

Against the equations: tests/layers/test_feed_forward.py and test_against_reference.py.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from ln_zoo.layers import Linear
from ln_zoo.norms import BatchNorm, Site

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
DOUBLE = {"dtype": torch.float64}


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def averages(values, momentum):
    """A plain average of the first 1 / momentum batches, then the exponential one."""
    running = np.zeros_like(values[0])
    for count, value in enumerate(values, start=1):
        weight = max(1 / count, momentum)
        running = (1 - weight) * running + weight * value
    return running


@pytest.mark.parametrize(
    ("shape", "twin"), [((6, 5), nn.BatchNorm1d), ((2, 5, 3, 4), nn.BatchNorm2d)]
)
def test_site_equals_torch_in_training_with_its_gradients(shape, twin):
    torch.manual_seed(0)
    axis = 1 if len(shape) == 4 else -1
    site = randomise(Site(BatchNorm(), "sum", 5, axis=axis, own_shift=True, **DOUBLE))
    twin = twin(5, **DOUBLE)
    with torch.no_grad():
        twin.weight.copy_(site.gain)
        twin.bias.copy_(site.shift)
    a = torch.randn(*shape, **DOUBLE, requires_grad=True)
    head = torch.randn(*shape, **DOUBLE)
    ours, theirs = site(a), twin(a)
    torch.testing.assert_close(ours, theirs, **TIGHT)
    torch.testing.assert_close(
        torch.autograd.grad((ours * head).sum(), (a, site.gain, site.shift)),
        torch.autograd.grad((theirs * head).sum(), (a, twin.weight, twin.bias)),
        **TIGHT,
    )
    # One batch in, both hold its mean and its unbiased variance; torch's mixed with its start.
    torch.testing.assert_close(0.1 * site.running_mean, twin.running_mean, **TIGHT)
    torch.testing.assert_close(0.9 + 0.1 * site.running_var, twin.running_var, **TIGHT)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize(("axis", "shape"), [(-1, (6, 3)), (-1, (2, 3, 3)), (1, (2, 3, 2, 2))])
def test_running_averages(axis, shape, unbiased):
    """Plain average of the first 1 / momentum batches, then exponential; variance unbiased."""
    torch.manual_seed(0)
    site = Site(BatchNorm(momentum=0.25, unbiased=unbiased), "sum", 3, axis=axis, **DOUBLE)
    means, variances = [], []
    for batch in range(1, 9):
        a = 2 + 3 * torch.randn(*shape, **DOUBLE)
        site(a)
        examples = a.movedim(axis, -1).reshape(-1, 3).numpy()
        means.append(examples.mean(0))
        variances.append(examples.var(0, ddof=1))
        np.testing.assert_allclose(
            site.running_mean.numpy(), averages(means, 0.25), rtol=1e-12, atol=1e-12
        )
        np.testing.assert_allclose(
            site.running_var.numpy(), averages(variances, 0.25), rtol=1e-12, atol=1e-12
        )
        assert site.num_batches_tracked == batch
    np.testing.assert_allclose(averages(means[:4], 0.25), np.mean(means[:4], 0))


def test_untrained_evaluation_passes_sums_through_but_for_eps():
    a = torch.randn(2, 3, **DOUBLE)
    site = Site(BatchNorm(), "sum", 3, **DOUBLE).eval()
    torch.testing.assert_close(site(a), a / math.sqrt(1 + 1e-5), **TIGHT)


def test_positions_of_one_image_are_examples_enough():
    site = Site(BatchNorm(), "sum", 3, axis=1)
    assert torch.isfinite(site(torch.randn(1, 3, 2, 2))).all()
    with pytest.raises(ValueError, match="at least 2 examples"):
        site(torch.randn(1, 3, 1, 1))


def recurrent_site(**options):
    return Site(BatchNorm(**options), "recurrent", 3, recurrent=True, **DOUBLE)


def test_recurrent_gain_is_its_own():
    assert torch.equal(recurrent_site().gain, torch.full((3,), 0.1, **DOUBLE))
    assert torch.equal(recurrent_site(recurrent_gain=0.4).gain, torch.full((3,), 0.4, **DOUBLE))
    assert torch.equal(Site(BatchNorm(gain=0.7), "sum", 3).gain, torch.full((3,), 0.7))


def test_steps_beyond_max_steps_share_the_last_row():
    torch.manual_seed(0)
    site = recurrent_site(max_steps=2)
    batches = [torch.randn(6, 3, **DOUBLE) + t for t in range(4)]
    for step, a in enumerate(batches):
        site(a, step)
    assert site.num_batches_tracked.tolist() == [1, 3]
    expected = averages([a.mean(0).numpy() for a in batches[1:]], 0.1)
    np.testing.assert_allclose(site.running_mean[1].numpy(), expected, rtol=1e-12, atol=1e-12)
    site.eval()
    a = torch.randn(2, 3, **DOUBLE)
    assert torch.equal(site(a, 1), site(a, 7))
    assert not torch.equal(site(a, 0), site(a, 7))


def test_rows_reached_seldom_hold_no_trace_of_their_start():
    torch.manual_seed(0)
    site = recurrent_site(max_steps=3)
    for _ in range(20):
        site(torch.randn(4, 3, **DOUBLE), 0)
    a = 5 + torch.randn(4, 3, **DOUBLE)
    site(a, 1)
    torch.testing.assert_close(site.running_mean[1], a.mean(0), **TIGHT)
    torch.testing.assert_close(site.running_var[1], a.var(0), **TIGHT)


def test_an_example_left_alone_uses_the_running_averages():
    """Of a packed batch the longest sequence outlives the others."""
    torch.manual_seed(0)
    site = recurrent_site(max_steps=8)
    first = torch.randn(4, 3, **DOUBLE)
    site(first, 0)
    alone = torch.randn(1, 3, **DOUBLE)
    expected = 0.1 * (alone - first.mean(0)) / (first.var(0) + 1e-5).sqrt()
    torch.testing.assert_close(site(alone, 1), expected, **TIGHT)
    assert site.num_batches_tracked.tolist() == [1, *[0] * 7]

    second = 3 + torch.randn(4, 3, **DOUBLE)
    site(second, 1)
    expected = 0.1 * (alone - second.mean(0)) / (second.var(0) + 1e-5).sqrt()
    torch.testing.assert_close(site(alone, 1), expected, **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_averages_never_become_half_precision(dtype):
    """In half precision they would stop moving once 1 / count is small."""
    torch.manual_seed(0)
    norm = BatchNorm(momentum=0.01)
    for layer in (Linear(5, 4, norm=norm).to(dtype), Linear(5, 4, norm=norm, dtype=dtype)):
        assert layer.site.gain.dtype == dtype
        means, variances = [], []
        for _ in range(60):
            x = torch.randn(8, 5).to(dtype)
            assert layer(x).dtype == dtype
            sums = nn.functional.linear(x, layer.weight).detach().float().numpy()
            means.append(sums.mean(0))
            variances.append(sums.var(0, ddof=1))
        assert layer.site.running_mean.dtype == layer.site.running_var.dtype == torch.float32
        np.testing.assert_allclose(layer.site.running_mean, np.mean(means, 0), atol=1e-5)
        np.testing.assert_allclose(layer.site.running_var, np.mean(variances, 0), atol=1e-5)


def test_running_averages_follow_float64_and_back():
    layer = Linear(5, 4, norm=BatchNorm())
    assert layer.double().site.running_var.dtype == torch.float64
    assert layer.half().site.running_var.dtype == torch.float64
    assert layer.float().site.running_var.dtype == torch.float32
    assert layer.site.num_batches_tracked.dtype == torch.int64
