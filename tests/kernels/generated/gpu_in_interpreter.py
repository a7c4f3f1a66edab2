"""Generated Triton kernels on the CPU, in triton's interpreter: run by `test_triton.py`.

Memory is NaN before it is written to, and lies between guards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import names_of
from kernels.engine_case import Marked
from kernels.generated.generated_case import PLACES, assert_exact, gated_cell, packed
from kernels.triton.gpu_in_interpreter import patched_once  # noqa: F401
from layer_results import randomised
from own_cell import MGU, JointGRU
from own_norm import PNorm
from torch.nn import functional as F

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.generated import check, emit_triton, engine, triton_passes
from ln_zoo.kernels.generated.engine import GeneratedLayers, GeneratedTriton
from ln_zoo.kernels.triton import steps
from ln_zoo.layers import LSTM, SLSTM, DreamerV3GRU, RecurrentLayer
from ln_zoo.norms import LayerNorm, RMSNorm
from ln_zoo.ops import Cell, linear

assert os.environ.get("TRITON_INTERPRET") == "1", "is run by test_triton.py"

T, N, E, H = 3, 2, 3, 5


def slow(*values: Any) -> list[Any]:
    found = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.slow) for value in found]


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch, chosen: list[Any]) -> Iterator[None]:
    """Calls on the CPU run on generated Triton kernels, and on no others."""
    memory = Marked()
    monkeypatch.setenv("LN_ZOO_KERNELS", "generated")
    monkeypatch.setattr(engine, "LEAST_STEPS", 1)
    monkeypatch.setattr(check, "_EXAMPLES", 1)
    monkeypatch.setattr(GeneratedLayers, "device", "meta")
    monkeypatch.setattr(GeneratedTriton, "device", "cpu")
    monkeypatch.setattr(GeneratedTriton, "missing", lambda self: None)
    monkeypatch.setattr(steps, "empty", memory.empty)
    torch.manual_seed(0)
    yield
    memory.check()
    assert "generated" in names_of(chosen)
    assert memory.made


CELLS: dict[str, Any] = {
    "peepholes": lambda **o: LSTM(E, H, norm=LayerNorm(), peephole=True, derivative_bound=0.3, **o),
    "MGU": lambda **o: MGU(E, H, norm=RMSNorm(), **o),
    "two products of one state": lambda **o: JointGRU(E, H, norm=LayerNorm(eps=1e-3), **o),
    "sLSTM": lambda **o: SLSTM(E, H, norm=LayerNorm(), **o),
    "own norm": lambda **o: LSTM(E, H, norm=PNorm(), **o),
    "projection": lambda **o: LSTM(E, 7, proj_size=4, norm=LayerNorm(), **o),
    "no input weight": lambda **o: SLSTM(0, H, **o),
    "blocks": lambda **o: SLSTM(E, 6, blocks=2, norm=LayerNorm(), **o),
    "norm by block": lambda **o: LSTM(E, 6, blocks=3, norm=LayerNorm(per_block=True), **o),
    "weights of its own": lambda **o: DreamerV3GRU(E, 6, blocks=2, projection_size=5, **o),
    "no bias": lambda **o: MGU(E, H, bias=False, norm=LayerNorm(per_gate=True), **o),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells(name: str) -> None:
    layer = randomised(CELLS[name]())
    assert_exact(layer, torch.randn(T, N, layer.input_size or 4 * H))


@pytest.mark.parametrize("name", ["peepholes", *slow(*[*CELLS][1:])])
def test_rows_of_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_triton, "TILE", 2)
    assert_exact(randomised(CELLS[name]()), torch.randn(T, N, E))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("peepholes", 1), *slow(("two products of one state", 2), ("sLSTM", 2), ("projection", 2))],
)
def test_packed_layers_and_directions(name: str, layers: int) -> None:
    layer = randomised(CELLS[name](num_layers=layers, bidirectional=True))
    assert_exact(layer, packed(torch.randn(3, 3, E), [2, 3, 1]))


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "noise", [{"zoneout": 0.4}, {"recurrent_dropout": 0.4}], ids=lambda noise: next(iter(noise))
)
def test_noise_and_resets(noise: dict[str, float], layout: str) -> None:
    layer = randomised(CELLS["peepholes"](**noise))
    x, reset = torch.randn(T, N, E), torch.rand(T, N) < 0.4
    if layout == "packed":
        assert_exact(layer, packed(x, [2, 3]), None, packed(reset, [2, 3]))
    else:
        assert_exact(layer, x, None, reset)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_pieces(layout: str) -> None:
    layer = randomised(CELLS["MGU"](recompute=1, num_layers=2))
    x = torch.randn(T, N, E)
    assert_exact(layer, packed(x, [2, 3]) if layout == "packed" else x)


def test_a_state_is_replaced_after_the_last_product_that_reads_it() -> None:
    def step(wx: Any, states: Any, w: Any, sites: Any, t: Any) -> Any:
        _, c = states
        (x, y), (first, second) = wx.chunk(2, -1), w.hh.chunk(2, 0)
        new = (c + x).tanh()
        return (linear(new, first) + linear(c, second) + y).tanh(), new

    cell = Cell("early", step, PLACES, states=("h", "c"))
    layer = randomised(RecurrentLayer(E, H, cell=cell, norm=LayerNorm()))
    assert_exact(layer, torch.randn(T, N, E))


def test_expected_zoneout_without_gradients() -> None:
    layer = randomised(CELLS["MGU"](zoneout=0.4)).eval()
    assert_exact(layer, torch.randn(T, N, E))


@pytest.mark.parametrize("name", ["peepholes", *slow("two products of one state", "projection")])
@pytest.mark.parametrize("layout", ["padded", *slow("packed")])
def test_graphs(name: str, layout: str, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two and one steps, which begin at even and odd ones, for changing memory."""
    monkeypatch.setattr(triton_passes, "may_replay", lambda a: True)
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    layer = randomised(CELLS[name]())
    for _ in range(3):
        x = torch.randn(5, N, E)
        assert_exact(layer, packed(x, [5, 2]) if layout == "packed" else x)
    assert 0 < recorded.recordings < recorded.replays


FUNCTIONS = {
    "softplus": F.softplus, "softmax": lambda a: a.softmax(-1), "gelu": F.gelu, "silu": F.silu,
    "relu": F.relu, "sign": torch.sign,
    "exp": lambda a: a.exp() / 10, "log": lambda a: (a.abs() + 0.1).log(), "expm1": torch.expm1,
    "log1p": lambda a: a.abs().log1p(), "sqrt": lambda a: (a * a + 1).sqrt(), "sin": torch.sin,
    "rsqrt": lambda a: (a * a + 1).rsqrt(),
    "maximum": lambda a: torch.maximum(a, -a / 2), "cumsum": lambda a: a.cumsum(-1) / 5,
    "amax": lambda a: a - a.amax(-1, keepdim=True), "floor": lambda a: a * a.floor(),
    "trunc": lambda a: a * a.trunc(), "ceil": lambda a: a * a.ceil(), "exp2": torch.exp2,
    "log2": lambda a: (a.abs() + 0.1).log2(), "cos": torch.cos, "abs": torch.abs,
    "where": lambda a: torch.where((a > 0.3) | ~(a > -0.3), a, a * a),
    "minimum": lambda a: torch.minimum(a, a * a), "reciprocal": lambda a: (a * a + 1).reciprocal(),
}  # fmt: skip


@pytest.mark.parametrize("name", ["softplus", "softmax", *slow(*[*FUNCTIONS][2:])])
def test_functions(name: str) -> None:
    layer = RecurrentLayer(E, H, cell=gated_cell(FUNCTIONS[name], name), norm=LayerNorm())
    assert_exact(randomised(layer), torch.randn(2, N, E))


@pytest.mark.parametrize("name", slow("softmax", "cumsum", "amax"))
def test_functions_of_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit_triton, "TILE", 2)
    test_functions(name)
