"""Every recurrent layer and cell with every norm against the equations, in float64."""

from __future__ import annotations

from typing import Any

import layer_results
import pytest
import reference
import torch
from layer_results import assert_close, assert_same_statistics, filled, flat, gradients
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from ln_zoo.norms import BatchNorm, LayerNorm

F64 = torch.float64
TOLERANCE: dict[str, float] = {"tolerance": 0, "atol": 1e-9}
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN_TANH": RNN, "RNN_RELU": RNN}
CELLS = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN_TANH": RNNCell, "RNN_RELU": RNNCell}
NORMS = layer_results.NORMS | {
    "layer, each gate": LayerNorm(eps=1e-3, per_gate=True),
    "batch, unbiased": BatchNorm(eps=1e-3, max_steps=4, unbiased=True),
}


def build(cls: type[nn.Module], cell: str, norm: str, **options: object) -> nn.Module:
    """A module with random parameters, gains, shifts, scales and running averages."""
    if cell == "RNN_RELU":
        options["nonlinearity"] = "relu"
    module = cls(3, 4, norm=NORMS[norm], dtype=F64, **options)
    return filled(module, 3 if norm == "batch-eval" else None)  # of four rows


def check_layer(layer: Any, cell: str, lengths: tuple[int, ...]) -> None:
    """Outputs, states, running averages and every gradient, over two batches."""
    lstm = cell == "LSTM"
    for _ in range(2):
        ours = {suffix: reference.read(cell, layer, suffix) for suffix in layer.sites}
        directions, both = list(ours.values()), 1 + layer.bidirectional
        layers = [directions[k : k + both] for k in range(0, len(directions), both)]
        sequences = [torch.randn(n, 3, dtype=F64) for n in lengths]
        shape = (len(directions), len(lengths))
        h0 = torch.randn(*shape, layer.proj_size or 4, dtype=F64, requires_grad=True)
        c0 = torch.randn(*shape, 4, dtype=F64, requires_grad=True) if lstm else None

        wanted, *wanted_states = reference.run_layers(layers, sequences, h0, c0)
        hx = (h0, c0) if lstm else h0
        if len(set(lengths)) == 1:
            output, state = layer(torch.stack(sequences, dim=1), hx)
            outputs = output.unbind(1)
        else:
            packed, state = layer(pack_sequence(sequences, enforce_sorted=False), hx)
            outputs = unpack_sequence(packed)
        found, expected = (outputs, state), (wanted, wanted_states)
        sources = flat((layer.parameters(), h0, c0))
        assert_close(found, expected, **TOLERANCE)
        assert_close(gradients(found, sources), gradients(expected, sources), **TOLERANCE)
        for suffix, d in ours.items():
            assert_same_statistics(layer.sites[suffix], d)


LAYOUTS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (6, 6, 6)),
    ({"num_layers": 2, "bidirectional": True}, (3, 6, 1, 4, 4)),
    ({"bias": False}, (2, 5, 3)),
]
BOTH: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
#: Any two of cell, norm and layout meet.
PAIRS = [
    pytest.param(cell, norm, *LAYOUTS[(i + j) % 3], id=f"{cell}-{norm}")
    for i, cell in enumerate(LAYERS)
    for j, norm in enumerate(NORMS)
] + [
    pytest.param("LSTM", norm, {**own, **BOTH}, (4, 2, 5), id=f"{next(iter(own))}-{norm}")
    for own in ({"proj_size": 2}, {"peephole": True})
    for norm in NORMS
]


PLACES = {
    "LSTM": [("cell",), ("input",), ("recurrent", "cell"), ()],
    "GRU": [("recurrent",), ("input",)],
    "RNN_TANH": [("sum",), ("input",)],
}
SOME_PLACES = [
    pytest.param(cell, norm, {"normalize": places}, (4, 2, 5), id=f"{cell}-{norm}-{places}")
    for cell, choices in PLACES.items()
    for places in choices
    for norm in ("layer", "batch", "weight")
]


@pytest.mark.parametrize(("cell", "norm", "options", "lengths"), [*PAIRS, *SOME_PLACES])
def test_layer(cell: str, norm: str, options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer = build(LAYERS[cell], cell, norm, **options)
    touched = {name.split(".")[2] for name in layer.state_dict() if name.startswith("sites.")}
    assert touched <= set(options.get("normalize", touched))
    check_layer(layer, cell, lengths)


@pytest.mark.parametrize(
    ("cell", "options"),
    [*((cell, {}) for cell in CELLS), ("LSTM", {"peephole": True})],
    ids=[*CELLS, "peephole"],
)
@pytest.mark.parametrize("norm", NORMS)
def test_cell(cell: str, norm: str, options: dict[str, Any]) -> None:
    torch.manual_seed(4)
    module = build(CELLS[cell], cell, norm, **options)
    d = reference.read(cell, module)
    state = tuple(torch.randn(5, 4, dtype=F64) for _ in range(1 + (cell == "LSTM")))
    h, c = (*state, None)[:2]
    for t in range(6):
        x = torch.randn(5, 3, dtype=F64)
        found = module(x, state if cell == "LSTM" else state[0], step=t)
        state = found if cell == "LSTM" else (found,)
        h, c = d.step(x, h, c, t)
        assert_close(state, (h, c), **TOLERANCE)
    found, wanted = (gradients(of, module.parameters()) for of in (state, (h, c)))
    assert_close(found, wanted, **TOLERANCE)
    assert_same_statistics(module.sites, d)
