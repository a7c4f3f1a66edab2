"""The cells of ``examples/cells``: the contract of a cell, and the kernels that run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells.indrnn import IndRNN, IndRNNCell
from cells.mgu import MinimalGatedUnit, MinimalGatedUnitCell
from cells.peephole_lstm import PeepholeLSTM, PeepholeLSTMCell
from cells.xlstm_block import SLSTMBlock
from engines import names_of
from layer_results import randomised
from own_cell import MGU

from ln_zoo.kernels.native.compiler import Unavailable, find_compiler
from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import LayerNorm
from ln_zoo.ops import lstm_cell
from ln_zoo.testing import CellCase

LAYERS = (IndRNN, MinimalGatedUnit, PeepholeLSTM)


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


def test_xlstm_block_is_causal_and_heads_are_apart() -> None:
    torch.manual_seed(0)
    block = randomised(SLSTMBlock(12, heads=3))
    x = torch.randn(4, 9, 12)
    changed = x.clone()
    changed[:, 5] += torch.randn(12)
    torch.testing.assert_close(block(changed)[:, :5], block(x)[:, :5])
    assert not torch.allclose(block(changed)[:, 6:], block(x)[:, 6:])
    block.norm = torch.nn.Identity()
    (d,) = torch.autograd.grad(block(x.requires_grad_())[..., :4].sum(), x)
    assert d[..., :4].any()
    assert not d[..., 4:].any()
