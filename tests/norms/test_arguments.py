"""Wrong arguments of norms, and norms where a layer expects another argument."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refuses

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, LayerNorm, RMSNorm

NOT_FINITE = [float("nan"), float("inf"), "1", None, True, [1.0]]
WRONG: list[tuple[Any, str, list[Any]]] = [
    *(
        (cls, name, NOT_FINITE)
        for cls in (LayerNorm, RMSNorm, BatchNorm)
        for name in ("gain", "eps")
    ),
    *((cls, "eps", [-1e-5]) for cls in (LayerNorm, RMSNorm, BatchNorm)),
    (LayerNorm, "per_gate", ["yes", 1, None]),
    (LayerNorm, "convolution", ["layer", None]),
    *((BatchNorm, name, ["yes", 1, None]) for name in ("unbiased", "sync")),
    (BatchNorm, "recurrent_gain", ["x", True, None]),
    (BatchNorm, "momentum", ["x", True, None, 0, -0.1, 1.5, float("nan")]),
    (BatchNorm, "max_steps", ["x", True, None, 0, -3, 2.5]),
]


@pytest.mark.parametrize(
    ("cls", "name", "values"), WRONG, ids=[f"{cls.__name__}-{name}" for cls, name, _ in WRONG]
)
def test_wrong_values(cls: Any, name: str, values: list[Any]) -> None:
    for value in values:
        assert repr(value) in refuses(f"^{cls.__name__}: {name} must ", cls, **{name: value})


def test_whole_numbers_are_numbers() -> None:
    assert LayerNorm(gain=1, eps=0) == LayerNorm(gain=1.0, eps=0.0)


@pytest.mark.parametrize("cls", [Linear, LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell])
def test_a_norm_in_the_place_of_another_argument(cls: Any) -> None:
    refuses(rf"{cls.__name__}: .*norm=LayerNorm", cls, 3, 4, LayerNorm(), error=TypeError)
    refuses(r"Conv2d: stride .*norm=LayerNorm", Conv2d, 3, 4, 2, LayerNorm(), error=TypeError)
