"""Half-precision calls that the C++ kernels run in float32: which, and with what results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engines import needs_native
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ln_zoo.kernels.native import build, mixed_precision
from ln_zoo.kernels.native.mixed_precision import MixedPrecision
from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm

pytestmark = needs_native

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}
CELLS = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN": RNNCell}
NORMS = {"layer": LayerNorm(gain=0.5), "batch": BatchNorm(max_steps=9), "none": Identity()}
every_half = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    monkeypatch.setattr(build, "bfloat16_pays", lambda: False)


def inputs(packed: bool = False, dtype: torch.dtype = F32) -> Tensor | PackedSequence:
    """In float32, but numbers that the precision has."""
    torch.manual_seed(0)
    x = torch.randn(9, 6, 5).to(dtype).float()
    return pack_sequence([x[: 9 - n, n] for n in range(6)]) if packed else x


def results(layer: Any, x: Any, dtype: torch.dtype, mode: str) -> dict[str, Tensor]:
    """Output, states and gradients of a copy of a layer."""
    layer = copy.deepcopy(layer)
    if mode == "layer":
        layer, x = layer.to(dtype), x.to(dtype)
    with torch.autocast("cpu", dtype, enabled=mode == "autocast"):
        output, states = layer(x)
    output = output.data if isinstance(output, PackedSequence) else output
    states = states if isinstance(states, tuple) else (states,)
    # Gradients that half precision has come back.
    sum(a.float().flatten()[::2].sum() for a in (output, *states)).backward()
    found = {"output": output, **{f"state {i}": s for i, s in enumerate(states)}}
    return found | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize(
    ("name", "norm", "packed", "mode"),
    [
        (name, norm, (i + j) % 2 > 0, mode)
        for i, name in enumerate(LAYERS)
        for j, norm in enumerate(NORMS.values())
        for mode in ("autocast", "layer")
    ],
    ids=str,
)
@every_half
def test_only_results_are_rounded(
    name: str, norm: Norm, packed: bool, mode: str, dtype: torch.dtype, chosen: list[Any]
) -> None:
    layer = LAYERS[name](5, 7, num_layers=2, bidirectional=True, norm=norm)
    if mode == "layer":
        layer = layer.to(dtype).float()  # weights that half precision has
    found = results(layer, inputs(packed, dtype), dtype, mode)
    assert isinstance(chosen.pop(), MixedPrecision)
    exact = results(layer, inputs(packed, dtype), F32, "float32")
    kept = F32 if mode == "autocast" else dtype
    assert {key: a.dtype for key, a in found.items()} == {
        key: dtype if key == "output" else kept for key in exact
    }
    eps = torch.finfo(dtype).eps
    for key, value in found.items():
        gap = (value.float() - exact[key]).norm() / exact[key].norm()
        assert gap < eps, key


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()], ids=["layer", "batch"])
@every_half
def test_which_calls_are_widened(
    norm: Norm, dtype: torch.dtype, pays: bool, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but layer norm in bfloat16, on a processor with fast bfloat16."""
    monkeypatch.setattr(build, "bfloat16_pays", lambda: pays)
    monkeypatch.setitem(mixed_precision.MIN_MULTIPLICATIONS, "layers", 0)
    layer = LSTM(5, 7, norm=norm)
    with torch.autocast("cpu", dtype):
        layer(inputs())
    stays = pays and dtype == BF16 and isinstance(norm, LayerNorm)
    assert isinstance(chosen[-1], MixedPrecision) != stays
    assert chosen[-1].name == "native"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_small_calls_are_widened_on_every_processor(
    packed: bool, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "bfloat16_pays", lambda: True)
    x = inputs(packed)
    rows = len(x.data) if packed else 9 * 6
    work = rows * 4 * 7 * (5 + 7)
    for many in (work, work + 1):
        monkeypatch.setitem(mixed_precision.MIN_MULTIPLICATIONS, "layers", many)
        with torch.autocast("cpu", BF16):
            LSTM(5, 7, norm=LayerNorm())(x)
    assert [isinstance(kernel, MixedPrecision) for kernel in chosen] == [False, True]


@pytest.mark.parametrize("name", CELLS)
@every_half
def test_cells_are_widened(
    name: str, dtype: torch.dtype, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "bfloat16_pays", lambda: True)
    x, work = torch.randn(6, 5), 6 * CELLS[name](5, 7).weight_ih.shape[0] * (5 + 7)
    cell = CELLS[name](5, 7, norm=LayerNorm(gain=0.5))
    exact = cell(x)
    for many in (work, work + 1):
        monkeypatch.setitem(mixed_precision.MIN_MULTIPLICATIONS, "step", many)
        chosen.clear()
        with torch.autocast("cpu", dtype):
            found = copy.deepcopy(cell)(x)
        in_float32 = dtype == F16 or many > work
        assert isinstance(chosen[0], MixedPrecision) == in_float32
        if in_float32:
            torch.testing.assert_close(found, exact, rtol=0.0, atol=0.0)


def test_calls_in_other_precisions_are_not(chosen: list[Any]) -> None:
    for dtype in (F32, torch.float64):
        LSTM(5, 7, norm=LayerNorm()).to(dtype)(inputs().to(dtype))
    assert not any(isinstance(kernel, MixedPrecision) for kernel in chosen)


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("Intel(R) Xeon(R) Processor", {"avx512f", "avx512_bf16", "amx_tile"}, True),
        ("Intel(R) Xeon(R) Processor", {"avx512f", "avx512_bf16"}, False),
        ("AMD EPYC 9R14", {"avx512f", "avx512_bf16"}, True),
        ("AMD EPYC 7R13", {"avx2"}, False),
        ("0x41 0xd40", {"asimd", "bf16"}, False),
    ],
)
def test_processors_with_fast_bfloat16(
    name: str, features: set[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(build, "_processor", lambda: (name, frozenset(features)))
    assert build.bfloat16_pays() is expected
