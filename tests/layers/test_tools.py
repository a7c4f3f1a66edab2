"""Layers under `torch.compile`, `torch.export` and `torch.jit.script`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from layer_results import assert_close, flat
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

NORMS = [Identity(), LayerNorm(), RMSNorm(), BatchNorm(max_steps=4), WeightNorm()]
CLASSES = [LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell, Linear, Conv2d]
every_class = pytest.mark.parametrize("cls", CLASSES)


def example(cls: type, norm: Norm) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A small module and what to call it with."""
    torch.manual_seed(0)
    if cls is Conv2d:
        return Conv2d(3, 4, 2, norm=norm), (torch.randn(2, 3, 4, 4),), {}
    if cls is Linear:
        return Linear(3, 4, norm=norm), (torch.randn(5, 3),), {}
    if cls in (LSTM, GRU, RNN):
        layer = cls(3, 4, num_layers=2, bidirectional=True, norm=norm)
        return layer, (torch.randn(3, 5, 3),), {}
    return cls(3, 4, norm=norm), (torch.randn(5, 3),), {"step": 0}


#: Other layers and norms compile with variable sizes.
@pytest.mark.parametrize(
    ("cls", "norm"),
    [
        (LSTM, LayerNorm()),
        (LSTMCell, BatchNorm()),
        pytest.param(Conv2d, LayerNorm(), marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole(cls: type, norm: Norm) -> None:
    module, arguments, options = example(cls, norm)
    if cls in (LSTM, GRU, RNN):
        module = cls(3, 4, norm=norm)
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*arguments, **options), twin(*arguments, **options)
    assert_close(actual, expected, 0, 1e-6)
    for results in (actual, expected):
        flat(results)[0].square().sum().backward()
    grads = ([p.grad for p in of.parameters()] for of in (module, twin))
    assert_close(*grads, 0, 1e-5)
    assert_close(module.buffers(), twin.buffers(), 0, 1e-6)


@pytest.mark.parametrize(
    ("cls", "norm"),
    [
        (LSTM, LayerNorm(eps=0.1)),
        # torch.nn.Conv2d itself does not compile so.
        *(pytest.param(c, n, marks=pytest.mark.slow) for c in CLASSES[:-1] for n in NORMS),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole_with_variable_sizes(cls: type, norm: Norm) -> None:
    """Compiled with sizes and norms as variables, and called with two batch sizes."""
    module, (x, *_), options = example(cls, norm)
    if cls in (LSTM, GRU, RNN):
        module = cls(3, 4, norm=norm)
    sizes: list[int] = []

    def noted(graph: torch.fx.GraphModule, _: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        module, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=noted)
    )
    for given in (x, torch.cat([x, x], dim=-2)):
        expected = copy.deepcopy(module)(given, **options)
        assert_close(compiled(given, **options), expected, 0, 1e-6)
    # A loop of torch's would be unrolled, into 26 nodes for each of three steps.
    assert not isinstance(norm, Identity) or max(sizes) < 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Graph break.*")
@pytest.mark.usefixtures("compiler")
def test_compiles_packed_sequences_in_parts() -> None:
    layer = LSTM(3, 4, bidirectional=True, norm=LayerNorm())
    packed = pack_sequence([torch.randn(n, 3) for n in (3, 1)])
    output, states = torch.compile(layer, backend="eager")(packed)
    expected, expected_states = layer(packed)
    assert_close((output.data, states), (expected.data, expected_states), 0, 1e-6)


@pytest.mark.parametrize(
    ("cls", "norm"),
    [(LSTM, LayerNorm()), pytest.param(Conv2d, BatchNorm(), marks=pytest.mark.slow)],
)
def test_exports_in_evaluation_with_any_batch_size(cls: type, norm: Norm) -> None:
    module, (example_input,), _ = example(cls, norm)
    # In float64, since the exported program runs the generic loop, and sums in another order.
    module, arguments = module.double(), (example_input.double(),)
    module(*arguments)
    module.eval()
    axis = 1 if cls in (LSTM, GRU, RNN) else 0
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, arguments, dynamic_shapes=({axis: batch},))
    assert not any("ln_zoo" in str(node.target) for node in program.graph.nodes)
    for examples in (1, 7):
        shape = list(arguments[0].shape)
        shape[axis] = examples
        x = torch.randn(shape, dtype=torch.float64)
        assert_close(program.module()(x), module(x), 0, 1e-12)


@every_class
@pytest.mark.parametrize("norm", [Identity(), LayerNorm()], ids=["none", "layer"])
def test_scripting_says_what_to_use_instead(cls: type, norm: Norm) -> None:
    model = torch.nn.Sequential(torch.nn.Tanh(), example(cls, norm)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer releases of torch deprecate it
        with pytest.raises(RuntimeError) as caught:
            torch.jit.script(model)
    assert "torch.export.export" in str(caught.value)
    assert "\n" not in str(caught.value)
