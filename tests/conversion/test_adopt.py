"""Layers of other libraries run on ours in place: the same calls, states and functions."""

from __future__ import annotations

import abc
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import parametrizations
from unchanged import unchanged

import ln_zoo
from ln_zoo import adopt_, to_dialect
from ln_zoo.conversion.formats.adapters import Adapter

F64 = torch.float64
State = tuple[Tensor, Tensor]
#: Rounding of float32 in a few steps.
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}


class ListLSTM(nn.Module):
    """Keys and calls of torchaudio's layer."""

    def __init__(self, size: int, hidden: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.x2g = nn.Linear(size, 4 * hidden, bias=False)
        self.p2g = nn.Linear(hidden, 4 * hidden, bias=False)
        self.c_norm = nn.LayerNorm(hidden, eps=eps)
        self.g_norm = nn.LayerNorm(4 * hidden, eps=eps)
        self.hidden_dim = hidden

    def forward(self, input: Tensor, state: list[Tensor] | None = None) -> Any:
        h = c = input.new_zeros(input.shape[1], self.hidden_dim)
        if state is not None:
            h, c = state
        outputs = []
        for row in input:
            i, f, g, o = self.g_norm(self.x2g(row) + self.p2g(h)).chunk(4, 1)
            c = self.c_norm(f.sigmoid() * c + i.sigmoid() * self.candidate(g))
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), [h, c]

    def candidate(self, g: Tensor) -> Tensor:
        return g.tanh()


class OtherLSTM(ListLSTM):
    candidate = staticmethod(torch.relu)


class NoisyLSTM(ListLSTM):
    def candidate(self, g: Tensor) -> Tensor:
        return nn.functional.dropout(g.tanh(), 0.1, self.training)


class FailingLSTM(ListLSTM):
    def candidate(self, g: Tensor) -> Tensor:
        raise RuntimeError("it wants a GPU")


class NormCell(nn.Module):
    """Keys and calls of the cell of TorchScript's example."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.weight_ih = nn.Parameter(torch.randn(4 * hidden, size))
        self.weight_hh = nn.Parameter(torch.randn(4 * hidden, hidden) / hidden)
        self.layernorm_i = nn.LayerNorm(4 * hidden)
        self.layernorm_h = nn.LayerNorm(4 * hidden)
        self.layernorm_c = nn.LayerNorm(hidden)

    def forward(self, input: Tensor, state: State) -> tuple[Tensor, State]:
        h, c = state
        sums = self.layernorm_i(torch.mm(input, self.weight_ih.t()))
        sums = sums + self.layernorm_h(torch.mm(h, self.weight_hh.t()))
        i, f, g, o = sums.chunk(4, 1)
        c = self.layernorm_c(f.sigmoid() * c + i.sigmoid() * g.tanh())
        h = o.sigmoid() * c.tanh()
        return h, (h, c)


class TupleLSTM(nn.Module):
    """Keys and calls of the layer of TorchScript's example."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.cell = NormCell(size, hidden)

    def forward(self, input: Tensor, state: State) -> tuple[Tensor, State]:
        outputs: list[Tensor] = []
        for row in input.unbind(0):
            output, state = self.cell(row, state)
            outputs.append(output)
        return torch.stack(outputs), state


class DreamGRU(nn.Module):
    def __init__(self, size: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.batch_first = False
        self.linear = nn.Linear(size + hidden, 3 * hidden, bias=bias)
        self.layer_norm = nn.LayerNorm(3 * hidden, eps=1e-4)

    def forward(self, input: Tensor, hx: Tensor) -> Tensor:
        sums = self.layer_norm(self.linear(torch.cat([hx, input], -1)))
        reset, candidate, update = sums.chunk(3, -1)
        update = torch.sigmoid(update - 1)
        return update * torch.tanh(reset.sigmoid() * candidate) + (1 - update) * hx


class Model(nn.Module):
    def __init__(self, cls: type[ListLSTM] = ListLSTM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(3, 5)
        self.layers = nn.ModuleList([cls(5, 6), cls(6, 6)])
        self.gru = nn.GRU(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        x, states = self.front(x), []
        for layer in self.layers:
            x, state = layer(x)
            states += state
        return self.gru(x)[0], states


LIST = dict.fromkeys((ListLSTM, OtherLSTM, NoisyLSTM, FailingLSTM), "torchaudio")


def rows(steps: int = 7, size: int = 3) -> Tensor:
    return torch.randn(steps, 4, size, generator=torch.Generator().manual_seed(1))


def reasons(report: Any) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.refused}


def test_a_model_computes_the_same_with_the_same_objects() -> None:
    model = Model().eval()
    plain = copy.deepcopy(model)
    layers, random = list(model.layers), torch.get_rng_state()
    report = adopt_(model, classes=LIST)
    assert torch.equal(torch.get_rng_state(), random)
    assert [layer.name for layer in report.layers] == ["layers.0", "layers.1", "gru"]
    assert [layer.dialect for layer in report.layers] == ["torchaudio"] * 2 + ["torch"]
    assert not report.refused
    for layer in model.layers:
        assert isinstance(layer, ListLSTM)
        assert isinstance(layer, Adapter)
        assert layer.hidden_dim == 6
        assert layer.candidate(torch.ones(1)) == torch.ones(1).tanh()
    assert list(model.layers) == layers
    assert all(layer.speedup > 0 for layer in report.layers)
    assert all(name in str(report) for name in ("layers.0", "ListLSTM", "joint norm", "gru"))
    (found, states), (expected, plain_states) = model(rows()), plain(rows())
    torch.testing.assert_close(found, expected, **CLOSE)
    assert [s.shape for s in states] == [s.shape for s in plain_states]
    torch.testing.assert_close(states, plain_states, **CLOSE)
    assert set(report.new_parameters) == {n for n, _ in model.named_parameters() if ".layer." in n}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(rows())[0], found)
        assert type(other.layers[0]) is type(model.layers[0])


def test_gradients_and_training() -> None:
    plain = Model().double()
    model = copy.deepcopy(plain)
    adopt_(model, classes=LIST)
    assert model.layers[0].layer.weight_ih_l0.dtype == F64
    changed = []
    for each in (plain, model):
        x = rows().double().requires_grad_()
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x)[0].square().sum().backward()
        optimizer.step()
        changed.append((x.grad, each(x)[0]))
    torch.testing.assert_close(changed[0], changed[1], rtol=1e-10, atol=1e-12)


def test_weights_go_back_into_a_fresh_model() -> None:
    model = Model().eval()
    expected = model(rows())[0]
    adopt_(model, classes=LIST)
    assert "layers.0.layer.weight_ih_l0" in model.state_dict()
    fresh = Model().eval()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    fresh.load_state_dict(to_dialect("torchaudio", model))
    torch.testing.assert_close(fresh(rows())[0], expected, **CLOSE)
    refuses(r"layers\.0.*'torchaudio'.*'haste'", to_dialect, "haste", model)
    refuses("Linear", to_dialect, "torchaudio", nn.Linear(2, 3), error=TypeError)


def test_hooks_on_a_layer_stay_as_do_its_mode_and_frozen_weights() -> None:
    model = Model().train()
    model.layers[1].eval().requires_grad_(False)
    seen: list[int] = []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    adopt_(model, classes=LIST)
    assert not seen  # Comparisons are not calls.
    model(rows())
    assert seen == [1]
    assert model.layers[0].layer.training
    assert not model.layers[1].layer.training
    assert not any(p.requires_grad for p in model.layers[1].parameters())


def test_the_model_may_be_the_layer() -> None:
    """And a sequence in two pieces, with a state in the library's form, is the whole sequence."""
    layer = ListLSTM(5, 6).eval()
    x = rows(size=5)
    expected = layer(x)
    adopt_(layer, classes=LIST)
    torch.testing.assert_close(layer(x), expected, **CLOSE)
    first, state = layer(x[:3])
    assert isinstance(state, list)
    second, state = layer(x[3:], state)
    torch.testing.assert_close((torch.cat([first, second]), state), expected, **CLOSE)
    # A layer in two places stays one.
    layer = ListLSTM(5, 5)
    model = nn.ModuleDict({"a": layer, "b": nn.ModuleList([layer])})
    report = adopt_(model, classes=LIST)
    assert len(report.layers) == 1
    assert model["a"] is model["b"][0] is layer
    assert isinstance(layer, Adapter)


@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_keeps_its_call(bias: bool) -> None:
    model = nn.ModuleDict({"cell": DreamGRU(3, 5, bias)})
    plain = copy.deepcopy(model)
    adopt_(model, classes={DreamGRU: "sheeprl"})
    x, h = rows(1)[0], torch.randn(4, 5)
    torch.testing.assert_close(model["cell"](x, h), plain["cell"](x, h), **CLOSE)
    three = model["cell"](x.unsqueeze(0), h.unsqueeze(0))
    torch.testing.assert_close(three, plain["cell"](x, h).unsqueeze(0), **CLOSE)
    refuses("time step", model["cell"], rows(2), h)
    plain.load_state_dict(to_dialect("sheeprl", model))


@pytest.mark.parametrize("scripted", [False, True])
def test_layers_and_cells_of_torchscript(scripted: bool) -> None:
    """Scripted modules are replaced where the model holds them."""
    torch.manual_seed(0)
    layer: nn.Module = TupleLSTM(3, 5)
    if scripted:
        layer = torch.jit.script(layer)
    model = nn.ModuleDict({"rnn": layer, "again": layer, "cell": NormCell(3, 5)}).eval()
    state = (torch.randn(4, 5), torch.randn(4, 5))
    expected = model["rnn"](rows(), state), model["cell"](rows()[0], state)
    report = adopt_(model, classes={TupleLSTM: "torchscript", NormCell: "torchscript"})
    assert [each.name for each in report.layers] == ["rnn", "cell"]
    assert model["rnn"] is model["again"]
    assert isinstance(model["rnn"], Adapter)
    found = model["rnn"](rows(), state), model["cell"](rows()[0], state)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert isinstance(found[0][1], tuple)


# torch's own layers


def test_torchs_layers_stay_instances_of_torchs_classes() -> None:
    layers = {
        "lstm": nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
        "gru": nn.GRU(3, 4, batch_first=True),
        "rnn": nn.RNN(3, 4, nonlinearity="relu"),
        "cell": nn.LSTMCell(3, 4),
    }
    model = nn.ModuleDict(layers)
    plain = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    report = adopt_(model)
    assert not report.new_parameters
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    for name in ("lstm", "gru", "rnn"):
        assert isinstance(model[name], type(plain[name]))
        assert isinstance(model[name], ln_zoo.layers.RecurrentLayer)
        torch.testing.assert_close(model[name](rows()), plain[name](rows()), **CLOSE)
    torch.testing.assert_close(model["cell"](rows()[0]), plain["cell"](rows()[0]), **CLOSE)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again["lstm"](rows()), plain["lstm"](rows()), **CLOSE)
    refuses("no layer to convert", adopt_, model)
    ln_zoo.denormalize_(model)
    assert all(type(model[name]) is type(plain[name]) for name in model)
    empty = nn.ModuleList([nn.LSTM(3, 4, device="meta")])
    assert math.isnan(adopt_(empty).layers[0].speedup)
    assert empty[0](torch.empty(2, 3, 3, device="meta"))[0].shape == (2, 3, 4)


class Doubling(nn.LSTM):
    def forward(self, input: Tensor, hx: Any = None, times: float = 2.0) -> Any:  # type: ignore[override]
        output, states = super().forward(input, hx)
        return times * output, states

    def start(self) -> int:
        return self.hidden_size


class Elsewhere(nn.LSTM):
    """A subclass that does not ask the class after it."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return nn.LSTM.forward(self, input, hx)


def test_subclasses_of_torchs_layers_on_request() -> None:
    model = nn.ModuleDict({"a": Doubling(3, 4), "b": Elsewhere(3, 4), "c": nn.GRU(3, 4)})
    plain = copy.deepcopy(model)
    assert set(reasons(adopt_(copy.deepcopy(model)))) == {"a", "b"}
    report = adopt_(model, subclasses=True)
    assert [layer.name for layer in report.layers] == ["a", "c"]
    assert "super()" in reasons(report)["b"]
    layer = model["a"]
    assert isinstance(layer, Doubling)
    assert isinstance(layer, ln_zoo.LSTM)
    assert layer.start() == 4
    torch.testing.assert_close(layer(rows(), times=3.0), plain["a"](rows(), times=3.0), **CLOSE)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(rows())[0], layer(rows())[0])
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_classes_that_cannot_be_exchanged_or_are_unknown() -> None:
    """Python refuses some classes, such as those whose first base is abstract."""

    class AbstractLSTM(abc.ABC, ListLSTM):
        pass

    model = nn.ModuleList([ListLSTM(3, 4), AbstractLSTM(4, 4)])
    report = adopt_(model, classes={**LIST, AbstractLSTM: "torchaudio"})
    assert [layer.name for layer in report.layers] == ["0"]
    assert "class" in reasons(report)["1"]
    assert type(model[1]) is AbstractLSTM
    # Unknown ones are named with what to do.
    custom, peephole = (type(n, (ListLSTM,), {})(3, 4) for n in ("_CustomLSTM", "MyPeepholeLSTM"))
    found = reasons(adopt_(nn.ModuleDict({"a": custom, "b": peephole, "c": nn.RNN(2, 2)})))
    assert "MyPeepholeLSTM" in found["b"]
    assert "classes={_CustomLSTM: 'torchaudio'}" in found["a"]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(OtherLSTM, "torchaudio"), (NoisyLSTM, "torchaudio"), (FailingLSTM, "it wants a GPU")],
)
def test_another_function_is_refused(cls: type[ListLSTM], reason: str) -> None:
    model = Model(cls).eval()
    with unchanged(model.layers):
        report = adopt_(model, classes=LIST)
    assert [layer.name for layer in report.layers] == ["gru"]
    assert all(reason in reasons(report)[f"layers.{k}"] for k in range(2))
    assert type(model.layers[0]) is cls


def _tied(model: Model) -> None:
    model.layers[0].g_norm.weight = nn.Parameter(torch.ones(24))
    model.other = nn.LayerNorm(24)
    model.other.weight = model.layers[0].g_norm.weight


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda m: quantize_dynamic(m.layers[0], {nn.Linear}, inplace=True), "quantised"),
        (lambda m: parametrizations.weight_norm(m.layers[0].x2g), "parametrised"),
        (lambda m: m.layers[0].g_norm.register_forward_hook(print), "g_norm in it has hooks"),
        (lambda m: m.layers[0].g_norm.weight.register_hook(print), "g_norm.weight has hooks"),
        (lambda m: m.layers[0].register_state_dict_pre_hook(print), "state dict"),
        (_tied, "tied to other.weight"),
        (lambda m: m.add_module("other", nn.ModuleList([m.layers[0].p2g])), "also part of other"),
        (lambda m: m.layers[0].p2g.weight.requires_grad_(False), "frozen"),
        (lambda m: setattr(m.layers[0], "forward", print), "forward"),
        (lambda m: m.layers[0].compile(), "compiled"),
        (lambda m: m.layers[0].to("meta"), "meta"),
        (lambda m: m.layers[0].add_module("spare", nn.Linear(2, 2)), "spare"),
        (lambda m: setattr(m.layers[0].c_norm, "eps", 1e-5), "differs from the dialect"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_that_would_lose_something_are_left_alone(change: Any, word: str) -> None:
    model = Model()
    change(model)
    report = adopt_(model, classes=LIST)
    assert [layer.name for layer in report.layers] == ["layers.1", "gru"]
    assert word in reasons(report)["layers.0"]
    assert type(model.layers[0]) is ListLSTM
    assert "layers.0" in str(report)


def test_layers_inside_a_scripted_module_are_refused() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = TupleLSTM(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            zeros = torch.zeros(x.size(1), 5)
            return self.rnn(x, (zeros, zeros))[0]

    model = nn.ModuleDict({"in": torch.jit.script(Around()), "gru": nn.GRU(3, 4)})
    report = adopt_(model, classes={TupleLSTM: "torchscript"})
    assert "torch.jit" in reasons(report)["in.rnn"]
    scripted = torch.jit.script(TupleLSTM(3, 5))
    refuses(r"torch\.jit", adopt_, scripted, classes={TupleLSTM: "torchscript"})


@pytest.mark.parametrize(
    ("model", "options", "error", "named"),
    [
        ([nn.LSTM(2, 3)], {}, TypeError, "list"),
        (nn.Linear(2, 3), {}, ValueError, "no layer"),
        (Model(), {"include": "decoder"}, ValueError, r"'decoder'.*gru"),
        (Model(), {"classes": {ListLSTM: "torchaudi"}}, ValueError, "'torchaudi'.*'torchaudio'"),
        (Model(), {"classes": {ListLSTM: "haste"}}, ValueError, "'haste'.*torchaudio"),
        (Model(OtherLSTM), {"classes": LIST, "exclude": "gru"}, ValueError, r"layers\.0"),
        (nn.DataParallel(Model()), {"classes": LIST}, ValueError, "DataParallel"),
    ],
    ids=["list", "no layer", "no match", "unknown dialect", "no class", "none left", "wrapped"],
)
def test_wrong_arguments(model: Any, options: dict, error: type[Exception], named: str) -> None:
    refuses(named, adopt_, model, error=error, **options)


def test_include_and_exclude() -> None:
    model = Model()
    report = adopt_(model, classes=LIST, include="layers", exclude="layers.1")
    assert [layer.name for layer in report.layers] == ["layers.0"]
    assert type(model.layers[1]) is ListLSTM
    assert type(model.gru) is nn.GRU
