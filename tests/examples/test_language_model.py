"""The converted language model, at a size of seconds."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "language_model.py"


def test_language_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("LN_ZOO_DATA", "")
    spec = importlib.util.spec_from_file_location("language_model", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(["--characters", "60000", "--hidden", "16"])
    before = found["plain, after an epoch"]
    # Conversion alone costs some perplexity, which calibration takes back, most of it.
    assert found["converted"] > found["calibrated"]
    assert found["calibrated"] - before < 0.5 * (found["converted"] - before)
    assert found["converted, an epoch later"] < before
    printed = capsys.readouterr().out
    assert "Python's documentation, 60,000 characters" in printed
    assert "ln_zoo.LSTM, LayerNorm()" in printed
