"""Names of parameters, initial values and wrong arguments of recurrent layers and cells."""

from __future__ import annotations

import inspect
from typing import Any, Unpack

import pytest
import torch
from jsonargparse import ArgumentParser
from layer_results import CELLS, LAYERS
from refusals import refuses
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from ln_zoo.layers import GRU, LSTM, RNN, Conv2d, GRUCell, Linear, LSTMCell, RecurrentLayer, RNNCell
from ln_zoo.layers.recurrent import RecurrentOptions
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm

F64 = torch.float64
every_layer = pytest.mark.parametrize("cls", LAYERS)


@every_layer
def test_signatures_and_the_command_line_show_all_options(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    shared = inspect.signature(RecurrentLayer).parameters
    for name in RecurrentOptions.__annotations__:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == shared[name].default
    parser = ArgumentParser()
    parser.add_class_arguments(cls, "it")
    actions = {a.dest.removeprefix("it."): a for a in parser._actions if a.dest.startswith("it.")}
    assert {name for name in actions if not name.endswith(".help")} == parameters.keys()
    assert all(actions[name].help for name in parameters)
    chosen = parser.parse_args(["--it.input_size=3", "--it.hidden_size=4", "--it.zoneout=0.5"]).it
    assert set(cls(**vars(chosen)).zoneout) == {0.5}

    class Mine(cls):
        def __init__(self, size: int, **options: Unpack[RecurrentOptions]) -> None:
            super().__init__(size, size, **options)

    assert list(inspect.signature(Mine).parameters) == ["size", *RecurrentOptions.__annotations__]
    assert Mine(3, weight_dropout=0.5).noise == {"weight_dropout": 0.5}


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (LSTM, (3, 4, 2, False, True, 0.1, True, 2, "cpu", F64)),
        (GRU, (3, 4, 2, False, True, 0.1, True, "cpu", F64)),
        (RNN, (3, 4, 2, "relu", False, True, 0.1, True, "cpu", F64)),
    ],
)
def test_positional_arguments_are_torchs(cls: type, arguments: tuple[Any, ...]) -> None:
    # torch's own GRU and RNN document device and dtype as positional, but take proj_size there.
    *plain_arguments, device, dtype = arguments
    layer = cls(*arguments)
    plain = getattr(nn, cls.__name__)(*plain_arguments, device=device, dtype=dtype)
    found, wanted = layer.state_dict(), plain.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in found.items()} == {
        k: (v.shape, v.dtype) for k, v in wanted.items()
    }
    for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size"):
        assert getattr(layer, name) == getattr(plain, name)
    refuses("zone", cls, 3, 4, zone=0.1, error=TypeError)


CELL_PLACE = {"l0.cell.gain": 4, "l0.cell.shift": 4}
DEEP: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "normalize": ["input"]}
SUFFIXES = ("l0", "l0_reverse", "l1", "l1_reverse")


@pytest.mark.parametrize(
    ("cls", "norm", "options", "expected"),
    [
        *(
            (cls, norm, options, expected)
            for norm in (LayerNorm(), RMSNorm())
            for cls, options, expected in (
                (LSTM, {}, {"l0.input.gain": 16, "l0.recurrent.gain": 16, **CELL_PLACE}),
                (GRU, {}, {"l0.input.gain": 12, "l0.recurrent.gain": 12}),
                (RNN, {}, {"l0.sum.gain": 4}),
                (GRU, DEEP, {f"{suffix}.input.gain": 12 for suffix in SUFFIXES}),
            )
        ),
        (LSTM, WeightNorm(), {"proj_size": 2}, {"l0.input.scale": 16, "l0.recurrent.scale": 16}),
        (RNN, WeightNorm(), {}, {"l0.input.scale": 4, "l0.recurrent.scale": 4}),
        (GRUCell, WeightNorm(), {"normalize": ("recurrent",)}, {"recurrent.scale": 12}),
    ],
)
def test_names_of_the_norms_parameters(
    cls: type, norm: Norm, options: dict[str, Any], expected: dict[str, int]
) -> None:
    found = cls(3, 4, norm=norm, **options).sites.named_parameters()
    assert {name: tuple(a.shape) for name, a in found} == {
        name: (size,) for name, size in expected.items()
    }


@pytest.mark.parametrize("cls", [*LAYERS, *CELLS, Linear, Conv2d])
def test_scales_follow_fresh_weights(cls: type) -> None:
    module = cls(*((3, 4, 2) if cls is Conv2d else (3, 4)), norm=WeightNorm())
    kinds = {"input": "weight_ih", "recurrent": "weight_hh", "sum": "weight"}
    weights = {n.removesuffix("_l0"): a for n, a in module.named_parameters() if "weight" in n}
    for weight in weights.values():
        nn.init.orthogonal_(weight, gain=2.0)
    before = module.state_dict(keep_vars=True)
    module.reset_norm()
    # In place: an optimiser made before must not lose a parameter.
    assert all(a is before[name] for name, a in module.state_dict(keep_vars=True).items())
    scaled = [m for m in module.modules() if isinstance(m, Site) and "scale" in m._parameters]
    assert len(scaled) == len(weights)
    for site in scaled:
        rows = weights[kinds[site.role]].flatten(1)
        torch.testing.assert_close(site.scale, rows.norm(dim=1))


@every_layer
def test_wrong_inputs_have_torchs_errors(cls: type, loop: str) -> None:
    x = torch.randn(5, 2, 3)
    for norm in (Identity(), LayerNorm()):
        ours = cls(3, 4, num_layers=2, norm=norm)
        theirs = getattr(nn, cls.__name__)(3, 4, num_layers=2)
        for wrong in (torch.randn(5, 2, 4), torch.randn(5, 4), x.double()):
            assert error(ours, wrong) == error(theirs, wrong)
        refuses(f"{cls.__name__}: Expected input to be 2D or 3D", ours, torch.randn(3))
        with pytest.raises(RuntimeError, match="Expected 3, got 4"):
            ours(pack_sequence([torch.randn(5, 4), torch.randn(2, 4)]))
        with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0"):
            ours(torch.randn(0, 2, 3))


@every_layer
@pytest.mark.parametrize("shape", [(1, 2, 4), (2, 3, 4), (2, 2, 5), (2, 4)])
def test_wrong_states_have_torchs_errors(cls: type, shape: tuple[int, ...]) -> None:
    h = torch.randn(shape)
    hx = (h, torch.randn(2, 2, 4) if len(shape) == 3 else h) if cls is LSTM else h
    packed = pack_sequence([torch.randn(5, 3), torch.randn(2, 3)], enforce_sorted=False)
    ours = cls(3, 4, num_layers=2, norm=LayerNorm())
    theirs = getattr(nn, cls.__name__)(3, 4, num_layers=2)
    x = torch.randn(5, 2, 3)
    assert error(ours, x, hx) == error(theirs, x, hx)
    refuses("Expected hidden", ours, packed, hx, error=RuntimeError)


def error(module: nn.Module, *arguments: Any) -> tuple[type, str]:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        module(*arguments)
    return caught.type, str(caught.value)


X, STATE = torch.randn(5, 2, 3), torch.randn(1, 2, 4)


@pytest.mark.parametrize(
    ("module", "x", "hx", "named"),
    [
        (LSTM(3, 4), X, STATE, r"LSTM: hx .*\(h, c\).* tensor"),
        (LSTM(3, 4), X, (STATE,), "LSTM: hx .* tuple of 1"),
        (GRU(3, 4), X, (STATE, STATE), "GRU: hx .* tuple of 2"),
        (LSTMCell(3, 4), X[0], STATE[0], r"LSTMCell: hx .*\(h, c\).* tensor"),
        (RNNCell(3, 4), X[0], (STATE[0],), "RNNCell: hx .* tuple of 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_states_of_other_kinds(module: nn.Module, x: Any, hx: Any, named: str) -> None:
    refuses(named, module, x, hx, error=TypeError)


def test_states_of_another_precision() -> None:
    refuses("dtype", GRU(3, 4, norm=LayerNorm()), X, STATE.double(), error=RuntimeError)


@pytest.mark.parametrize("cls", CELLS)
def test_wrong_arguments_of_cells(cls: type) -> None:
    cell = cls(3, 4, norm=LayerNorm())
    x = torch.randn(2, 3)

    def states(*shape: int) -> Any:
        h = torch.randn(shape)
        return (h, h) if cls is LSTMCell else h

    refuses(f"{cls.__name__}: Expected input to be 1D or 2D, got 3D", cell, torch.randn(1, 2, 3))
    with pytest.raises(RuntimeError, match="input has inconsistent input_size: got 5, expected 3"):
        cell(torch.randn(2, 5))
    for wrong in ((3, 4), (2, 5), (4,)):
        with pytest.raises(RuntimeError, match=r"Expected hidden(\[0\])? size \(2, 4\)"):
            cell(x, states(*wrong))


def test_cells_of_batch_norm_need_the_step() -> None:
    cell = LSTMCell(3, 4, norm=BatchNorm())
    x = torch.randn(5, 3)
    refuses(r"BatchNorm .*step=t", cell, x)
    refuses(r"step .*-1", cell, x, step=-1)
    cell(x, step=3)
    assert cell.sites["input"].num_batches_tracked[:5].tolist() == [0, 0, 0, 1, 0]
    # No step is needed where the norm does not act.
    LSTMCell(3, 4, norm=BatchNorm(), normalize=())(x)


@pytest.mark.parametrize("cls", [*LAYERS, *CELLS])
def test_unknown_places(cls: type) -> None:
    has = "'sum'" if cls in (RNN, RNNCell) else "'recurrent'"
    with pytest.raises(ValueError, match=f"normalize names 'gate'.*{has}"):
        cls(3, 4, norm=LayerNorm(), normalize=("input", "gate"))
    refuses(r"normalize .*'input'", cls, 3, 4, norm=LayerNorm(), normalize="input")


@pytest.mark.parametrize("cls", [*LAYERS, *CELLS, Linear])
@pytest.mark.parametrize("norm", [LayerNorm, "layer", nn.LayerNorm(4), 3])
def test_norm_takes_an_object_only(cls: type, norm: Any) -> None:
    refuses(r"norm must be an instance of .*LayerNorm\(\)", cls, 3, 4, norm=norm, error=TypeError)


def test_torchs_own_checks_of_the_constructor() -> None:
    refuses("proj_size has to be smaller", LSTM, 3, 4, proj_size=4)
    refuses("dropout should be a number", GRU, 3, 4, dropout=2.0)
    for cls in (RNN, RNNCell):
        refuses("Unknown nonlinearity 'gelu'", cls, 3, 4, nonlinearity="gelu")
    with pytest.warns(UserWarning, match="dropout option adds dropout after all but last"):
        GRU(3, 4, dropout=0.2)
