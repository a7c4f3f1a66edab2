"""The cells of ``examples/cells``: the contract of a cell, and the kernels that run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells.dreamer_v3 import DreamerV3GRU, SequenceModel
from cells.indrnn import IndRNN, IndRNNCell
from cells.mgu import MinimalGatedUnit, MinimalGatedUnitCell
from cells.peephole_lstm import PeepholeLSTM, PeepholeLSTMCell
from cells.slstm import SLSTM, SLSTMCell
from engines import names_of
from kernels.generated.generated_case import assert_exact
from layer_results import randomised
from own_cell import MGU
from torch import Tensor

from ln_zoo.kernels.native.compiler import Unavailable, find_compiler
from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import LayerNorm
from ln_zoo.ops import lstm_cell
from ln_zoo.testing import CellCase

LAYERS = (SLSTM, IndRNN, MinimalGatedUnit, PeepholeLSTM)


class TestSLSTM(CellCase):
    layer, step = SLSTM, SLSTMCell
    norms = (LayerNorm(),)
    # Its normaliser is 0 before the first step, so c / n has no gradient there.
    test_resets_are_pieces_apart = None
    test_gradients_stay_finite_where_statistics_degenerate = None


class TestIndRNN(CellCase):
    layer, step = IndRNN, IndRNNCell
    norms = (LayerNorm(),)
    # Perturbations vanish at units that ReLU closes.
    test_analyses_take_it = None
    # Dropout of recurrent weights acts on weight_hh, which it does not use.
    test_noise_is_drawn_in_training_alone = None


@pytest.mark.parametrize("layer", LAYERS)
def test_runs_at_kernel_speed(layer: type[RecurrentLayer], chosen: list[Any]) -> None:
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    torch.manual_seed(0)
    output, _ = layer(3, 5, norm=LayerNorm())(torch.randn(16, 2, 3))
    output.sum().backward()
    assert names_of(chosen) == ["generated"]


@pytest.mark.parametrize(
    ("layer", "same"),
    [
        (MinimalGatedUnit, MGU(3, 5, norm=LayerNorm())),
        (PeepholeLSTM, RecurrentLayer(3, 5, cell=lstm_cell(peephole=True), norm=LayerNorm())),
    ],
)
def test_the_same_equations_elsewhere(layer: type[RecurrentLayer], same: RecurrentLayer) -> None:
    torch.manual_seed(0)
    ours, x = randomised(layer(3, 5, norm=LayerNorm())), torch.randn(4, 2, 3)
    same.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x)[0], same(x)[0], rtol=1e-5, atol=1e-6)


assert MinimalGatedUnitCell.cell is MinimalGatedUnit.cell
assert PeepholeLSTMCell.cell is PeepholeLSTM.cell


def test_dreamer_v3_is_its_equations() -> None:
    """The authors' code, written out; blocks of units are the second last axis."""
    torch.manual_seed(0)
    T, N, Z, A, H, blocks = 6, 3, 5, 2, 8, 4
    model = randomised(SequenceModel(Z, A, H, 7, blocks).double())
    z, a = torch.randn(T, N, Z).double(), 2 * torch.randn(T, N, A).double()
    start, reset = torch.randn(1, N, H).double(), torch.rand(T, N) < 0.3
    w, units = dict(model.recurrence.named_parameters()), H // blocks
    # (blocks, gates, outputs, inputs); the first is that of the hidden layer
    in_blocks = w["weight_hh_l0"].view(blocks, 4, units, units)
    of_hidden, of_gates, biases = in_blocks[:, 0], in_blocks[:, 1:], w["bias_hh_l0"].view(4, H)

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return scale * x / (x.square().mean(-1, keepdim=True) + 1e-4) ** 0.5

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def layer(x: Tensor, of: Any) -> Tensor:
        return silu(norm(x @ of[0].weight.T + of[0].bias, of[1].weight))

    h, outputs = start[0], []
    for now, action, first in zip(z, a, reset, strict=True):
        h = torch.where(first.unsqueeze(1), 0.0, h)
        action = action / action.abs().clamp(min=1)
        x0 = h @ w["weight_state_l0"].T + w["weight_state_bias_l0"][0]
        x0 = silu(norm(x0, w["sites.l0.state.gain"]))
        x12 = torch.cat([layer(now, model.of_z), layer(action, model.of_a)], 1)
        hidden = [part @ of.T for part, of in zip(h.split(units, 1), of_hidden, strict=True)]
        x = torch.cat(hidden, 1) + x0 @ w["weight_layer_l0"].T + x12 @ w["weight_ih_l0"].T
        x = silu(norm(x + w["bias_ih_l0"] + biases[0], w["sites.l0.hidden.gain"]))
        gates = [
            (part @ of.flatten(0, 1).T).view(N, 3, units)
            for part, of in zip(x.split(units, 1), of_gates, strict=True)
        ]
        flat = [torch.cat([of[:, k] for of in gates], 1) for k in range(3)]
        reset_gate, candidate, update = (g + b for g, b in zip(flat, biases[1:], strict=True))
        candidate = torch.tanh(torch.sigmoid(reset_gate) * candidate)
        update = torch.sigmoid(update - 1)
        h = update * candidate + (1 - update) * h
        outputs.append(h)
    expected = torch.stack(outputs)
    found, last = model(z, a, start, reset)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(last[0], found[-1])
    parameters = [*model.parameters()]
    one, two = (torch.autograd.grad(y.sin().sum(), parameters) for y in (found, expected))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


def test_dreamer_v3_on_its_kernel(chosen: list[Any]) -> None:
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    torch.manual_seed(0)
    layer = randomised(DreamerV3GRU(3, 24, blocks=4))
    assert_exact(layer, torch.randn(16, 5, 3), [torch.randn(1, 5, 24)], torch.rand(16, 5) < 0.2)
    assert names_of(chosen)[0] == "generated"
