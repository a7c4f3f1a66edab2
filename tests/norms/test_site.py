"""Sites: what norms find there, and what layers rely on."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, Site, WeightNorm


@dataclass(frozen=True)
class Recorder(Norm):
    """Puts one of everything on a site and doubles its sums."""

    def init_params(self, site):
        site.add_affine(gain=2.0)
        site.add_parameter("extra", torch.ones(2))
        site.add_buffer("average", (3,), 0.5)
        site.add_buffer("count", (), 0, dtype=torch.int64)

    def normalize(self, site, a, step=None):
        return 2 * a


@pytest.mark.parametrize("groups", [(), (3,), (2, 3), (4, 4)])
def test_groups_that_miss_features_are_refused(groups):
    with pytest.raises(ValueError, match="do not sum to the 4 features"):
        Site(LayerNorm(), "sum", 4, groups=groups)


def test_names_of_parameters_and_buffers():
    site = Site(Recorder(), "cell", 4, own_shift=True)
    assert list(site.state_dict()) == ["gain", "shift", "extra", "average", "count"]
    assert torch.equal(site.gain, torch.full((4,), 2.0))
    assert torch.equal(site.shift, torch.zeros(4))
    assert torch.equal(site.average, torch.full((3,), 0.5))
    assert site.count.dtype == torch.int64
    assert list(Site(Recorder(), "input", 4, sums=False).state_dict()) == []


@pytest.mark.parametrize(
    "site",
    [
        *(Site(n, "cell", 4, own_shift=True, recurrent=True) for n in (Identity(), WeightNorm())),
        Site(LayerNorm(), "input", 4, sums=False, weight=torch.randn(4, 3), recurrent=True),
    ],
    ids=["no norm", "norm of weights", "place of weights"],
)
def test_sites_that_leave_sums_alone_add_nothing(site):
    assert list(site.state_dict()) == []
    a = torch.randn(2, 4, dtype=torch.bfloat16)
    assert site(a, 3) is a
    assert site.to_spec().identity


def test_the_norm_keeps_no_tensor():
    norm = BatchNorm()
    first, second = (Site(norm, "sum", 4) for _ in range(2))
    first(torch.randn(3, 4))
    assert vars(norm) == vars(BatchNorm())
    assert torch.equal(second.running_mean, torch.zeros(4))
    assert first.gain is not second.gain


def test_add_parameter_sets_a_present_one_back_in_place():
    site = Site(Norm(), "sum", 4)
    site.add_parameter("scale", torch.ones(4))
    parameter = site.scale
    site.add_parameter("scale", torch.full((4,), 5.0))
    assert site.scale is parameter
    assert torch.equal(parameter, torch.full((4,), 5.0))


def test_mean_runs_over_what_shares_statistics():
    a = torch.randn(2, 3, 6, dtype=torch.float64)
    whole = Site(Norm(), "sum", 6).mean(a)
    torch.testing.assert_close(whole, a.sum(-1, keepdim=True) / 6)
    grouped = Site(Norm(), "input", 6, groups=(4, 2)).mean(a)
    assert grouped.shape == a.shape
    torch.testing.assert_close(grouped[..., 0], a[..., :4].sum(-1) / 4)
    torch.testing.assert_close(grouped[..., 3], a[..., :4].sum(-1) / 4)
    torch.testing.assert_close(grouped[..., 5], a[..., 4:].sum(-1) / 2)
    image = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    per_example = Site(Norm(), "sum", 6, axis=1).mean(image)
    assert per_example.shape == (2, 1, 1, 1)
    torch.testing.assert_close(per_example.flatten(), image.flatten(1).sum(1) / 72)


@pytest.mark.parametrize(("axis", "shape"), [(-1, (2, 5, 3)), (1, (2, 3, 4, 5)), (1, (2, 3))])
def test_affine_runs_along_the_features(axis, shape):
    site = Site(LayerNorm(), "cell", 3, axis=axis, own_shift=True)
    with torch.no_grad():
        site.gain.copy_(torch.tensor([1.0, 2.0, 3.0]))
        site.shift.copy_(torch.tensor([0.5, 0.0, -0.5]))
    out = site.affine(torch.ones(shape)).movedim(axis, -1)
    assert torch.equal(out, torch.tensor([1.5, 2.0, 2.5]).expand(out.shape))


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16])
def test_buffers_stay_float32_where_parameters_become_half(convert):
    site = Site(Recorder(), "sum", 4)
    site.average.fill_(1 / 3)
    kept = site.average.clone()
    convert(site)
    assert site.gain.dtype in (torch.float16, torch.bfloat16)
    assert site.average.dtype == torch.float32
    assert torch.equal(site.average, kept), "rounded on the way"
    assert site.count.dtype == torch.int64
    made = Site(Recorder(), "sum", 4, dtype=site.gain.dtype)
    assert made.average.dtype == torch.float32


def test_buffers_move_to_a_device_together_with_half_parameters():
    site = Site(Recorder(), "sum", 4).to("meta", torch.float16)
    assert site.average.device.type == "meta"
    assert site.average.dtype == torch.float32
