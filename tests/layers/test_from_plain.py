"""Plain weights under a norm, cells of layers, and quantisers that know torch's layers alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_results import randomised
from refusals import refuses
from torch import nn
from torch.ao.quantization import quantize_dynamic

import ln_zoo
from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RecurrentCell, RecurrentLayer, RNNCell
from ln_zoo.norms import LayerNorm, Norm, WeightNorm
from ln_zoo.ops import CELLS


@pytest.mark.parametrize("norm", [LayerNorm(), WeightNorm()], ids=["LayerNorm", "WeightNorm"])
def test_a_load_of_plain_weights_names_what_the_norm_has(norm: Norm) -> None:
    plain = nn.Sequential(nn.LSTM(2, 3, 2), nn.Linear(3, 3), nn.Conv2d(1, 2, 3))
    ours = nn.Sequential(
        LSTM(2, 3, 2, norm=norm), ln_zoo.Linear(3, 3, norm=norm), ln_zoo.Conv2d(1, 2, 3, norm=norm)
    )
    for a, b in ((ours, plain), *zip(ours, plain, strict=True)):
        missing, unexpected = a.load_state_dict(b.state_dict(), strict=False)
        assert not unexpected
        assert set(missing) == set(a.state_dict()) - set(b.state_dict())
        refuses([*missing], a.load_state_dict, b.state_dict(), error=RuntimeError)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (LSTM(2, 3, 2, bidirectional=True, norm=LayerNorm(), normalize=("cell",)), LSTMCell),
        (LSTM(2, 3, peephole=True, derivative_bound=2.0, bias=False), LSTMCell),
        (GRU(2, 3, 2, norm=WeightNorm(), dtype=torch.float64), GRUCell),
        (RNN(2, 3, nonlinearity="relu", norm=LayerNorm()).eval(), RNNCell),
        (RecurrentLayer(2, 3, cell=CELLS["GRU"]), RecurrentCell),
    ],
    ids=["LSTM", "peephole", "GRU", "RNN", "of a cell"],
)
def test_a_cell_of_a_layer_computes_its_steps(layer: Any, kind: type) -> None:
    randomised(layer, 0.1)
    for suffix in layer.sites:
        number, reverse = int(suffix[1]), suffix.endswith("reverse")
        state = torch.get_rng_state()
        cell = layer.to_cell(number, reverse)
        assert torch.equal(torch.get_rng_state(), state)
        assert type(cell) is kind
        assert cell.training == layer.training
        for name, value in cell.named_parameters():
            parts = name.rpartition("sites.")
            full = f"sites.{suffix}.{parts[2]}" if parts[1] else f"{name}_{suffix}"
            assert torch.equal(value, layer.get_parameter(full))
            assert value is not layer.get_parameter(full)
        if len(layer.sites) == 1:
            # In float64: of three units layer norm may multiply float32's rounding by hundreds.
            whole, cell = copy.deepcopy(layer).double(), cell.double()
            x, hx, rows = torch.randn(4, 5, 2, dtype=torch.float64), None, []
            for row in x:
                hx = cell(row, hx)
                rows.append(hx if isinstance(hx, torch.Tensor) else hx[0])
            torch.testing.assert_close(torch.stack(rows), whole(x)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("norm", [None, LayerNorm()])
def test_a_cell_has_the_present_values_of_parametrised_weights(norm: Norm | None) -> None:
    layer, x = LSTM(2, 3, norm=norm).double(), torch.randn(1, 5, 2, dtype=torch.float64)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        nn.utils.parametrizations.weight_norm(layer, name)
    with torch.no_grad():
        for part in layer.parametrizations.values():
            part.original0.mul_(2)
    cell = layer.to_cell()
    assert type(cell) is LSTMCell
    assert torch.equal(cell.weight_hh, layer.weight_hh_l0)
    torch.testing.assert_close(cell(x[0])[0], layer(x)[0][0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("layer", "where", "named"),
    [
        (GRU(2, 3), (1, False), "l1.*l0"),
        (GRU(2, 3), (0, True), "l0_reverse"),
        (GRU(2, 3, zoneout=0.2), (0, False), "zoneout"),
        (LSTM(2, 3, proj_size=2), (0, False), "project"),
    ],
    ids=["layer", "direction", "zoneout", "projection"],
)
def test_layers_without_such_a_cell(layer: Any, where: tuple[int, bool], named: str) -> None:
    refuses(named, layer.to_cell, *where)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", [LSTM(2, 3, norm=LayerNorm()), GRU(2, 3), LSTMCell(2, 3)])
def test_torchs_quantisers_raise(layer: nn.Module) -> None:
    model = nn.ModuleDict({"rnn": layer, "head": nn.Linear(3, 3)})
    kinds = {type(layer), nn.Linear}
    assert "denormalize_" in refuses("ln_zoo", quantize_dynamic, model, kinds, error=TypeError)
    # Left out, it stays as it is.
    done = quantize_dynamic(model, {nn.Linear})
    assert type(done["rnn"]) is type(layer)
    assert "quantized" in type(done["head"]).__module__


@pytest.mark.filterwarnings("ignore")
def test_folded_layers_are_quantised_by_torch() -> None:
    model = nn.Sequential(LSTM(4, 16, norm=WeightNorm()))
    x = torch.randn(5, 3, 4)
    expected = model(x)[0]
    ln_zoo.denormalize_(model)
    done = quantize_dynamic(model, {nn.LSTM})
    assert "quantized" in type(done[0]).__module__
    assert (done(x)[0] - expected).abs().max() < 0.05
