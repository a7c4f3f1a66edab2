"""Recurrent weights in blocks: the full layer with a block-diagonal weight, and its contract."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_results import randomised, results_of
from reference import Direction, Site
from refusals import refuses
from torch import Tensor, nn

from ln_zoo import denormalize_, normalize_
from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RecurrentCell, RNNCell, without_blocks
from ln_zoo.norms import Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import full_weight, rows_of_blocks
from ln_zoo.testing import CellCase

F64 = torch.float64
PAIRS = {"LSTM": (LSTM, LSTMCell), "GRU": (GRU, GRUCell), "RNN": (RNN, RNNCell)}


class TestGRUInBlocks(CellCase):
    layer, step, blocks = GRU, GRUCell, 6
    # Of two units, layer norm without a large eps is a sign.
    norms = (LayerNorm(), LayerNorm(eps=0.1, per_block=True), RMSNorm(per_block=True), WeightNorm())


class TestLSTMInBlocks(CellCase):
    layer, step, blocks = LSTM, LSTMCell, 6
    norms = (Identity(), LayerNorm(eps=0.1, per_block=True))


def in_full(weight: Tensor) -> Tensor:
    """The block-diagonal weight (G, H), element by element, of (B, G / B, H / B)."""
    blocks, rows, units = weight.shape
    gates, hidden = rows // units, blocks * units
    full = weight.new_zeros(gates * hidden, hidden)
    for k in range(blocks):
        for gate in range(gates):
            for i in range(units):
                row = gate * hidden + k * units + i
                full[row, k * units : (k + 1) * units] = weight[k, gate * units + i]
    return full


@pytest.mark.parametrize("kind", PAIRS)
def test_rows_and_the_full_weight_are_the_documented_order(kind: str) -> None:
    weight = PAIRS[kind][0](3, 6, blocks=3).weight_hh_l0
    assert full_weight(rows_of_blocks(weight), 3).equal(in_full(weight))


NORMS: dict[Norm, dict[str, Any]] = {
    LayerNorm(eps=1e-3): {"kind": "layer", "groups": {"LSTM": (4,), "GRU": (2, 1), "RNN": (1,)}},
    LayerNorm(eps=1e-3, per_block=True): {"kind": "layer", "parts": 3},
    RMSNorm(eps=1e-3, per_block=True): {"kind": "rms", "parts": 3},
}


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("kind", PAIRS)
def test_the_equations_with_a_block_diagonal_weight(kind: str, norm: Norm) -> None:
    """Against the reference of the tests, whose weight is full and whose groups are spelled."""
    torch.manual_seed(0)
    layer: Any = randomised(PAIRS[kind][0](3, 6, blocks=3, norm=norm, dtype=F64))
    named, sites = dict(layer.named_parameters()), {}
    for role, site in layer.sites["l0"].items():
        if site.gain is not None:
            gates, known = site.features // 6, NORMS[norm]
            groups = known["groups"][kind] if "groups" in known else (1,) * gates * known["parts"]
            groups = (1,) if role == "cell" and "groups" in known else groups
            sites[role] = Site(known["kind"], site.gain, site.shift, 1e-3, groups)
    reference = Direction(
        "RNN_TANH" if kind == "RNN" else kind,
        named["weight_ih_l0"],
        in_full(named["weight_hh_l0"]),
        named["bias_ih_l0"],
        named["bias_hh_l0"],
        sites=sites,
    )
    x = torch.randn(5, 4, 3, dtype=F64)
    h, c = torch.zeros(4, 6, dtype=F64), torch.zeros(4, 6, dtype=F64)
    outputs = []
    for t, now in enumerate(x):
        h, c = reference.step(now, h, c if kind == "LSTM" else None, t)
        outputs.append(h)
    expected = torch.stack(outputs)
    found = layer(x)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = [named["weight_hh_l0"], named["weight_ih_l0"]]
    one, two = (torch.autograd.grad(a.sin().sum(), weights) for a in (found, expected))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


def test_parameters_of_a_layer_and_of_its_cell() -> None:
    layer = LSTM(3, 8, num_layers=2, bidirectional=True, blocks=4, norm=LayerNorm())
    shapes = {name: tuple(a.shape) for name, a in layer.state_dict().items()}
    full = {name: tuple(a.shape) for name, a in without_blocks(layer).state_dict().items()}
    assert {name for name in shapes if shapes[name] != full[name]} == {
        "weight_hh_l0", "weight_hh_l0_reverse", "weight_hh_l1", "weight_hh_l1_reverse",
    }  # fmt: skip
    assert (shapes["weight_hh_l1"], full["weight_hh_l1"]) == ((4, 8, 2), (32, 8))
    cell = layer.to_cell(1)
    assert cell.weight_hh.equal(layer.weight_hh_l1)
    assert "blocks=4" in repr(layer)
    assert "blocks=4" in repr(cell)
    assert "blocks" not in repr(LSTM(3, 8))


@pytest.mark.parametrize("kind", PAIRS)
def test_initial_weights_are_those_of_as_many_inputs(kind: str) -> None:
    torch.manual_seed(0)
    for module in (PAIRS[kind][0](4, 64, blocks=16), PAIRS[kind][1](4, 64, blocks=16)):
        for name, parameter in module.named_parameters():
            bound = (64 // 16 if name.startswith("weight_hh") else 64) ** -0.5
            most = float(parameter.detach().abs().max())
            assert 0.9 * bound < most <= bound, name


def test_one_unit_a_block_reads_itself_alone() -> None:
    layer = RNN(2, 5, blocks=5, dtype=F64)
    x, start = torch.randn(4, 2, dtype=F64), torch.randn(1, 5, dtype=F64)
    (jacobian,) = torch.func.jacrev(lambda h: layer(x, h)[1])(start).movedim(2, 0)
    assert torch.equal(jacobian[0] != 0, torch.eye(5, dtype=torch.bool))


@pytest.mark.parametrize("options", [{"blocks": 3}, {"blocks": 0}, {"blocks": 16}], ids=str)
@pytest.mark.parametrize("kind", PAIRS)
def test_blocks_that_do_not_divide_the_units(kind: str, options: dict[str, int]) -> None:
    for cls in PAIRS[kind]:
        refuses(("blocks", options["blocks"]), cls, 3, 8, **options)


def test_projected_outputs_have_no_blocks() -> None:
    refuses(("blocks", "proj_size=2"), LSTM, 3, 8, blocks=2, proj_size=2)


def test_a_weight_of_another_shape() -> None:
    layer = GRU(3, 8, blocks=2)
    layer.weight_hh_l0 = nn.Parameter(torch.randn(4, 6, 2))
    refuses(["weight_hh_l0"], layer, torch.randn(5, 4, 3), error=RuntimeError)


@pytest.mark.parametrize("norm", [Identity(), LayerNorm(), WeightNorm()], ids=str)
def test_conversion_keeps_the_blocks(norm: Norm) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GRU(3, 8, blocks=4, dtype=F64))
    weights, x = copy.deepcopy(model.state_dict()), torch.randn(6, 2, 3, dtype=F64)
    plain = model(x)[0]
    normalize_(model, norm)
    assert model[0].blocks == 4
    assert all(model.state_dict()[name].equal(a) for name, a in weights.items())
    assert torch.allclose(model(x)[0], plain) == (norm != LayerNorm())
    refuses(["blocks"], denormalize_, nn.Sequential(GRU(3, 8, blocks=4)))


def test_without_blocks_refuses_other_modules() -> None:
    for other in (nn.GRU(3, 8), nn.Linear(3, 8)):
        refuses([type(other).__name__], without_blocks, other, error=TypeError)
    scaled = nn.utils.parametrizations.weight_norm(GRU(3, 8, blocks=2), "weight_hh_l0")
    refuses(["parametri"], without_blocks, scaled)


def test_noise_of_training_is_drawn_for_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the masks of the full layer cut to the blocks, both compute the same."""
    torch.manual_seed(0)
    options: Any = {"recurrent_dropout": 0.4, "zoneout": 0.3, "dtype": F64}
    layer = GRU(3, 8, blocks=2, **options)
    x = torch.randn(6, 4, 3, dtype=F64)
    found = []
    for module in (layer, without_blocks(layer)):
        torch.manual_seed(1)
        found.append(results_of(module, x))
    for name, a in found[0].items():
        if "weight_hh" not in name:
            torch.testing.assert_close(a, found[1][name], rtol=0, atol=1e-12)
    dropped = GRU(3, 8, blocks=2, weight_dropout=0.5)
    mask = (dropped._effective_weights("l0", dropped._directions()["l0"]).hh == 0).float()
    assert 0.2 < mask.mean() < 0.8


class _Recurrent(RecurrentCell):
    cell = GRU.cell


@pytest.mark.parametrize("name", ["pickled", "compiled"])
def test_an_own_class_of_cells(name: str) -> None:
    torch.manual_seed(0)
    cell = _Recurrent(3, 8, blocks=2)
    x, h = torch.randn(4, 3), torch.randn(4, 8)
    other: Any = copy.deepcopy(cell)
    if name == "compiled":
        other = torch.compile(cell, backend="eager", fullgraph=True)
    torch.testing.assert_close(other(x, h), without_blocks(cell)(x, h))
