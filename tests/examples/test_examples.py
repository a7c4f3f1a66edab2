"""The examples do what they say, in seconds."""

from __future__ import annotations

import importlib
import importlib.util
import math
from types import ModuleType

import pytest
import torch
from torch import nn

from ln_zoo import LSTM, LayerNorm, RMSNorm
from ln_zoo.models import MLPClassifier


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        # Outputs lie in -1 to 1; a step's products are the same, in another order.
        ("packed_sequences", {"accuracy": (0.95, 1), "difference": (0, 1e-5)}),
        ("stream_steps", {"error": (0, 0.1), "difference": (0, 1e-5)}),
        (
            "truncated_backpropagation",
            {"updates": (200, 200), "accuracy": (0.9, 1), "difference": (0, 1e-4)},
        ),
        # A guess has a success of 0.5.
        (
            "reinforcement_learning",
            {"success": (0.9, 1), "difference": (0, 1e-4), "leaking": (1e-2, math.inf)},
        ),
    ],
)
def test_results(name: str, bounds: dict[str, tuple[float, float]]) -> None:
    found = example(name).main()
    for key, (low, high) in bounds.items():
        assert low <= found[key] <= high, key


def test_train_with_fabric() -> None:
    found = example("train_with_fabric").main(["--precision", "bf16-mixed", "--epochs", "2"])
    assert found["error"] < 0.15
    assert found["examples"] == 300
    with pytest.raises(SystemExit):
        example("train_with_fabric").main(["--precison", "bf16-mixed"])


def test_own_norm() -> None:
    PNorm = example("own_norm").PNorm
    assert example("own_norm").main()["error"] < 0.1
    torch.manual_seed(0)
    ours, expected = (MLPClassifier(64, [9], norm=norm) for norm in (PNorm(p=2.0), RMSNorm()))
    ours.load_state_dict(expected.state_dict())
    inputs = torch.randn(5, 64)
    torch.testing.assert_close(ours(inputs), expected(inputs))
    with pytest.raises(ValueError, match="p must be at least 1, got 0"):
        PNorm(p=0.5)


def test_fine_tuning() -> None:
    found = example("fine_tuning").main()
    assert found["same"]
    assert found["tuned"] < found["scratch"]


def test_language_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LN_ZOO_DATA", "")
    found = example("language_model").main(["--characters", "60000", "--hidden", "16"])
    before = found["plain, after an epoch"]
    # Conversion alone costs some perplexity, which calibration takes back, most of it.
    assert found["converted"] > found["calibrated"]
    assert found["calibrated"] - before < 0.5 * (found["converted"] - before)
    assert found["converted, an epoch later"] < before
    printed = capsys.readouterr().out
    assert "Python's documentation, 60,000 characters" in printed
    assert "ln_zoo.LSTM, LayerNorm()" in printed


needs_sb3 = pytest.mark.skipif(
    importlib.util.find_spec("sb3_contrib") is None, reason="needs the package sb3-contrib"
)


@needs_sb3
@pytest.mark.slow
def test_cartpole_runs() -> None:
    found = example("cartpole_without_velocities")
    model = found.train(1024)
    assert type(model.policy.lstm_actor) is LSTM
    assert model.policy.lstm_actor.sites["l0"]["cell"].norm == LayerNorm()
    assert model.observation_space.shape == (2,)
    mean, _ = found.score(model, 4)
    assert 8 <= mean <= 500
    assert type(found.train(8, plain=True).policy.lstm_actor) is nn.LSTM


@needs_sb3
@pytest.mark.slow
def test_cartpole_is_balanced() -> None:
    """Three seeds give 355 to 500; without memory the pole falls within some 50 steps."""
    assert example("cartpole_without_velocities").main(["--seed", "0"])["return"] >= 300
