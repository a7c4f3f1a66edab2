"""Optimizers against loops from their equations, and the optimizer that each model chooses."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor, nn
from torch.optim import SGD, Adam, RMSprop

from ln_zoo import models
from ln_zoo.models.graves_rmsprop import GravesRMSprop
from ln_zoo.models.legacy_adam import LegacyAdam

F64 = torch.float64
CLASSES = (GravesRMSprop, LegacyAdam)


def gradient(w: Tensor, t: int) -> Tensor:
    """Of some loss that changes from step to step."""
    return (w - 0.3).sin() * (1 + t % 3) + torch.linspace(-0.1, 2, w.numel()).view(w.shape)


def graves(w: Tensor, steps: int, lr=1e-4, decay=0.95, momentum=0.9, eps=1e-4) -> Tensor:
    """Eq. 38-41 of Graves (2013)."""
    n = g = delta = torch.zeros_like(w)
    for t in range(steps):
        e = gradient(w, t)
        n = decay * n + (1 - decay) * e**2
        g = decay * g + (1 - decay) * e
        delta = momentum * delta - lr * e / (n - g**2 + eps).sqrt()
        w = w + delta
    return w


def legacy(w: Tensor, steps: int, lr=1e-3, betas=(0.9, 0.999), eps=1e-8) -> Tensor:
    m = v = torch.zeros_like(w)
    c1, c2 = 1 - betas[0], 1 - betas[1]
    for t in range(1, steps + 1):
        g = gradient(w, t - 1)
        m = c1 * g + (1 - c1) * m
        v = c2 * g**2 + (1 - c2) * v
        w = w - lr * math.sqrt(1 - c2**t) / (1 - c1**t) * m / (v.sqrt() + eps)
    return w


def start(*shape: int) -> Tensor:
    return torch.randn(shape or (5,), generator=torch.Generator().manual_seed(0)).double()


def run(optimizer: torch.optim.Optimizer, w: Tensor, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        w.grad = gradient(w.detach(), t).to(w.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.01, "decay": 0.5, "momentum": 0.3, "eps": 1e-2},
        {"lr": 1.0, "decay": 0.0, "momentum": 0.0, "eps": 1.0},
        {"lr": 0.1, "decay": 0.99, "momentum": 0.0, "eps": 1e-8},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_steps_of_graves_are_the_equations(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    w = nn.Parameter(start(*shape))
    run(GravesRMSprop([w], **options), w, 25)
    expected = graves(start(*shape), 25, **options)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-2}, {"eps": 1.0}], ids=str
)
def test_legacy_adam_is_the_equations(options: dict[str, Any], form: dict[str, bool]) -> None:
    w = nn.Parameter(start())
    run(LegacyAdam([w], **options, **form), w, 30)
    torch.testing.assert_close(w.detach(), legacy(start(), 30, **options), rtol=1e-12, atol=0)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_run_goes_on_from_its_state(cls: Any) -> None:
    whole, w = nn.Parameter(start()), nn.Parameter(start())
    run(cls([whole], lr=0.01), whole, 20)
    optimizer = cls([w], lr=0.01)
    run(optimizer, w, 8)
    again = nn.Parameter(w.detach().clone())
    resumed = cls([again], lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(resumed, again, 12, first=8)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("cls", CLASSES)
def test_closures_have_gradients_and_hooks_run_once(cls: Any) -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # which wraps the step of torch's own class
    optimizer = cls([w], lr=0.01)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[0] == 4
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(calls) == 5
    assert optimizer.step() is None


@pytest.mark.parametrize("cls", CLASSES)
def test_parameters_without_gradients_stay(cls: Any) -> None:
    early, late = nn.Parameter(start()), nn.Parameter(start())
    optimizer = cls([early, late], lr=0.01)
    run(optimizer, early, 4)
    assert torch.equal(late, start())
    assert late not in optimizer.state
    early.grad = None
    run(optimizer, late, 4)  # each counts its own updates
    torch.testing.assert_close(early, late, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, 1e6])
def test_gradients_that_never_change_stay_finite(size: float) -> None:
    """n - g^2 is then the difference of equal numbers, and below zero by rounding."""
    w = nn.Parameter(torch.zeros(4))
    optimizer = GravesRMSprop([w], lr=1e-6, eps=1e-12)
    for _ in range(600):
        w.grad = torch.full((4,), size) * torch.tensor([1.0, -0.7, 0.33, 1.1])
        optimizer.step()
    assert w.isfinite().all()


def test_groups_have_values_of_their_own_and_nan_is_not_hidden() -> None:
    one, two = nn.Parameter(start(4)), nn.Parameter(start(4))
    options: list[dict[str, float]] = [{"lr": 0.01}, {"decay": 0.5, "momentum": 0.0}]
    groups = [{"params": [w], **of} for w, of in zip((one, two), options, strict=True)]
    optimizer = GravesRMSprop(groups, eps=1e-3)  # type: ignore[arg-type]
    for t in range(10):
        for w in (one, two):
            w.grad = gradient(w.detach(), t)
        optimizer.step()
    for w, of in zip((one, two), options, strict=True):
        expected = graves(start(4), 10, eps=1e-3, **of)
        torch.testing.assert_close(w.detach(), expected, rtol=1e-11, atol=1e-12)
    w = nn.Parameter(torch.zeros(2))
    w.grad = torch.tensor([float("nan"), 1.0])
    GravesRMSprop([w]).step()
    assert w.isnan().tolist() == [True, False]


def test_a_state_takes_the_precision_and_place_of_its_parameters() -> None:
    w = nn.Parameter(torch.ones(3))
    optimizer = GravesRMSprop([w])
    run(optimizer, w, 2)
    for options in ({"dtype": F64}, {"device": "meta"}):
        target = nn.Parameter(torch.ones(3, **options))
        other = GravesRMSprop([target])
        other.load_state_dict(optimizer.state_dict())
        for name, a in other.state[target].items():
            assert (a.dtype, a.device) == (target.dtype, target.device), name
        assert len(other.state[target]) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("lr", float("nan")), ("eps", 0.0), ("decay", 1.0), ("momentum", -0.1)],
)
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    refuses(f"{name} .*{value}", GravesRMSprop, [nn.Parameter(torch.zeros(1))], **{name: value})


def test_rate_and_eps_of_the_groups_stay_for_schedules() -> None:
    w = nn.Parameter(start())
    optimizer = LegacyAdam([w], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run(optimizer, w, 1)
    schedule.step()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["eps"], group["params"]) == (0.05, 1e-8, [w])

    def fails() -> float:
        raise RuntimeError("no gradient")

    refuses("no gradient", optimizer.step, fails, error=RuntimeError)
    assert optimizer.param_groups[0] is group


ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
SGD_OF, GRAVES = {"optimizer": "sgd", "lr": 0.02}, {"optimizer": "graves", "lr": 0.5}
LEGACY = {"adam_bias_correction": "legacy"}
TEXT = {"vocabulary": ["a"], "hidden_size": 4, "embedding_features": 3}


@pytest.mark.parametrize(
    ("model", "cls", "settings"),
    [
        (models.MLPClassifier(6, [5], lr=0.02), Adam, {"lr": 0.02, **ADAM}),
        (models.ConvClassifier((1, 4, 4), lr=0.02), Adam, {"lr": 0.02, **ADAM}),
        (models.ConvClassifier((1, 4, 4), **SGD_OF), SGD, {"lr": 0.02, "momentum": 0.9}),
        # Squared gradients decay by 0.9; there is no momentum.
        (models.SequenceClassifier(4), RMSprop, {"alpha": 0.9, "momentum": 0, "lr": 1e-3}),
        (models.DRAW((4, 4), 2, 4, 2), Adam, {"lr": 1e-3, **ADAM}),
        (models.DRAW((4, 4), 2, 4, 2, lr=3e-4), Adam, {"lr": 3e-4}),
        (models.Handwriting(4, **GRAVES), GravesRMSprop, {"lr": 0.5, "decay": 0.95}),
        (models.OrderEmbedding(**TEXT), Adam, {"lr": 1e-3, "fused": True}),
        (models.OrderEmbedding(**TEXT, **LEGACY, lr=0.5), LegacyAdam, {"lr": 0.5}),
        (models.SkipThought(**TEXT, lr=0.5), Adam, {"lr": 0.5}),
        (models.SkipThought(**TEXT, **LEGACY), LegacyAdam, {"fused": True}),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else None,
)
def test_the_optimizer_of_a_model(model: Any, cls: type, settings: dict[str, Any]) -> None:
    optimizer = model.configure_optimizers()
    assert type(optimizer) is cls
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in settings} == settings
