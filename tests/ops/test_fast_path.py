"""Which loop runs: the choice, its reasons, the switch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from ln_zoo import ops
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import CELLS, KERNELS, RowNorm, fast_path
from ln_zoo.ops.torch_rnn import TorchRNN

PLAIN = RowNorm((8,))


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The names of what was picked, call by call."""
    names: list[str | None] = []
    pick = ops.pick

    def noted(*arguments: Any) -> Any:
        kernel = pick(*arguments)
        names.append(None if kernel is None else kernel.name)
        return kernel

    monkeypatch.setattr(ops, "pick", noted)
    return names


FUSED = TorchRNN.name


@pytest.mark.parametrize(
    ("norm", "normalize", "wanted"),
    [
        (Identity(), None, FUSED),
        (WeightNorm(), None, FUSED),
        (LayerNorm(), (), FUSED),
        (LayerNorm(), None, None),
        (RMSNorm(), None, None),
        (BatchNorm(), None, None),
    ],
)
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_layers_that_normalise_no_sums_run_on_torchs_loop(
    cls: type, norm: Norm, normalize: Any, wanted: str | None, chosen: list[str | None]
) -> None:
    cls(3, 4, norm=norm, normalize=normalize)(torch.randn(5, 2, 3))
    assert chosen == [wanted]


def test_places_that_hold_weights_only_do_not_stop_it(chosen: list[str | None]) -> None:
    RNN(3, 4, norm=LayerNorm(), normalize=("input", "recurrent"))(torch.randn(5, 2, 3))
    assert chosen == [FUSED]


def test_the_switch_is_read_at_each_call(
    chosen: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    for value, wanted in (("0", None), ("1", FUSED), ("0", None)):
        monkeypatch.setenv("LN_ZOO_KERNELS", value)
        layer(x)
        assert chosen[-1] == wanted
    monkeypatch.delenv("LN_ZOO_KERNELS")
    layer(x)
    assert chosen[-1] == FUSED


def test_a_refusal_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fast_path._log_once.cache_clear()
    layer = GRU(3, 4, norm=LayerNorm())
    with caplog.at_level(logging.INFO, logger="ln_zoo"):
        for _ in range(3):
            layer(torch.randn(5, 2, 3))
    assert caplog.messages == [
        f"GRU: not run by {FUSED}: the input site normalises its summed inputs"
    ]


def test_what_only_the_strategy_knows_is_refused() -> None:
    kernel = TorchRNN()
    x = torch.randn(5, 2, 3)
    assert kernel.refuses(CELLS["GRU"], [{"input": PLAIN, "recurrent": PLAIN}], x) is None
    reason = kernel.refuses(CELLS["GRU"], [{"input": PLAIN, "recurrent": None}], x)
    assert reason == "the recurrent site normalises its summed inputs"


def test_float16_autocast_is_refused_for_the_lstm_alone() -> None:
    x = torch.randn(5, 2, 3)
    places = {"input": PLAIN, "recurrent": PLAIN, "cell": PLAIN}
    with torch.autocast("cpu", torch.float16):
        assert "float16 autocast" in str(TorchRNN().refuses(CELLS["LSTM"], [places], x))
        assert TorchRNN().refuses(CELLS["GRU"], [places], x) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert TorchRNN().refuses(CELLS["LSTM"], [places], x) is None


def test_a_kernel_is_one_entry_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees records with gains, never strategies, and may refuse."""

    class Constant:
        name = "constant"

        def refuses(self, cell: Any, records: Any, x: Any) -> str | None:
            return None if records[0]["sum"].center else "it centres"

        def __call__(
            self, cell: Any, records: Any, x: Any, batch_sizes: Any, states: Any, weights: Any,
            **options: Any,
        ) -> Any:  # fmt: skip
            assert options == {"bidirectional": False, "dropout": 0.0, "training": True}
            return records[0]["sum"].gain.expand(*x.shape[:2], 4), states

    monkeypatch.setattr(fast_path, "KERNELS", [Constant(), *KERNELS])
    x = torch.randn(5, 2, 3)
    output, _ = RNN(3, 4, norm=LayerNorm(gain=3.0))(x)
    assert (output == 3).all()
    output, _ = RNN(3, 4, norm=RMSNorm(gain=3.0))(x)
    assert not (output == 3).any()


def test_an_error_in_a_kernel_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(TorchRNN):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            raise ZeroDivisionError

    monkeypatch.setattr(fast_path, "KERNELS", [Broken()])
    with pytest.raises(ZeroDivisionError):
        LSTM(3, 4)(torch.randn(5, 2, 3))
