"""Infinity and NaN in inputs and states reach the same outputs and gradients as in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from accuracy import generic_loop
from engines import cpu_engines, names_of
from torch import Tensor, nn

from ln_zoo.kernels.native.runtime import unavailable_reason
from ln_zoo.layers import GRU, LSTM, RNN, RecurrentLayer
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import CARRIED_LSTM, DREAMER_GRU_INNER_BIAS, JOINT_LSTM, LIGHT_GRU

IN_TORCH: dict[str, Callable[..., nn.Module]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN_TANH": nn.RNN,
    "RNN_RELU": functools.partial(nn.RNN, nonlinearity="relu"),
}
CELLS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": LSTM,
    "GRU": GRU,
    "RNN_TANH": RNN,
    "RNN_RELU": functools.partial(RNN, nonlinearity="relu"),
    "joint LSTM": functools.partial(RecurrentLayer, cell=JOINT_LSTM),
    "carried LSTM": functools.partial(RecurrentLayer, cell=CARRIED_LSTM),
    "joint GRU": functools.partial(RecurrentLayer, cell=DREAMER_GRU_INNER_BIAS),
    "light GRU": functools.partial(RecurrentLayer, cell=LIGHT_GRU),
}
NORMS: dict[str, Norm] = {
    "weight": WeightNorm(),
    "layer": LayerNorm(),
    "rms": RMSNorm(),
    "batch": BatchNorm(max_steps=5),
}
WITH_BATCH_NORM = list(IN_TORCH)
#: Steps, examples, inputs and units: single steps, steps, and products on AMX tiles.
SIZES = [(1, 3, 6, 20), (5, 3, 6, 20), (2, 40, 70, 80)]


@pytest.fixture(params=cpu_engines())
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "native" and (reason := unavailable_reason()):
        pytest.skip(reason)
    monkeypatch.setenv("LN_ZOO_KERNELS", request.param)
    return request.param


def finite(layer: nn.Module, x: Tensor, states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Which elements of the output and of every gradient are finite."""
    inputs = [a.clone().requires_grad_() for a in (x, *states)]
    layer.zero_grad()
    output, _ = layer(inputs[0], tuple(inputs[1:]) if len(states) > 1 else inputs[1])
    output.sum().backward()
    named = dict(zip(("x", "h0", "c0"), inputs, strict=False)) | dict(layer.named_parameters())
    return {"output": output.isfinite()} | {n: a.grad.isfinite() for n, a in named.items()}


def compare(engine: str, cell: str, layer: nn.Module, size: Sequence[int], expect: Any) -> None:
    """With infinity and NaN in x, h0 and c0 in turn; ``expect``: `finite` of the reference."""
    steps, examples, features, units = size
    lstm = "LSTM" in cell
    for place in ("x", "h0", "c0") if lstm else ("x", "h0"):
        for value in (torch.inf, torch.nan):
            x, states = torch.randn(steps, examples, features), torch.randn(2, 1, examples, units)
            {"x": x[steps // 2], "h0": states[0, 0], "c0": states[1, 0]}[place][1, 2] = value
            operands = x, states if lstm else states[:1]
            expected, found = expect(*operands), finite(layer, *operands)
            if engine == "aten" and cell in ("RNN_RELU", "light GRU"):  # multiplies by ReLU's slope
                expected = {"output": expected["output"]}
            for name, a in expected.items():
                assert torch.equal(found[name], a), (place, value, name)
            assert not all(a.all() for a in found.values())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("cell", IN_TORCH)
def test_without_a_norm_as_in_torch_nn(
    engine: str, cell: str, size: Sequence[int], chosen: list[Any]
) -> None:
    torch.manual_seed(0)
    layer, reference = CELLS[cell](*size[2:], norm=None), IN_TORCH[cell](*size[2:])
    reference.load_state_dict(layer.state_dict())
    # oneDNN's LSTM multiplies other rows by 0 too.
    with torch.backends.mkldnn.flags(enabled=False):
        compare(engine, cell, layer, size, functools.partial(finite, reference))
    assert set(names_of(chosen)) == {engine}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("cell", "norm"),
    [(c, n) for c in CELLS for n in NORMS if n != "batch" or c in WITH_BATCH_NORM],
)
def test_with_norms_as_in_the_generic_loop(
    engine: str, cell: str, norm: str, size: Sequence[int]
) -> None:
    torch.manual_seed(0)
    layer = CELLS[cell](*size[2:], norm=NORMS[norm])
    compare(engine, cell, layer, size, generic_loop()(functools.partial(finite, layer)))
