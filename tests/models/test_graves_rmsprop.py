"""Graves' RMSprop against a loop from his equations, and against torch's where both agree."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from ln_zoo.models.graves_rmsprop import GravesRMSprop

F64 = torch.float64
OPTIONS = [
    {},
    {"lr": 0.01, "decay": 0.5, "momentum": 0.3, "eps": 1e-2},
    {"lr": 1.0, "decay": 0.0, "momentum": 0.0, "eps": 1.0},
    {"lr": 0.1, "decay": 0.99, "momentum": 0.0, "eps": 1e-8},
]


def gradient(w: Tensor, t: int) -> Tensor:
    """Of some loss that changes from step to step."""
    return (w - 0.3).sin() * (1 + t % 3) + torch.linspace(-0.1, 2, w.numel()).view(w.shape)


def equations(start: Tensor, steps: int, lr=1e-4, decay=0.95, momentum=0.9, eps=1e-4) -> Tensor:
    """Eq. 38-41, number by number."""
    numbers = []
    for k, w in enumerate(start.flatten().tolist()):
        n = g = delta = 0.0
        for t in range(steps):
            now = start.clone()
            now.view(-1)[k] = w
            e = gradient(now, t).view(-1)[k].item()
            n = decay * n + (1 - decay) * e**2
            g = decay * g + (1 - decay) * e
            delta = momentum * delta - lr * e / math.sqrt(n - g**2 + eps)
            w = w + delta
        numbers.append(w)
    return torch.tensor(numbers, dtype=F64).view(start.shape)


def run(optimizer: torch.optim.Optimizer, w: Tensor, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        w.grad = gradient(w.detach(), t).to(w.dtype)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_steps_are_the_equations(options: dict[str, float], shape: tuple[int, ...]) -> None:
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    w = nn.Parameter(start.clone())
    run(GravesRMSprop([w], **options), w, 25)
    torch.testing.assert_close(w.detach(), equations(start, 25, **options), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_gradients_that_never_change_stay_finite(size: float) -> None:
    """n - g^2 is then the difference of equal numbers, and below zero by rounding."""
    w = nn.Parameter(torch.zeros(4))
    optimizer = GravesRMSprop([w], lr=1e-6, eps=1e-12)
    for _ in range(600):
        w.grad = torch.full((4,), size) * torch.tensor([1.0, -0.7, 0.33, 1.1])
        optimizer.step()
    assert w.isfinite().all()


def test_nan_is_not_hidden() -> None:
    w = nn.Parameter(torch.zeros(2))
    w.grad = torch.tensor([float("nan"), 1.0])
    GravesRMSprop([w]).step()
    assert w.isnan().tolist() == [True, False]


def test_parameters_without_gradients_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = GravesRMSprop([used, unused])
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state
    assert (used < 1).all()


def test_groups_have_values_of_their_own() -> None:
    start = torch.randn(4, generator=torch.Generator().manual_seed(2)).double()
    one, two = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = GravesRMSprop(
        [{"params": [one], "lr": 0.01}, {"params": [two], "decay": 0.5, "momentum": 0.0}], eps=1e-3
    )
    for t in range(10):
        for w in (one, two):
            w.grad = gradient(w.detach(), t)
        optimizer.step()
    expected = equations(start, 10, lr=0.01, eps=1e-3)
    torch.testing.assert_close(one.detach(), expected, rtol=1e-11, atol=1e-12)
    expected = equations(start, 10, decay=0.5, momentum=0.0, eps=1e-3)
    torch.testing.assert_close(two.detach(), expected, rtol=1e-11, atol=1e-12)


def test_a_closure_is_called_with_gradients() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    optimizer = GravesRMSprop([w], lr=0.01)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == 4
    assert losses == sorted(losses, reverse=True)
    assert optimizer.step() is None


def test_a_run_goes_on_from_its_state() -> None:
    start = torch.randn(5, generator=torch.Generator().manual_seed(3)).double()
    whole, w = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    run(GravesRMSprop([whole], lr=0.01), whole, 20)
    optimizer = GravesRMSprop([w], lr=0.01)
    run(optimizer, w, 8)
    stored = copy.deepcopy(optimizer.state_dict())
    again = nn.Parameter(w.detach().clone())
    resumed = GravesRMSprop([again], lr=0.5)
    resumed.load_state_dict(stored)
    run(resumed, again, 12, first=8)
    assert torch.equal(again, whole)


def test_a_state_takes_the_precision_and_place_of_its_parameters() -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = GravesRMSprop([w])
    run(optimizer, w, 2)
    for target in (
        nn.Parameter(torch.ones(3, dtype=F64)),
        nn.Parameter(torch.ones(3, device="meta")),
    ):
        other = GravesRMSprop([target])
        other.load_state_dict(optimizer.state_dict())
        for name, a in other.state[target].items():
            assert (a.dtype, a.device) == (target.dtype, target.device), name
        assert len(other.state[target]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, r"lr and eps must be positive, got 0\.0 and 0\.0001"),
        ({"lr": float("nan")}, "lr and eps must be positive, got nan"),
        ({"eps": 0.0}, r"lr and eps must be positive, got 0\.0001 and 0\.0"),
        ({"decay": 1.0}, r"decay and momentum must lie in \[0, 1\), got 1\.0 and 0\.9"),
        ({"momentum": -0.1}, r"decay and momentum must lie in \[0, 1\), got 0\.95 and -0\.1"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GravesRMSprop([nn.Parameter(torch.zeros(1))], **options)
