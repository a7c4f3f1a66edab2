"""Plain layers of any model become normalised ones in place, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reference import Direction, layer_norm, run
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_sequence
from unchanged import unchanged

import ln_zoo
from ln_zoo.conversion import Conversion, calibrate, denormalize_, normalize_
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm

F64 = torch.float64
NORMS = [LayerNorm(), RMSNorm(), BatchNorm(), WeightNorm(), Identity()]
every_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_STEPS", 2)


class Many(nn.Module):
    """A layer of each kind, some of them several times and in each other."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(2))
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.projected = nn.LSTM(10, 5, proj_size=3, batch_first=True, bias=False)
        self.gru = nn.GRU(3, 5, batch_first=True)
        self.rnn = nn.RNN(5, 5, nonlinearity="relu", batch_first=True)
        self.cells = nn.ModuleList([nn.LSTMCell(5, 5), nn.GRUCell(5, 5), nn.RNNCell(5, 5)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.front(x).mean(2).unsqueeze(-1) * torch.ones(6, dtype=x.dtype)
        for layer in (self.lstm, self.projected, self.gru, self.rnn):
            a, _ = layer(a)
        h: Any = None
        state = other = None
        for step in a.unbind(1):
            h = self.cells[0](step, h)
            state = self.cells[1](h[0], state)
            other = self.cells[2](state, other)
        return self.head(other)


def images(count: int = 8) -> Tensor:
    return torch.randn(count, 1, 6, 6, dtype=F64, generator=torch.Generator().manual_seed(3))


def many(seed: int = 0) -> Many:
    torch.manual_seed(seed)
    return Many().double()


def test_every_kind_of_layer_in_place() -> None:
    model = many()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, before = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    report = normalize_(model, LayerNorm())
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.name for layer in report.layers] == [
        "front.0", "lstm", "projected", "gru", "rnn", "cells.0", "cells.1", "cells.2", "head",
    ]  # fmt: skip
    assert not report.refused
    for layer in report.layers:
        now = model.get_submodule(layer.name)
        assert now is modules[layer.name]
        assert type(now).__module__.startswith("ln_zoo.layers")
        assert layer.before == f"torch.nn.{type(now).__name__}"
        assert layer.after == f"ln_zoo.{type(now).__name__}, LayerNorm()"
    for name, parameter in parameters.items():
        assert model.get_parameter(name) is parameter
        assert torch.equal(parameter, before[name])
    assert set(report.new_parameters) == set(dict(model.named_parameters())) - set(parameters)
    assert "lstm.sites.l1_reverse.cell.shift" in report.new_parameters
    # What is trained is what the optimizer has, and what it is given beside it.
    optimizer.add_param_group({"params": report.new_parameters.values()})
    model(images()).square().mean().backward()
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert len(moved) > len(parameters)


@every_norm
def test_the_layer_is_the_one_that_would_be_built(norm: Norm) -> None:
    torch.manual_seed(1)
    plain = nn.LSTM(3, 4, 2, bidirectional=True, dtype=F64)
    ours = ln_zoo.LSTM(3, 4, 2, bidirectional=True, dtype=F64, norm=norm)
    ours.load_state_dict(plain.state_dict(), strict=False)
    ours.reset_norm()
    normalize_(plain, norm)
    assert type(plain) is ln_zoo.LSTM
    x = torch.randn(5, 6, 3, dtype=F64)
    assert torch.equal(plain(x)[0], ours(x)[0])
    packed = pack_sequence([x[:4, 0], x[:2, 1]])
    assert torch.equal(plain.eval()(packed)[0].data, ours.eval()(packed)[0].data)
    assert plain.state_dict().keys() == ours.state_dict().keys()


@every_norm
def test_calibration_keeps_outputs_close(norm: Norm) -> None:
    model = many()
    x = images()
    outputs = model.eval()(x)
    model.train()
    exclude = "cells" if norm.per_timestep else ()
    report = normalize_(model, norm, exclude=exclude, calibrate=x)
    assert all(module.training for module in model.modules())
    found = model.eval()(x)
    gap = ((found - outputs).square().sum() / outputs.square().sum()).sqrt().item()
    assert report.distance == pytest.approx(gap, rel=1e-6)
    if isinstance(norm, WeightNorm | Identity):
        assert max(report.distance, report.distance_before) < 1e-12
    else:
        assert report.distance < report.distance_before / 2


def test_batch_norm_is_undone_exactly() -> None:
    """On its own batch it is an affine map of each feature, which gains and biases undo."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.randn(50, 4, dtype=F64)
    outputs = model(x)
    report = normalize_(model, BatchNorm(), calibrate=x)
    assert report.distance < 1e-4
    torch.testing.assert_close(model.eval()(x), outputs, rtol=1e-4, atol=1e-4)

    # A norm of one's own is calibrated too.
    class Halved(Norm):
        def init_params(self, site: Site) -> None:
            site.add_affine(1.0)

        def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
            return site.affine(a / 2)

    model = nn.GRU(3, 4)
    report = normalize_(model, Halved(), calibrate=torch.randn(5, 6, 3))
    assert report.distance < 1e-4
    assert torch.allclose(model.sites["l0"]["input"].gain, torch.full((12,), 2.0), atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_gains_and_biases_are_those_of_least_squares(bias: bool) -> None:
    """Against `numpy`'s solution, a feature at a time; the second layer corrects the first."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6, bias), nn.Tanh(), nn.Linear(6, 6, bias)).double()
    plain, x = copy.deepcopy(model).requires_grad_(False), torch.randn(40, 4, dtype=F64)
    normalize_(model, LayerNorm(eps=0.0), calibrate=x)
    model.requires_grad_(False)
    for k, given, wanted in ((0, x, x), (2, model[:2](x), plain[:2](x))):
        layer, weight = model[k], plain[k].weight
        z, target = layer_norm(given @ weight.T, 0.0), (wanted @ weight.T).numpy()
        for j in range(6):
            columns = [z[:, j].numpy(), np.ones(40)] if bias else [z[:, j].numpy()]
            expected = np.linalg.lstsq(np.stack(columns, 1), target[:, j], rcond=None)[0]
            assert layer.site.gain[j].item() == pytest.approx(expected[0], rel=1e-4)
            if bias:
                moved = (layer.bias[j] - plain[k].bias[j]).item()
                assert moved == pytest.approx(expected[1], rel=1e-3, abs=1e-5)


def test_a_layer_is_fitted_on_the_plain_ones_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both terms of an LSTM together, and its cell state."""
    monkeypatch.setattr(calibrate, "_STEPS", 0)
    torch.manual_seed(4)
    model, x = nn.LSTM(3, 4, dtype=F64), torch.randn(6, 5, 3, dtype=F64)
    w, u = model.weight_ih_l0.detach().clone(), model.weight_hh_l0.detach().clone()
    b = (model.bias_ih_l0 + model.bias_hh_l0).detach().clone()
    normalize_(model, LayerNorm(eps=1e-9), calibrate=(x,))
    seen: dict[str, list[Tensor]] = {"input": [], "recurrent": [], "cell": []}
    notes = {
        role: lambda a, t, rows=rows: rows.append(a) or a  # type: ignore[misc]
        for role, rows in seen.items()
    }
    zeros = torch.zeros(5, 4, dtype=F64)
    run(Direction("LSTM", w, u, b, sites=notes), x.unbind(1), zeros, zeros)
    wx, uh, c = (torch.cat(rows) for rows in seen.values())

    one = torch.ones(30, dtype=F64)
    sites, total = model.sites["l0"], (model.bias_ih_l0 + model.bias_hh_l0).detach() - b
    cell = sites["cell"]
    for terms, wanted, found in (
        ((wx, uh), wx + uh, (sites["input"].gain, sites["recurrent"].gain, total)),
        ((c,), c, (cell.gain, cell.shift)),
    ):
        for j, fitted in enumerate(torch.stack(found, 1).detach()):
            columns = torch.stack([*(layer_norm(a, 1e-9)[:, j] for a in terms), one], 1)
            expected = torch.linalg.lstsq(columns, wanted[:, j]).solution
            torch.testing.assert_close(fitted, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()], ids=["LayerNorm", "BatchNorm"])
def test_descent_comes_closer_without_traces(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    model, x = nn.LSTM(3, 8, num_layers=2, dtype=F64), torch.randn(6, 5, 3, dtype=F64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    model.weight_hh_l0.requires_grad_(False)
    model.bias_ih_l0.grad = torch.ones_like(model.bias_ih_l0)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if "weight" in n}
    distances = []
    for steps in (0, 30):
        monkeypatch.setattr(calibrate, "_STEPS", steps)
        distances.append(normalize_(copy.deepcopy(model), norm, calibrate=x).layers[0].distance)
    assert distances[1] < (0.8 if isinstance(norm, LayerNorm) else 0.97) * distances[0]
    monkeypatch.setattr(calibrate, "_STEPS", 2)
    normalize_(model, norm, calibrate=x)
    assert torch.equal(model.bias_ih_l0.grad, torch.ones_like(model.bias_ih_l0))
    for name, p in model.named_parameters():
        assert p.requires_grad == (name != "weight_hh_l0")
        assert name == "bias_ih_l0" or p.grad is None
        if name in weights:
            assert torch.equal(p, weights[name])


def test_positions_come_from_the_calibration_batch() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2)).double()
    norm = LayerNorm(convolution="unit")
    report = normalize_(copy.deepcopy(model), norm)
    assert [layer.name for layer in report.refused] == ["0"]
    assert "positions" in report.refused[0].reason
    report = normalize_(model, norm, include="0", calibrate=images(30))
    assert model[0].site.gain.shape == (2, 4, 4)
    assert report.distance < report.distance_before / 2


def test_patterns_choose_layers_by_name_and_the_report_is_a_table() -> None:
    model = nn.ModuleDict({"encoder": many(), "decoder": many(), "out": nn.Linear(3, 3)})
    report = normalize_(model, RMSNorm(), include=["encoder.*", "out"], exclude="*.cells")
    names = [layer.name for layer in report.layers]
    assert names[:2] == ["encoder.front.0", "encoder.lstm"]
    assert names[-2:] == ["encoder.head", "out"]
    assert not any("cells" in name or name.startswith("decoder") for name in names)
    report = normalize_(many(), LayerNorm(), include="lstm", calibrate=images())
    assert isinstance(report, Conversion)
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "was", "is", "distance", "calibrated"]
    assert lines[1].split()[:4] == ["lstm", "torch.nn.LSTM", "ln_zoo.LSTM,", "LayerNorm()"]
    assert lines[2].startswith("outputs of the model")
    assert report.layers[0].distance is not None


def test_what_users_gave_a_layer_stays_and_shared_layers_are_one() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[0].note = "mine"
    model[0].eval()
    normalize_(model, LayerNorm())
    model(torch.randn(2, 3))
    assert (calls, model[0].note) == ([1], "mine")
    assert not model[0].training
    assert not model[0].site.training
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    report = normalize_(model, LayerNorm(), calibrate=torch.randn(20, 4))
    assert len(report.layers) == 1
    assert model[0] is model[2] is shared


def test_batches_are_arguments_or_a_function() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 4)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"y": self.rnn(x)[0] * scale}

    x, scale = torch.randn(5, 2, 3), torch.ones(())
    reports = []
    for batch in ((x, scale), [x, scale], lambda model: model(x=x, scale=scale)):
        torch.manual_seed(0)
        reports.append(normalize_(Two(), LayerNorm(), calibrate=batch).distance)
    assert reports[0] is not None
    assert reports[0] == reports[1] == reports[2]


def tied() -> nn.Module:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "out": nn.Linear(4, 5)})
    model["out"].weight = model["embedding"].weight
    return model


def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    change(model[0])
    return model


def integer(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)


QUANTISED = torch.ao.nn.quantized.dynamic.Linear
PARAMETRISED = "parametrised: torch.nn.utils.parametrize.remove_parametrizations"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "already": (lambda: ln_zoo.Linear(4, 4, norm=RMSNorm()), "normalised already, by RMSNorm()"),
    "before torch's": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)),
        "already, by BatchNorm2d",
    ),
    "tied": (tied, "tied to embedding.weight"),
    "parametrised": (lambda: changed(parametrizations.weight_norm), PARAMETRISED),
    "pruned": (lambda: changed(lambda m: prune.l1_unstructured(m, "weight", 0.5)), "prune"),
    "quantised": (lambda: nn.Sequential(QUANTISED(4, 4)), "quantised: convert the model first"),
    "integer": (lambda: changed(integer), "torch.int8"),
    "lazy": (lambda: nn.LazyLinear(4), "call the model once first"),
    "subclass": (lambda: type("MyLinear", (nn.Linear,), {})(4, 4), "subclass, MyLinear"),
    "read past it": (lambda: nn.TransformerEncoderLayer(4, 2, 8), "EncoderLayer reads its weights"),
    "of ours": (lambda: ln_zoo.layers.WindowLSTM(2, 3, 4), "part of WindowLSTM, which takes norm="),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    model = build()
    before = {n: type(m) for n, m in model.named_modules()}
    # A window layer has a plain torch layer of its own, which it does call.
    exclude = "window" if name == "of ours" else ()
    assert reason in refuses("can be normalised", normalize_, model, LayerNorm(), exclude=exclude)
    assert {n: type(m) for n, m in model.named_modules()} == before
    # Beside a layer that can be converted it stays, and the report says why.
    both = nn.ModuleDict({"it": model, "other": nn.Linear(3, 3)})
    exclude = "it.window" if name == "of ours" else ()
    report = normalize_(both, LayerNorm(), exclude=exclude)
    assert [layer.name for layer in report.layers] == ["other"]
    reason = reason.replace("embedding", "it.embedding")
    assert any(reason in layer.reason for layer in report.refused)
    assert "not converted: it" in str(report)


@pytest.mark.parametrize(
    ("model", "options", "error", "named"),
    [
        (nn.Sequential(nn.ReLU(), nn.Embedding(3, 4)), {}, ValueError, "LSTM, GRU"),
        (nn.Sequential(nn.Linear(2, 2)), {"include": "decoder"}, ValueError, "'decoder'.*'0'"),
        (nn.Sequential(nn.Linear(2, 2)), {"exclude": "*"}, ValueError, "patterns"),
        (nn.DataParallel(nn.Linear(2, 2)), {}, ValueError, "convert .*wrap"),
        (nn.LSTMCell(2, 3), {"norm": BatchNorm()}, ValueError, "ln_zoo's cell with step=t"),
        (nn.Linear(2, 2), {"norm": LayerNorm}, TypeError, "LayerNorm"),
        ({}, {}, TypeError, "dict"),
    ],
    ids=["no layer", "no match", "all excluded", "wrapped", "steps", "class", "dict"],
)
def test_wrong_arguments(model: Any, options: dict, error: type[Exception], named: str) -> None:
    refuses(named, normalize_, model, error=error, **{"norm": LayerNorm(), **options})


def test_a_failed_calibration_leaves_the_model_as_it_was() -> None:
    model = many()
    before = copy.deepcopy(model)
    passes = []

    def fails_at_the_third(model: nn.Module) -> Tensor:
        passes.append(1)
        out: Tensor = model(images())
        if len(passes) == 3:
            raise RuntimeError("out of memory")
        return out

    with unchanged(model), pytest.raises(RuntimeError, match="out of memory"):
        normalize_(model, LayerNorm(), calibrate=fails_at_the_third)
    assert [type(each) for each in model.modules()] == [type(each) for each in before.modules()]
    assert torch.equal(model.eval()(images()), before.eval()(images()))


@pytest.mark.parametrize("norm", [WeightNorm(), Identity()], ids=["WeightNorm", "Identity"])
def test_back_to_torchs_layers(norm: Norm) -> None:
    model = many()
    classes = [type(module) for module in model.modules()]
    normalize_(model, norm)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                parameter.mul_(1.5)
    parameters = dict(model.named_parameters())
    expected = model.eval()(images())
    report = denormalize_(model)
    assert len(report.layers) == 9
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter is parameters[n] for n, parameter in model.named_parameters())
    assert model.state_dict().keys() == many().state_dict().keys()
    torch.testing.assert_close(model(images()), expected, rtol=1e-12, atol=1e-12)
    # They are torch's in every way: a new one loads them, and they are pickled without us.
    many().load_state_dict(model.state_dict())
    assert vars(model.lstm).keys() == vars(many().lstm).keys()
    assert vars(model.cells[0]).keys() == vars(many().cells[0]).keys()


def test_what_torch_does_not_compute_stays() -> None:
    layers = {
        "normalised": ln_zoo.GRU(2, 3, norm=LayerNorm(eps=1e-3)),
        "peephole": ln_zoo.LSTM(2, 3, peephole=True),
        "bounded": ln_zoo.LSTMCell(2, 3, derivative_bound=1.0),
        "noisy": ln_zoo.GRU(2, 3, zoneout=0.1, weight_dropout=0.2),
        "torch": nn.Linear(2, 2),
        "plain": ln_zoo.Linear(2, 2),
    }
    model = nn.ModuleDict(layers)
    report = denormalize_(model)
    assert [layer.name for layer in report.layers] == ["plain"]
    reasons = {layer.name: layer.reason for layer in report.refused}
    assert reasons["normalised"].startswith("LayerNorm(eps=0.001) normalises summed inputs")
    assert "peepholes" in reasons["peephole"]
    assert "clipped derivatives" in reasons["bounded"]
    assert reasons["noisy"] == "torch has no zoneout or weight_dropout"
    assert "torch's already" in reasons["torch"]
    normalize_(model, RMSNorm(), include=["noisy", "peephole"])
    assert model["noisy"].zoneout == (0.1,)
    assert model["peephole"].weight_peephole_l0.shape == (3, 3)
    refuses("can become plain: normalised", denormalize_, model, exclude="plain")
    shared = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "out": ln_zoo.Linear(4, 5)})
    normalize_(shared, WeightNorm())
    shared["embedding"].weight = shared["out"].weight
    refuses(r"tied to embedding.weight, which would change", denormalize_, shared)


def test_a_linear_inside_a_layer_that_normalises_is_converted_with_a_warning() -> None:
    class NormGRU(nn.ModuleDict):
        pass

    class SpeechRNNT(nn.ModuleDict):
        """Not a layer: it has one."""

    rnn = NormGRU({"linear": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
    plain = type("PlainGRU", (nn.ModuleDict,), {})({"linear": nn.Linear(3, 4)})
    model = SpeechRNNT({"rnn": rnn, "plain": plain, "head": nn.Linear(4, 2)})
    with pytest.warns(UserWarning, match=r"rnn\.linear.*NormGRU.*twice") as caught:
        report = normalize_(model, LayerNorm())
    assert [layer.name for layer in report.layers] == ["rnn.linear", "plain.linear", "head"]
    assert len(caught) == 1
