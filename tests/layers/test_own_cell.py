"""Cells of a user's own file, ``examples/own_cell.py``: the MGU and Dreamer's GRU."""

from __future__ import annotations

import copy
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_results import randomised
from own_cell import JOINT_GRU_CELL, MGU, MGU_CELL, JointGRU, JointGRUCell, MGUCell, main
from reference import layer_norm
from refusals import refuses
from torch import Tensor

from ln_zoo.analysis import gradient_flow, initial_dynamics
from ln_zoo.layers import (
    GRU,
    LSTM,
    RNN,
    LSTMCell,
    RecurrentCell,
    RecurrentLayer,
    RNNCell,
    recurrent_layer,
)
from ln_zoo.models import SequenceClassifier
from ln_zoo.norms import Identity, LayerNorm, RMSNorm, WeightNorm
from ln_zoo.ops import CELLS, Cell, Place
from ln_zoo.testing import CellCase

F64 = torch.float64


class TestMGU(CellCase):
    layer, step = MGU, MGUCell
    norms = tuple(norm for norm in CellCase.norms if norm != RMSNorm())  # as layer norm


class TestJointGRU(CellCase):
    layer, step = JointGRU, JointGRUCell
    norms = (LayerNorm(), WeightNorm())


class TestLSTM(CellCase):
    """The test case itself, on a cell that projects."""

    layer, step = LSTM, LSTMCell
    norms = (LayerNorm(),)


def test_the_minimal_gated_unit_is_its_equations() -> None:
    """With [h, x] taken apart into two terms, normalised as the paper normalises a GRU's."""
    torch.manual_seed(0)
    layer = randomised(MGU(3, 5, norm=LayerNorm(eps=1e-3), dtype=F64))
    x, h = torch.randn(6, 4, 3, dtype=F64), torch.randn(4, 5, dtype=F64)
    (w_f, w_h), (u_f, u_h) = layer.weight_ih_l0.chunk(2), layer.weight_hh_l0.chunk(2)
    b_f, b_h = (layer.bias_ih_l0 + layer.bias_hh_l0).chunk(2)
    sites = layer.sites["l0"]
    gains = sites["input"].gain.chunk(2)
    outputs, state = [], h

    def norm(a: Tensor, gain: Tensor) -> Tensor:
        return layer_norm(a, 1e-3) * gain

    for now in x:
        to_f, to_h = (norm(now @ w.T, g) for w, g in zip((w_f, w_h), gains, strict=True))
        f = torch.sigmoid(to_f + norm(state @ u_f.T, sites["forget"].gain) + b_f)
        new = torch.tanh(to_h + norm((f * state) @ u_h.T, sites["candidate"].gain) + b_h)
        state = (1 - f) * state + f * new
        outputs.append(state)
    output, last = layer(x, h.unsqueeze(0))
    torch.testing.assert_close(output, torch.stack(outputs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last[0], state, rtol=1e-12, atol=1e-12)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert capsys.readouterr().out == "MGU (13, 10) (4, 3, 5)\njoint GRU (13, 5) (1, 3, 5)\n"


def test_a_cell_that_takes_a_known_name_has_no_kernels() -> None:
    """Its own step runs, not the kernel of that name."""

    class Negative(RecurrentLayer):
        cell = replace(CELLS["GRU"], step=lambda *given: (-CELLS["GRU"].step(*given)[0],))

    torch.manual_seed(0)
    layer, gru = Negative(3, 4, dtype=F64), GRU(3, 4, dtype=F64)
    gru.load_state_dict(layer.state_dict())
    x = torch.randn(1, 2, 3, dtype=F64)
    torch.testing.assert_close(layer(x)[0], -gru(x)[0])


def test_it_is_found_by_models_and_analyses() -> None:
    model = SequenceClassifier(8, 3, 4, cell=MGU, norm=LayerNorm())
    assert isinstance(model.recurrent, MGU)
    assert model(torch.rand(5, 8)).shape == (5, 3)
    assert model.hparams["cell"] == {"class_path": "own_cell.MGU"}
    again = SequenceClassifier(**{k: v for k, v in model.hparams.items() if k[0] != "_"})
    assert isinstance(again.recurrent, MGU)
    x = torch.randn(6, 3, 2, dtype=F64)
    (flow,) = gradient_flow(x, MGU, 4, norms=[Identity])
    assert flow.norms.isfinite().all()
    (found,) = initial_dynamics(x, MGU, hidden_size=4, norms=[Identity])
    assert (found.group, found.name) == ("MGU", "Identity")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mgu", r"cell must be one of .*RecurrentLayer or its class_path; got 'mgu'"),
        (torch.nn.GRU, "cell must be one of .*got <class 'torch.nn.modules.rnn.GRU'>"),
        ({"class_path": "own_cell.Nothing"}, "cell 'own_cell.Nothing' cannot be imported"),
        ({"class_path": "own_cell.MGU_CELL"}, "cell must be one of"),
    ],
    ids=["name", "other", "missing", "cell"],
)
def test_unknown_cells(kind: Any, message: str) -> None:
    refuses(message, recurrent_layer, kind)


def test_a_layer_without_a_cell_says_so() -> None:
    for base in (RecurrentLayer, RecurrentCell):
        refuses(rf"{base.__name__} needs a cell, .*; got None", base, 3, 4, error=TypeError)
        assert base(3, 4, cell=JOINT_GRU_CELL)(torch.randn(2, 3))[0].shape[-1] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"places": (Place("input", (1, 1), weight="ih"),)}, "needs places 'input' .* 'recurrent'"),
        ({"places": MGU_CELL.places[1:]}, "needs places 'input'"),
        ({"states": ()}, "needs at least one state"),
        ({"candidates": (2,)}, r"candidates must be .* 0 to 1; got \(2,\)"),
        ({"forget": (-1,)}, r"forget must be .*got \(-1,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_descriptions(change: dict[str, Any], message: str) -> None:
    refuses(message, replace, MGU_CELL, **change)


def three_states(
    wx: Tensor, states: Any, w: Any, sites: Any, t: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    _, c, n = states
    return (wx + w.bias + c).tanh(), 0.5 * c + w.own[0][0], n + w.own[1].sum(0)


def test_several_states_and_weights_of_its_own() -> None:
    class Three(RecurrentLayer):
        cell = Cell(
            "three states",
            three_states,
            (Place("input", (1,), weight="ih"), Place("recurrent", (1,), weight="hh")),
            states=("h", "c", "n"),
            weights=(("drift", 1), ("count", 2)),
        )

    layer = Three(3, 4, 2, bidirectional=True, norm=LayerNorm())
    own = {name: a.shape for name, a in layer.named_parameters() if "drift" in name}
    assert own == {f"weight_drift_l{n}{side}": (1, 4) for n in (0, 1) for side in ("", "_reverse")}
    output, states = layer(torch.randn(5, 2, 3))
    assert output.shape == (5, 2, 8)
    assert [state.shape for state in states] == [(4, 2, 4)] * 3
    torch.testing.assert_close(
        states[2][0], (5 * layer.weight_count_l0.sum(0)).expand(2, 4), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(TypeError, match=r"hx must be a tuple \(h, c, n\) of 3 tensors"):
        layer(torch.randn(5, 2, 3), states[:2])
    layer.weight_drift_l1 = torch.nn.Parameter(torch.zeros(2, 4))
    refuses("weight_drift_l1", layer, torch.randn(5, 2, 3), error=RuntimeError)


@pytest.mark.parametrize(
    ("module", "former"),
    [
        (LSTM(3, 4, norm=LayerNorm()), "LSTM"),
        (LSTM(3, 4, peephole=True, derivative_bound=0.5), "LSTM"),
        (RNN(3, 4, nonlinearity="relu"), "RNN_RELU"),
        (GRU(3, 4), "GRU"),
        (LSTMCell(3, 4), "LSTM"),
        (LSTMCell(3, 4, peephole=True, derivative_bound=0.5), "LSTM with clipped derivatives"),
        (RNNCell(3, 4, nonlinearity="relu"), "RNN_RELU"),
    ],
    ids=lambda value: value.cell.name if isinstance(value, torch.nn.Module) else "",
)
def test_what_version_0_1_pickled_loads(module: Any, former: str) -> None:
    """Layers had no cell then, and cells had one of another form."""
    state = copy.deepcopy(module).__reduce_ex__(2)[2]
    del state["cell"]
    if isinstance(module, RecurrentCell):
        state["_cell"] = types.SimpleNamespace(name=former)
        state["_parameters"].setdefault("weight_peephole", None)
    again = type(module).__new__(type(module))
    again.__setstate__(state)
    assert again.cell.name == module.cell.name
    assert list(again.state_dict()) == list(module.state_dict())
    x = torch.randn(2, 3)
    torch.testing.assert_close(again(x)[0], module(x)[0])
