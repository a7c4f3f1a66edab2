"""`PenMixture` against normal distributions of other make, in float64, and against its own sums."""

from __future__ import annotations

import math

import pytest
import torch
from reference import covariance, pen_mixture
from refusals import refuses
from torch import Tensor
from torch.distributions import Bernoulli

from ln_zoo.metrics import PenMixture

F64 = torch.float64
every_shape = pytest.mark.parametrize("shape", [(), (1,), (5,), (7, 3), (2, 1, 4)], ids=str)


def outputs(shape: tuple[int, ...], components: int = 4, seed: int = 0) -> Tensor:
    """What a network might say, clear of floors and bounds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 1 + 6 * components, generator=generator).double()


def points(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    offsets = 2 * torch.randn(*shape, 2, generator=generator)
    lifts = torch.randint(2, (*shape, 1), generator=generator)
    return torch.cat([offsets, lifts], -1).double()


@every_shape
@pytest.mark.parametrize("components", [1, 4, 20])
def test_density_is_torchs(shape: tuple[int, ...], components: int) -> None:
    raw, given = outputs(shape, components), points(shape)
    mixture = PenMixture.of(raw)
    expected = -pen_mixture(raw).log_prob(given[..., :2])
    torch.testing.assert_close(mixture.offset_nll(given[..., :2]), expected)
    torch.testing.assert_close(mixture.expectation(), pen_mixture(raw).mean)
    assert expected.shape == shape
    # e = 1 / (1 + exp e^) with the source's e^, whose sign is the other one.
    e = 1 / (1 + (-raw[..., 0]).exp())
    lift = given[..., 2]
    expected = expected - (lift * e + (1 - lift) * (1 - e)).log()
    torch.testing.assert_close(mixture.nll(given), expected)
    bernoulli = Bernoulli(logits=raw[..., 0]).log_prob(lift)
    torch.testing.assert_close(mixture.nll(given) - mixture.offset_nll(given[..., :2]), -bernoulli)


def test_gradients_are_those_of_finite_differences() -> None:
    raw = outputs((3, 2)).requires_grad_()
    given = points((3, 2))
    offsets = given[..., :2].clone().requires_grad_()

    def nll(raw: Tensor, offsets: Tensor) -> Tensor:
        return PenMixture.of(raw).nll(torch.cat([offsets, given[..., 2:]], -1))

    assert torch.autograd.gradcheck(nll, (raw, offsets))
    assert torch.autograd.gradgradcheck(nll, (raw, offsets), fast_mode=True)
    # Where the correlation is zero, d/drho of -log N is -x y.
    raw = torch.zeros(7, dtype=F64, requires_grad=True)
    PenMixture.of(raw).offset_nll(torch.tensor([1.0, 2.0], dtype=F64)).backward()
    expected = torch.tensor([0, 0, -1, -2, 0, -3, -2], dtype=F64)
    torch.testing.assert_close(raw.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rho", [0.999, -0.999, 0.99])
@pytest.mark.parametrize("far", [1.0, 4.0])
def test_float32_near_full_correlation(rho: float, far: float) -> None:
    """Z is the difference of numbers near one another there, 1000 times as large as itself."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(10_000, 7, generator=generator)
    raw[:, 6] = math.atanh(rho)
    noise = far * torch.randn(10_000, 2, generator=generator)
    turned = rho * noise[:, 0] + math.sqrt(1 - rho**2) * noise[:, 1]
    given = raw[:, 2:4] + raw[:, 4:6].exp() * torch.stack([noise[:, 0], turned], -1)
    narrow, wide = PenMixture.of(raw), PenMixture.of(raw.double())
    exact = wide.offset_nll(given.double())
    error = narrow.offset_nll(given).double() - exact
    # The rounding of offsets themselves, times what they weigh: |x| / sigma up to 40.
    assert error.square().mean().sqrt() < 1e-4
    direct = pen_mixture(raw.double()).log_prob(given.double())
    torch.testing.assert_close(exact, -direct, rtol=1e-7, atol=1e-7)


def test_correlations_and_deviations_are_held() -> None:
    raw = torch.zeros(3, 7, dtype=F64)
    raw[:, 6] = torch.tensor([50.0, -50.0, 2.0])
    mixture = PenMixture.of(raw)
    held = torch.tensor([[0.999], [-0.999], [math.tanh(2)]], dtype=F64)
    torch.testing.assert_close(mixture.correlation.tanh(), held)
    halves = torch.tensor([[0.5], [-0.5], [0.5]], dtype=F64)
    found = PenMixture.of(raw, max_correlation=0.5).correlation.tanh()
    torch.testing.assert_close(found, halves)
    # In float32 as well rho stays below 1, where densities would have no end.
    narrow = PenMixture.of(raw.float())
    assert narrow.correlation.tanh().abs().max() < 1
    assert narrow.offset_nll(torch.ones(3, 2)).isfinite().all()
    raw = torch.zeros(2, 7, dtype=F64)
    raw[:, 4] = torch.tensor([-50.0, -6.0])
    raw[:, 5] = -30.0
    mixture = PenMixture.of(raw)
    assert mixture.log_std.tolist() == [[[-7.0, -7.0]], [[-6.0, -7.0]]]
    assert PenMixture.of(raw, min_log_std=-2.0).log_std.min() == -2.0
    # No density is higher than at a mean with both at their floors.
    nll = mixture.offset_nll(torch.zeros(2, 2, dtype=F64))
    assert nll[0].item() == pytest.approx(math.log(2 * math.pi) - 14)


@pytest.mark.parametrize("value", [60.0, -60.0, 300.0])
def test_large_outputs_stay_finite_in_float32(value: float) -> None:
    given = torch.tensor([3.0, -2.0, 1.0])
    for column in range(13):
        raw = torch.zeros(13)
        raw[column] = value
        raw.requires_grad_()
        nll = PenMixture.of(raw).nll(given)
        nll.backward()
        assert nll.isfinite(), column
        assert raw.grad.isfinite().all(), column


@pytest.mark.parametrize("column", range(7))
def test_nan_is_not_hidden(column: int) -> None:
    raw = torch.zeros(2, 7)
    raw[0, column] = float("nan")
    nll = PenMixture.of(raw).nll(torch.zeros(2, 3))
    assert nll[0].isnan()
    assert nll[1].isfinite()
    if column in (0, 1):  # there is no drawing by such a chance
        with pytest.raises(RuntimeError):
            PenMixture.of(raw).sample()
    else:
        assert PenMixture.of(raw).sample().isnan().any(-1).tolist() == [True, False]
    if column < 3:
        given = points((3,))
        given[1, column] = float("nan")
        assert PenMixture.of(outputs((3,))).nll(given).isnan().tolist() == [False, True, False]


def test_moments_of_samples() -> None:
    N = 200_000
    raw = outputs((), 3, seed=4) * 0.7
    mixture = PenMixture.of(raw.expand(N, -1))
    drawn = mixture.sample(generator=torch.Generator().manual_seed(0))
    assert drawn.shape == (N, 3)
    pi = mixture.log_weights[0].exp()
    mean, std, rho = mixture.mean[0], mixture.log_std[0].exp(), mixture.correlation[0].tanh()
    total = pi @ mean
    apart = mean - total
    within = covariance(std, rho) + apart[:, :, None] * apart[:, None]
    spread = (pi[:, None, None] * within).sum(0)
    centred = drawn[:, :2] - total
    assert (centred.mean(0).abs() < 5 * centred.std(0) / N**0.5).all()
    products = centred[:, :, None] * centred[:, None]
    error = products.std(0) / N**0.5
    assert ((products.mean(0) - spread).abs() < 5 * error).all()
    chance = torch.sigmoid(raw[0]).item()
    assert set(drawn[:, 2].tolist()) == {0.0, 1.0}
    assert abs(drawn[:, 2].mean().item() - chance) < 5 * (chance * (1 - chance) / N) ** 0.5


@every_shape
def test_samples_have_the_mixture_s_shape(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, F64):
        drawn = PenMixture.of(outputs(shape).to(dtype)).sample(bias=0.5)
        assert (drawn.shape, drawn.dtype) == ((*shape, 3), dtype)
        assert ((drawn[..., 2] == 0) | (drawn[..., 2] == 1)).all()
    assert PenMixture.of(outputs((0,))).sample().shape == (0, 3)


def test_a_generator_makes_samples_again() -> None:
    mixture = PenMixture.of(outputs((6, 2)))

    def drawn(seed: int) -> Tensor:
        return mixture.sample(0.3, torch.Generator().manual_seed(seed))

    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    # Torch's own numbers are left alone by a generator, and used without one.
    assert torch.equal(torch.random.get_rng_state(), before)
    first = mixture.sample(0.3)
    torch.manual_seed(0)
    assert torch.equal(mixture.sample(0.3), first)


@pytest.mark.parametrize("bias", [0.0, 0.15, 1.0, 4.0])
def test_bias(bias: float) -> None:
    """Section 5.4: sigma = exp(sigma^ - b), pi = softmax(pi^ (1 + b)); lifts as they are."""
    raw = outputs((5,))
    mixture, biased = PenMixture.of(raw), PenMixture.of(raw).biased(bias)
    scaled = (raw[:, 1:5] * (1 + bias)).exp()
    torch.testing.assert_close(biased.log_weights.exp(), scaled / scaled.sum(-1, keepdim=True))
    torch.testing.assert_close(biased.log_std.exp(), mixture.log_std.exp() / math.exp(bias))
    for name in ("end", "mean", "correlation"):
        assert torch.equal(getattr(biased, name), getattr(mixture, name))


def test_samples_are_of_the_biased_mixture() -> None:
    N = 20_000
    mixture = PenMixture.of(outputs(()).expand(N, -1))
    drawn = mixture.sample(0.7, torch.Generator().manual_seed(3))
    again = mixture.biased(0.7).sample(0.0, torch.Generator().manual_seed(3))
    torch.testing.assert_close(drawn, again)
    # So high that nothing but the likeliest component's mean is left.
    sure = mixture.sample(40.0)
    best = mixture.log_weights[0].argmax()
    assert (sure[:, :2] - mixture.mean[0, best]).abs().max() < 1e-12
    chance = mixture.end[0].sigmoid().item()
    assert abs(sure[:, 2].mean().item() - chance) < 5 * (chance * (1 - chance) / N) ** 0.5


def test_what_does_not_fit_is_refused() -> None:
    for bias in (-0.1, float("nan")):
        refuses("bias must be at least 0, got", PenMixture.of(outputs((2,))).sample, bias)
    for size in (0, 1, 6, 8, 120):
        refuses(rf"outputs .*{size}$", PenMixture.of, torch.zeros(3, size))
