"""Subnormal numbers count as zero in the C++ kernels, and nowhere else."""

from __future__ import annotations

import platform

import pytest
import torch
from accuracy import generic_loop
from engines import needs_native
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ln_zoo.kernels.native import layers as native_layers
from ln_zoo.kernels.native.steps import NativeSteps
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm

pytestmark = [
    needs_native,
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "AMD64", "aarch64", "arm64"),
        reason=f"no mode for subnormal numbers is known for {platform.machine()}",
    ),
]

#: Subnormal: the least normal number of float32 is 1.2e-38.
TINY = 1e-39
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    torch.set_num_threads(request.param)


def inputs(kind: str = "padded") -> Tensor | PackedSequence:
    """16 examples of 20 steps, or so few rows that other code runs them."""
    torch.manual_seed(0)
    x = torch.randn(20, 16, 5)
    if kind == "packed":
        return pack_sequence([x[: 20 - n, n] for n in range(16)])
    return x[:1, :2] if kind == "few" else x


NORMS: list[Norm] = [LayerNorm(), BatchNorm(max_steps=20), Identity()]


@pytest.mark.parametrize(
    ("name", "norm", "kind", "shares"),
    [
        (name, norm, ("padded", "packed", "few")[(i + j) % 3], shares)
        for i, name in enumerate(LAYERS)
        for j, norm in enumerate(NORMS)
        for shares in (1, 3)
    ],
    ids=str,
)
def test_gradients_that_vanish_are_zero(
    name: str, norm: Norm, kind: str, shares: int, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_layers, "shares_of_units", lambda *layout: shares)
    monkeypatch.setattr(NativeSteps, "_shares", lambda steps, examples, masks: shares)
    layer = LAYERS[name](5, 12, norm=norm)
    output, _ = layer(inputs(kind))
    values = output.data if kind == "packed" else output
    values.backward(torch.full_like(values, TINY))
    largest = {key: float(weight.grad.abs().max()) for key, weight in layer.named_parameters()}
    assert largest == dict.fromkeys(largest, 0.0)


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_that_small_are_zero(name: str, threads: None) -> None:
    layer = LAYERS[name](5, 12, norm=Identity())
    with torch.no_grad():
        layer.weight_ih_l0.mul_(1e38)  # so that they count where they are not zero
    zeros = torch.zeros(20, 16, 5)
    assert torch.equal(layer(zeros + TINY)[0], layer(zeros)[0])
    with generic_loop():
        assert not torch.equal(layer(zeros + TINY)[0], layer(zeros)[0])


def test_torch_keeps_its_own_mode(threads: None) -> None:
    """In this thread and in those that it shares with torch."""
    values = torch.full((1 << 18,), TINY)
    LSTM(5, 12)(inputs())[0].sum().backward()
    assert (values * 0.5 > 0).all()
    assert torch.set_flush_denormal(True)
    try:
        LSTM(5, 12)(inputs())[0].sum().backward()
        assert float(torch.tensor(TINY) * 0.5) == 0.0
    finally:
        torch.set_flush_denormal(False)
