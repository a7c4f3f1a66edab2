"""Layers that keep states every few steps, on one kernel for the whole call."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from kernels.generated.generated_case import assert_exact, packed
from layer_results import bytes_kept, gradients, randomised, results_by_pieces
from own_cell import MGU

from ln_zoo.kernels.generated import operator
from ln_zoo.layers import LSTM, SLSTM
from ln_zoo.norms import LayerNorm

T, N, E, H = 5, 4, 3, 6


@pytest.fixture(autouse=True)
def one_call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel itself runs pieces."""
    torch.manual_seed(0)
    spy = mock.Mock(wraps=operator.in_pieces)
    monkeypatch.setattr(operator, "in_pieces", spy)
    yield
    assert spy.called


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("steps", [1, 2, 4, 5, 9])
def test_pieces_of_any_length(steps: int, layout: str) -> None:
    layer = randomised(MGU(E, H, norm=LayerNorm(), recompute=steps))
    x = torch.randn(T, N, E)
    # Pieces end where examples do, and within those of one example.
    given = packed(x, [5, 2, 4, 4]) if layout == "packed" else x
    assert_exact(layer, given, [torch.randn(1, N, H)])


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("cls", [LSTM, SLSTM])
def test_layers_directions_noise_and_resets(cls: Any, layout: str) -> None:
    noise: dict[str, Any] = {"zoneout": 0.3, "recurrent_dropout": 0.3, "weight_dropout": 0.2}
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "recompute": 2}
    layer = randomised(cls(E, H, norm=LayerNorm(), **options, **(noise if cls is LSTM else {})))
    x, reset = torch.randn(T, N, E), torch.rand(T, N) < 0.3
    lengths = [5, 3, 3, 1]
    both = (packed(x, lengths), packed(reset, lengths)) if layout == "packed" else (x, reset)
    assert_exact(layer, both[0], None, both[1])


@pytest.mark.parametrize("cls", [MGU, LSTM, SLSTM])
def test_bits_are_those_of_pieces_that_are_kept(cls: Any) -> None:
    again = randomised(cls(E, H, norm=LayerNorm(), recompute=2))
    kept = cls(E, H, norm=LayerNorm())
    kept.load_state_dict(again.state_dict())
    x = torch.randn(T, N, E)
    found = results_by_pieces(again, x, T), results_by_pieces(kept, x, 2)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("needs", ["input", "states", "parameters"])
def test_gradients_of_some_alone(needs: str) -> None:
    found = []
    for steps in (0, 2):
        torch.manual_seed(1)
        layer = randomised(MGU(E, H, norm=LayerNorm(), recompute=steps))
        layer.requires_grad_(needs == "parameters")
        x = torch.randn(T, N, E, requires_grad=needs == "input")
        h = torch.randn(1, N, H, requires_grad=needs == "states")
        sources = {"input": [x], "states": [h], "parameters": [*layer.parameters()]}[needs]
        output, _ = layer(x, h)
        found.append(torch.autograd.grad(output[-1].sin().sum(), sources))
    torch.testing.assert_close(*found)


def test_gradients_of_gradients() -> None:
    found = []
    for steps in (0, 2):
        torch.manual_seed(1)
        layer = randomised(MGU(E, H, norm=LayerNorm(), recompute=steps))
        x = torch.randn(T, N, E, requires_grad=True)
        (first,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        found.append(gradients(first, [x, *layer.parameters()]))
    torch.testing.assert_close(*found)


def test_a_second_backward_pass() -> None:
    layer = randomised(MGU(E, H, norm=LayerNorm(), recompute=2))
    x = torch.randn(T, N, E, requires_grad=True)
    output, _ = layer(x)
    (first,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    before = first.clone()
    (second,) = torch.autograd.grad(2 * output.sum(), x)
    torch.testing.assert_close([first, second], [before, 2 * before])


@pytest.mark.parametrize("cls", [MGU, LSTM, SLSTM])
def test_little_is_kept(cls: Any) -> None:
    layers = [cls(E, 32, norm=LayerNorm(), recompute=k) for k in (0, 16)]
    everything, little = (bytes_kept(layer, torch.randn(256, N, E)) for layer in layers)
    assert little < everything / 8
