"""Layers under `torch.compile`, `torch.export` and `torch.jit.script`."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from layer_results import CELLS, LAYERS, assert_close, flat
from refusals import refuses
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.layers import LSTM, Conv2d, Linear, LSTMCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm

NORMS = [Identity(), LayerNorm(), RMSNorm(), BatchNorm(max_steps=4), WeightNorm()]
CLASSES = [*LAYERS, *CELLS, Linear, Conv2d]


def example(cls: type, norm: Norm, **own: Any) -> tuple[Any, Tensor, dict[str, Any]]:
    """A small module, an input and the options of its call."""
    torch.manual_seed(0)
    sizes = (3, 4, 2) if cls is Conv2d else (3, 4)
    shape = (2, 3, 4, 4) if cls is Conv2d else (3, 5, 3) if cls in LAYERS else (5, 3)
    return cls(*sizes, norm=norm, **own), torch.randn(shape), {"step": 0} if cls in CELLS else {}


#: Other layers and norms compile with variable sizes.
@pytest.mark.parametrize(
    ("cls", "norm", "own"),
    [
        (LSTM, LayerNorm(), {}),
        (LSTM, LayerNorm(), {"peephole": True, "derivative_bound": 0.1}),
        (LSTMCell, BatchNorm(), {}),
        pytest.param(Conv2d, LayerNorm(), {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole(cls: type, norm: Norm, own: dict[str, Any]) -> None:
    module, x, options = example(cls, norm, **own)
    twin = copy.deepcopy(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(x, **options), twin(x, **options)
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
    module, x, options = example(cls, norm)
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
    ("cls", "norm", "own", "axis"),
    [
        (LSTM, LayerNorm(), {"num_layers": 2, "bidirectional": True}, 1),
        pytest.param(Conv2d, BatchNorm(), {}, 0, marks=pytest.mark.slow),
    ],
)
def test_exports_in_evaluation_with_any_batch_size(
    cls: type, norm: Norm, own: dict[str, Any], axis: int
) -> None:
    module, x, _ = example(cls, norm, **own)
    # In float64, since the exported program runs the generic loop, and sums in another order.
    module, arguments = module.double(), (x.double(),)
    module(*arguments)
    module.eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(module, arguments, dynamic_shapes=({axis: batch},))
    assert not any("ln_zoo" in str(node.target) for node in program.graph.nodes)
    for examples in (1, 7):
        shape = list(arguments[0].shape)
        shape[axis] = examples
        x = torch.randn(shape, dtype=torch.float64)
        assert_close(program.module()(x), module(x), 0, 1e-12)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("norm", [Identity(), LayerNorm()], ids=["none", "layer"])
def test_scripting_says_what_to_use_instead(cls: type, norm: Norm) -> None:
    model = torch.nn.Sequential(torch.nn.Tanh(), example(cls, norm)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer releases of torch deprecate it
        message = refuses(r"torch\.export\.export", torch.jit.script, model, error=RuntimeError)
    assert "\n" not in message
