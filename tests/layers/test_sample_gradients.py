"""Gradients of each example, and double backward, by every layer and norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from ln_zoo.conversion import from_dialect
from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm

F64 = torch.float64
NORMS = [None, WeightNorm(), LayerNorm(), RMSNorm(), BatchNorm(max_steps=4)]
LAYERS = [LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell, Linear, Conv2d]
#: Each layer with two norms, and each norm with three layers at least.
some_pairs = pytest.mark.parametrize(
    ("cls", "norm"), [(cls, NORMS[(i + k) % 5]) for i, cls in enumerate(LAYERS) for k in (1, 3)]
)


def build(cls: Any, norm: Norm | None) -> tuple[nn.Module, Tensor, dict[str, int]]:
    """A layer in evaluation mode, inputs of four examples, and further arguments."""
    torch.manual_seed(3)
    if cls is Conv2d:
        layer: nn.Module = Conv2d(1, 2, 2, norm=norm, dtype=F64)
        shape: tuple[int, ...] = (4, 1, 3, 3)
    else:
        layer = cls(2, 3, norm=norm, dtype=F64)
        shape = (4, 3, 2) if cls in (LSTM, GRU, RNN) else (4, 2)
    for name, buffer in layer.named_buffers():
        _ = buffer.fill_(1) if name.endswith("tracked") else buffer.uniform_(0.5, 1.5)
    more = {"step": 1} if cls in (LSTMCell, GRUCell, RNNCell) else {}
    return layer.eval(), torch.randn(shape, dtype=F64), more


def first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


@some_pairs
def test_gradients_of_each_example(cls: Any, norm: Norm | None) -> None:
    layer, x, more = build(cls, norm)
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    parameters = {name: value for name, value in state.items() if value.requires_grad}
    buffers = {name: value for name, value in state.items() if name not in parameters}

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return first(functional_call(layer, {**parameters, **buffers}, (x,), more)).sin().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    rows = vmap(jacrev(loss), in_dims=(None, 0))(parameters, x)
    for i, example in enumerate(x):
        alone = first(layer(example, **more)).sin().sum()
        expected = torch.autograd.grad(alone, list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(rows[name][i], gradient, rtol=1e-9, atol=1e-11)


@some_pairs
def test_double_backward(cls: Any, norm: Norm | None) -> None:
    """By finite differences; batch norm in training too, where its statistics are functions."""
    layer, x, more = build(cls, norm)
    x = x.transpose(0, 1) if cls in (LSTM, GRU, RNN) else x
    leaves = [x.contiguous().requires_grad_(), *layer.parameters()]

    def function(x: Tensor, *_: Tensor) -> Tensor:
        return first(layer(x, **more))

    assert torch.autograd.gradgradcheck(function, tuple(leaves), fast_mode=True)
    if isinstance(norm, BatchNorm):
        layer.train()
        assert torch.autograd.gradgradcheck(function, tuple(leaves), fast_mode=True)


def test_cells_of_other_libraries() -> None:
    """Layers that `from_dialect` makes on cells of their own."""
    state = {
        "linear.weight": torch.randn(9, 5, dtype=F64),
        "layer_norm.weight": torch.rand(9, dtype=F64),
        "layer_norm.bias": torch.randn(9, dtype=F64),
    }
    layer = from_dialect("sheeprl", state)
    x = torch.randn(4, 3, 2, dtype=F64)
    parameters = dict(layer.named_parameters())

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x,))[0].square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, example in enumerate(x):
        expected = torch.autograd.grad(loss(parameters, example), list(parameters.values()))
        for name, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][i], gradient)
