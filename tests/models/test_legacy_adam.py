"""The legacy Adam against a loop from its equations, and its first steps against torch's Adam."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ln_zoo.models import MLPClassifier
from ln_zoo.models.legacy_adam import LegacyAdam, adam

F64 = torch.float64


def gradient(w: Tensor, t: int) -> Tensor:
    """Of some loss that changes from step to step."""
    return (w - 0.3).sin() * (1 + t % 3) + torch.linspace(-0.1, 2, w.numel()).view(w.shape)


def equations(
    start: Tensor,
    steps: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Tensor:
    w, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    c1, c2 = 1 - betas[0], 1 - betas[1]
    for t in range(1, steps + 1):
        g = gradient(w, t - 1)
        m = c1 * g + (1 - c1) * m
        v = c2 * g**2 + (1 - c2) * v
        w = w - lr * math.sqrt(1 - c2**t) / (1 - c1**t) * m / (v.sqrt() + eps)
    return w


def run(optimizer: torch.optim.Optimizer, w: Tensor, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        w.grad = gradient(w.detach(), t).to(w.dtype)
        optimizer.step()


def start(size: int = 5) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("form", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-2}, {"eps": 1.0}], ids=str
)
def test_steps_are_the_equations(options: dict[str, Any], form: dict[str, bool]) -> None:
    w = nn.Parameter(start())
    run(LegacyAdam([w], **options, **form), w, 30)
    torch.testing.assert_close(w.detach(), equations(start(), 30, **options), rtol=1e-12, atol=0)


def test_a_run_goes_on_from_its_state() -> None:
    whole, w = nn.Parameter(start()), nn.Parameter(start())
    run(LegacyAdam([whole], lr=0.01), whole, 20)
    optimizer = LegacyAdam([w], lr=0.01)
    run(optimizer, w, 8)
    again = nn.Parameter(w.detach().clone())
    resumed = LegacyAdam([again], lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(resumed, again, 12, first=8)
    assert torch.equal(again, whole)


def test_a_parameter_counts_its_own_updates() -> None:
    early, late = nn.Parameter(start()), nn.Parameter(start())
    optimizer = LegacyAdam([early, late], lr=0.01)
    run(optimizer, early, 4)
    assert torch.equal(late, start())
    early.grad = None
    run(optimizer, late, 4)
    torch.testing.assert_close(early, late, rtol=0, atol=0)


def test_rate_and_eps_of_the_groups_stay_for_schedules() -> None:
    w = nn.Parameter(start())
    optimizer = LegacyAdam([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run(optimizer, w, 1)
    schedule.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["eps"], group["params"]) == (0.05, 1e-8, [w])
    w.grad = torch.full_like(w, float("nan"))
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.step(lambda: _fails())
    assert optimizer.param_groups[0] is group


def _fails() -> float:
    raise RuntimeError("no gradient")


def test_closures_have_gradients_and_hooks_run_once() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # which wraps the step of torch's own class
    optimizer = LegacyAdam([w], lr=0.01)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert optimizer.step(closure).item() < 4
    assert len(calls) == 2


def test_a_model_chooses_by_name() -> None:
    model = MLPClassifier(4, [3])
    assert type(adam(model, 0.1, "standard")) is torch.optim.Adam
    legacy = adam(model, 0.1, "legacy")
    assert type(legacy) is LegacyAdam
    assert legacy.defaults["fused"]
    assert legacy.defaults["lr"] == 0.1
    with pytest.raises(ValueError, match="adam_bias_correction"):
        adam(model, 0.1, "none")  # type: ignore[arg-type]
