"""The examples do what they say, in seconds."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from ln_zoo import RMSNorm
from ln_zoo.models import MLPClassifier


def example(name: str) -> ModuleType:
    """One of the scripts, which tests may import by name."""
    return importlib.import_module(name)


def test_packed_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("packed_sequences").main()
    assert found["accuracy"] > 0.95
    # Outputs lie in -1 to 1; a step's products are the same, in another order.
    assert found["difference"] < 1e-5
    assert "outputs in a batch and alone differ by at most" in capsys.readouterr().out


def test_stream_steps() -> None:
    found = example("stream_steps").main()
    assert found["error"] < 0.1
    assert found["difference"] < 1e-5


def test_train_with_fabric() -> None:
    found = example("train_with_fabric").main(["--precision", "bf16-mixed", "--epochs", "2"])
    assert found["error"] < 0.15
    assert found["examples"] == 300
    with pytest.raises(SystemExit):
        example("train_with_fabric").main(["--precison", "bf16-mixed"])


def test_truncated_backpropagation() -> None:
    found = example("truncated_backpropagation").main()
    assert found["updates"] == 200
    assert found["accuracy"] > 0.9
    assert found["difference"] < 1e-4


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


def test_reinforcement_learning() -> None:
    found = example("reinforcement_learning").main()
    assert found["success"] > 0.9  # a guess has 0.5
    assert found["difference"] < 1e-4
    assert found["leaking"] > 1e-2
