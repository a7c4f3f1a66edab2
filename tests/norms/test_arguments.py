"""Invalid fields of norms, and norms passed as other arguments of layers."""

from __future__ import annotations

from typing import Any

import pytest

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, LayerNorm, RMSNorm


@pytest.mark.parametrize("cls", [LayerNorm, RMSNorm, BatchNorm])
@pytest.mark.parametrize("name", ["gain", "eps"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True, [1.0]], ids=repr)
def test_numbers(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__}: {name} must be a finite number.* got "):
        cls(**{name: value})


@pytest.mark.parametrize(
    ("cls", "name"),
    [(LayerNorm, "per_gate"), (BatchNorm, "unbiased"), (BatchNorm, "sync")],
)
@pytest.mark.parametrize("value", ["yes", 1, None])
def test_switches(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{cls.__name__}: {name} must be True or False, got "):
        cls(**{name: value})


@pytest.mark.parametrize("name", ["recurrent_gain", "momentum", "max_steps"])
@pytest.mark.parametrize("value", ["x", True, None])
def test_numbers_of_batch_norm(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"BatchNorm: {name} must .* got "):
        BatchNorm(**{name: value})


def test_whole_numbers_are_numbers() -> None:
    assert LayerNorm(gain=1, eps=0) == LayerNorm(gain=1.0, eps=0.0)


@pytest.mark.parametrize("cls", [Linear, LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell])
def test_a_norm_in_the_place_of_another_argument(cls: Any) -> None:
    with pytest.raises(TypeError, match=f"{cls.__name__}: .*by keyword: norm=LayerNorm"):
        cls(3, 4, LayerNorm())
    with pytest.raises(TypeError, match=r"Conv2d: stride .*norm=LayerNorm"):
        Conv2d(3, 4, 2, LayerNorm())
