"""Layers that keep states every few steps only, against those that keep everything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_results import (
    LAYERS,
    NORMS,
    assert_close,
    bytes_kept,
    gradients,
    made,
    results_by_pieces,
    results_of,
)
from refusals import refuses
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from ln_zoo.conversion import normalize_
from ln_zoo.layers import LSTM
from ln_zoo.norms import BatchNorm, LayerNorm
from ln_zoo.ops.recompute import _Take

T, N, E = 11, 4, 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"zoneout": 0.2, "recurrent_dropout": 0.3, "weight_dropout": 0.4, "bidirectional": True},
    {"batch_first": True, "num_layers": 2, "dropout": 0.5, "zoneout": 0.3},
]
every_layer = pytest.mark.parametrize("cls", LAYERS)


def pair(cls: type, norm: str = "layer", steps: int = 3, **options: Any) -> tuple[Any, Any]:
    """A layer that keeps everything, and one that recomputes."""
    whole = made(cls, NORMS[norm], **options)
    again = made(cls, NORMS[norm], recompute=steps, **options)
    again.load_state_dict(whole.state_dict())
    return whole, again


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("norm", ["none", "layer", "rms", "weight"])
@every_layer
def test_results_and_gradients_are_the_same(
    cls: type, norm: str, options: dict[str, Any], packed: bool, loop: str
) -> None:
    x: Any = torch.randn(T, N, E, dtype=torch.float64)
    if packed:
        # A piece of three steps ends where examples do, and within those of one example.
        x = pack_padded_sequence(x, [11, 9, 9, 2])
    elif options.get("batch_first"):
        x = x.transpose(0, 1)
    found, expected = (results_of(layer, x) for layer in pair(cls, norm, **options))
    assert found.keys() == expected.keys()
    for name, a in expected.items():
        assert_close(found[name], a)


@pytest.mark.parametrize("steps", [1, 2, 10, 11, 12])
def test_pieces_of_any_length(steps: int) -> None:
    x = torch.randn(T, N, E, dtype=torch.float64)
    one, two = (results_of(layer, x) for layer in pair(LSTM, steps=steps))
    assert_close(list(one.values()), list(two.values()))


@every_layer
def test_resets_and_given_states(cls: type) -> None:
    x = torch.randn(T, N, E, dtype=torch.float64)
    reset = torch.rand(T, N) < 0.3
    states = [torch.randn(2, N, 5, dtype=torch.float64)] * (2 if cls is LSTM else 1)
    one, two = (
        results_of(layer, x, states, call=lambda x, hx, layer=layer: layer(x, hx, reset=reset))
        for layer in pair(cls, bidirectional=True)
    )
    assert_close(list(one.values()), list(two.values()))


def test_gradients_of_gradients() -> None:
    found = []
    for layer in pair(LSTM):
        x = torch.linspace(-1, 1, T * N * E, dtype=torch.float64).view(T, N, E).requires_grad_()
        (first,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        found.append(gradients(first, [x, *layer.parameters()]))
    assert_close(*found)


def test_a_second_backward_pass_leaves_the_first_gradients() -> None:
    _, layer = pair(LSTM)
    x = torch.randn(T, N, E, dtype=torch.float64, requires_grad=True)
    output, upstream = layer(x)[0], torch.randn(T, N, 5, dtype=torch.float64)
    (first,) = torch.autograd.grad(output, x, upstream, retain_graph=True)
    before = first.clone()
    (second,) = torch.autograd.grad(output, x, 2 * upstream)
    assert_close([first, second], [before, 2 * before])


def test_the_gradient_of_the_input_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer = pair(LSTM)
    x = torch.randn(T, N, E, dtype=torch.float64, requires_grad=True)
    backward, passed = _Take.backward, []

    def noted(ctx: Any, *gradients: Tensor) -> Any:
        found = backward(ctx, *gradients)
        passed.append(found[0].data_ptr())
        return found

    monkeypatch.setattr(_Take, "backward", staticmethod(noted))
    (gradient,) = torch.autograd.grad(layer(x)[0].sum(), x)
    assert (len(passed), set(passed)) == (4, {gradient.data_ptr()})


@every_layer
def test_bits_are_those_of_pieces_that_are_kept(cls: type) -> None:
    torch.manual_seed(0)
    again = cls(E, 20, norm=LayerNorm(), recompute=4)
    kept = cls(E, 20, norm=LayerNorm())
    kept.load_state_dict(again.state_dict())
    x = torch.randn(T, N, E)
    found = results_by_pieces(again, x, T), results_by_pieces(kept, x, 4)
    assert all(map(torch.equal, *found))


def test_a_compiled_layer() -> None:
    _, layer = pair(LSTM)
    x = torch.randn(T, N, E, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = (results_of(each, x) for each in (compiled, layer))
    assert_close(list(found.values()), list(expected.values()))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_little_is_kept(bidirectional: bool) -> None:
    layers = [
        LSTM(E, 32, norm=LayerNorm(), recompute=k, bidirectional=bidirectional) for k in (0, 16)
    ]
    everything, little = (bytes_kept(layer, torch.randn(256, N, E)) for layer in layers)
    assert little < everything / 8


def test_inference_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, again = pair(LSTM)
    monkeypatch.setattr("ln_zoo.ops.recompute.checkpoint", None)
    x = torch.randn(T, N, E, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(again(x)[0], whole(x)[0])


def test_the_option_is_shown_and_copied() -> None:
    layer = LSTM(3, 5, recompute=7)
    assert "recompute=7" in repr(layer)
    assert copy.deepcopy(layer).recompute == 7
    model = torch.nn.Sequential(layer)
    normalize_(model, LayerNorm())
    assert model[0].recompute == 7


def test_refusals() -> None:
    for wrong in (-1, 2.5, True, None):
        refuses(["recompute", wrong], LSTM, 3, 5, recompute=wrong)
    refuses(["recompute", "BatchNorm"], LSTM, 3, 5, recompute=2, norm=BatchNorm())
