"""Measuring with batch statistics, and population statistics against whole sets in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from layer_results import LAYERS
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from unchanged import unchanged

from ln_zoo.layers import LSTM, RNN, Conv2d, Linear, LSTMCell
from ln_zoo.norms import (
    BatchNorm,
    LayerNorm,
    Norm,
    Site,
    batch_dependent,
    batch_statistics,
    keeps_statistics,
    population_statistics,
)

F64 = torch.float64
METHODS = ["average", "total_variance"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def close(actual: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-11, atol=1e-13)


def measure(model: nn.Module, method: str, batches: Iterable[Any]) -> None:
    with population_statistics(model, method):
        for batch in batches:
            model(batch)


def assert_statistics(site: Site, method: str, sums: list[list[np.ndarray]]) -> None:
    """Compare a site without time steps with the statistics of these sums."""
    mean, var = REFERENCES[method](sums, 1)
    close(site.running_mean, mean[0])
    close(site.running_var, var[0])


def seen(site: Site, run) -> list[list[np.ndarray]]:
    """What came to a site while batches ran by the generic loop: of each batch, of each step.

    A step of one example has no statistics and is left out.
    """
    batches: list[list[np.ndarray]] = []

    def note(_, arguments: tuple) -> None:
        a, step = (*arguments, None)[:2]
        if not step:
            batches.append([])
        if len(a) > 1:
            batches[-1].append(a.detach().double().numpy().copy())

    handle = site.register_forward_pre_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LN_ZOO_KERNELS", "0")
        run()
    handle.remove()
    return batches


def by_average(batches: list[list[np.ndarray]], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Averages of means and biased variances by examples; short series repeat their last entry."""
    longest = max(map(len, batches))
    series = [steps + [steps[-1]] * (longest - len(steps)) for steps in batches]
    found = []
    for row in range(min(rows, longest)):
        steps = [row] if row < rows - 1 else range(row, longest)
        entries = [s[t] for s in series for t in steps]
        moments = [(a.mean(0), a.var(0)) for a in entries]
        found.append(np.average(moments, 0, weights=[len(a) for a in entries]))
    mean, var = np.array(found).transpose(1, 0, 2)
    return mean, var


def by_total(batches: list[list[np.ndarray]], rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and biased variance of all examples at once; late steps share the last row."""
    longest = max(map(len, batches))
    found = []
    for row in range(min(rows, longest)):
        steps = [row] if row < rows - 1 else range(row, longest)
        examples = np.concatenate([b[t] for b in batches for t in steps if t < len(b)])
        found.append((examples.mean(0), examples.var(0)))
    mean, var = np.array(found).transpose(1, 0, 2)
    return mean, var


REFERENCES = {"average": by_average, "total_variance": by_total}


@pytest.mark.parametrize("cls", LAYERS)
def test_outputs_are_those_of_training_and_nothing_moves(loop: str, cls: type) -> None:
    layer = cls(3, 4, num_layers=2, dropout=0.5, norm=BatchNorm(max_steps=6), dtype=F64)
    x = torch.randn(5, 7, 3, dtype=F64)
    layer(x)
    # Dropout stays off: it belongs to the layer, whose mode is left alone.
    twin = cls(3, 4, num_layers=2, norm=BatchNorm(max_steps=6), dtype=F64)
    twin.load_state_dict(layer.state_dict())
    expected, _ = twin(x)
    with unchanged(layer.eval()), batch_statistics(layer):
        assert not layer.training
        output, _ = layer(x)
        again, _ = layer(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)
    assert torch.equal(output, again)


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_training_goes_on_as_if_nothing_had_been_measured(loop: str, no_grad) -> None:
    """Validation runs in inference mode, whose tensors training must not meet."""
    layers = [LSTM(3, 4, norm=BatchNorm(max_steps=6), dtype=F64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, other = torch.randn(2, 5, 7, 3, dtype=F64)
    for layer in layers:
        layer(x)
    with no_grad(), batch_statistics(layers[0]):
        layers[0](other)
    for layer in layers:
        output, _ = layer(x)
        output.sum().backward()
    assert equal(state(layers[0]), state(layers[1]))


def test_modes_are_put_back_one_by_one_and_after_an_error() -> None:
    model = nn.Sequential(Linear(5, 4, norm=BatchNorm()), Linear(4, 3, norm=BatchNorm()))
    model[0].site.eval()
    x = torch.randn(6, 5)
    with unchanged(model), batch_statistics(model):
        assert model[0].site.training
        model(x)
    with unchanged(model), batch_statistics(model):
        model(x)
        refuses("at least 2 examples", model, x[:1])
    model[0].site.train()
    model(x)  # and running averages move again
    assert int(model[0].site.num_batches_tracked) == 1


@dataclass(frozen=True)
class Own(Norm):
    """A user's norm, which knows nothing of observers and replaces its buffer."""

    batch_dependent: ClassVar[bool] = True

    def init_params(self, site: Site) -> None:
        site.add_buffer("scale", (site.features,), 1.0)
        site.add_buffer("calls", (), 0, dtype=torch.int64)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        if site.training:
            site.scale = 0.9 * site.scale + 0.1 * a.detach().abs().mean(0)
            site.calls += 1
            return a / a.abs().mean(0)
        return a / site.scale


def test_a_norm_that_knows_nothing_of_it_is_put_back() -> None:
    layer = Linear(5, 4, norm=Own())
    layer(torch.randn(8, 5))
    before, buffers = state(layer), dict(layer.site.named_buffers())
    x = torch.randn(8, 5)
    with torch.inference_mode(), batch_statistics(layer.eval()):
        output = layer(x)
    torch.testing.assert_close(output, layer.train()(x), rtol=0, atol=0)
    assert not torch.equal(before["site.scale"], layer.site.scale)
    layer.load_state_dict(before)
    with unchanged(layer.eval()), torch.inference_mode(), batch_statistics(layer):
        layer(x)
    assert layer.site.calls is buffers["calls"]
    assert not layer.site.scale.is_inference()
    assert batch_dependent(layer)
    assert not keeps_statistics(layer)


def test_which_models_mix_examples_and_keep_statistics() -> None:
    for norm, mixes in ((BatchNorm(), True), (LayerNorm(), False)):
        assert batch_dependent(LSTM(3, 4, norm=norm)) is mixes
        assert keeps_statistics(nn.Sequential(Linear(3, 4, norm=norm))) is mixes
    assert not batch_dependent(LSTM(3, 4, norm=BatchNorm(), normalize=()))
    # The input and recurrent sites of an RNN carry weights, no sums.
    assert not keeps_statistics(RNN(3, 4, norm=BatchNorm(), normalize=("input", "recurrent")))


@dataclass(frozen=True)
class Centred(Norm):
    """A user's norm that keeps statistics as it is asked to."""

    batch_dependent: ClassVar[bool] = True
    keeps_statistics: ClassVar[bool] = True

    def init_params(self, site: Site) -> None:
        for name, fill in (("running_mean", 0.0), ("running_var", 1.0)):
            site.add_buffer(name, (site.features,), fill)
        site.add_buffer("num_batches_tracked", (), 0, dtype=torch.int64)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        if not site.training:
            return a - site.running_mean
        mean, var = a.mean(0), a.var(0, correction=0)
        if site.observer is not None:
            site.observer(step, (len(a),), mean.detach()[None], var.detach()[None])
        return a - mean


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", [BatchNorm(), BatchNorm(unbiased=True), Centred()])
def test_linear_layers_on_batches_of_several_sizes(method: str, norm: Norm) -> None:
    model = nn.Sequential(Linear(5, 4, norm=norm, dtype=F64), nn.ReLU(), Linear(4, 3, norm=norm))
    model.double().eval()
    x = 3 + torch.randn(23, 5, dtype=F64)
    batches = x.split([9, 9, 5])
    measure(model, method, batches)
    weight = model[0].weight.detach().numpy()
    assert_statistics(model[0].site, method, [[part.numpy() @ weight.T] for part in batches])
    assert model[0].site.num_batches_tracked == 3

    def run() -> None:
        with batch_statistics(model):
            for batch in batches:
                model(batch)

    # The second layer sees what the first makes of each batch.
    assert_statistics(model[2].site, method, seen(model[2].site, run))


@pytest.mark.parametrize("method", METHODS)
def test_convolutions(method: str) -> None:
    layer = Conv2d(2, 3, 3, norm=BatchNorm(), dtype=F64).eval()
    x = torch.randn(7, 2, 5, 6, dtype=F64)
    measure(layer, method, x.split([4, 3]))
    sums = nn.functional.conv2d(x, layer.weight).detach().movedim(1, -1)
    batches = [[part.reshape(-1, 3).numpy()] for part in sums.split([4, 3])]
    assert_statistics(layer.site, method, batches)


def test_far_from_zero_nothing_cancels() -> None:
    """E[x^2] - E[x]^2 would have no digit left."""
    layer = Linear(2, 2, norm=BatchNorm(), dtype=F64).eval()
    x = torch.randn(4000, 2, dtype=F64)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    for method in METHODS:
        measure(layer, method, (x + 1e9).split(400))
        # The input itself is rounded to 1e-7 there.
        variances = torch.stack([b.var(0, correction=0) for b in x.split(400)]).mean(0)
        expected = variances if method == "average" else x.var(0, correction=0)
        assert ((layer.site.running_var - expected).abs() / expected).max() < 1e-6


def test_float32_buffers_hold_sums_of_float64() -> None:
    """In float32 the average of so many would be off in the fourth digit."""
    layer = Linear(1, 1, norm=BatchNorm()).eval()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.rand(200, 300, 1)
    for method in METHODS:
        measure(layer, method, x)
        mean = x.double().mean()
        assert abs(layer.site.running_mean.item() - mean) < 1e-7
        assert layer.site.running_mean.dtype == torch.float32


def sequences(kind: str) -> list[Tensor | PackedSequence]:
    shapes = {
        "equal": [[6] * 5, [6] * 4, [6] * 5],
        "lengths": [[4] * 5, [6] * 4, [2] * 3],
        # The longest of the second is alone from its fourth step on.
        "packed": [[5, 3, 3, 2], [7, 3, 2], [4, 4, 1]],
    }
    found: list[Tensor | PackedSequence] = []
    for lengths in shapes[kind]:
        examples = [torch.randn(n, 3, dtype=F64) for n in lengths]
        found.append(pack_sequence(examples) if kind == "packed" else torch.stack(examples, 1))
    return found


@pytest.mark.parametrize(
    ("cls", "kind", "max_steps"),
    # Any two of the three meet.
    [
        (cls, kind, (1, 3, 10)[(i + j) % 3])
        for i, cls in enumerate(LAYERS)
        for j, kind in enumerate(["equal", "lengths", "packed"])
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_each_step_of_each_site(
    loop: str, method: str, cls: type, kind: str, max_steps: int
) -> None:
    layer = cls(3, 4, bidirectional=True, norm=BatchNorm(max_steps=max_steps), dtype=F64)
    layer(torch.randn(4, 6, 3, dtype=F64))  # some running averages
    layer.eval()
    batches = sequences(kind)

    def run() -> None:
        with batch_statistics(layer):
            for batch in batches:
                layer(batch)

    sites = {
        (suffix, role): site
        for suffix, sites in layer.sites.items()
        for role, site in sites.items()
        if site.normalizes
    }
    expected = {key: REFERENCES[method](seen(site, run), max_steps) for key, site in sites.items()}
    measure(layer, method, batches)
    for key, site in sites.items():
        mean, var = expected[key]
        reached = len(mean)
        close(site.running_mean[:reached], mean)
        close(site.running_var[:reached], var)
        # Rows that nothing reaches are as in the beginning, whatever training left there.
        assert (site.running_mean[reached:] == 0).all()
        assert (site.running_var[reached:] == 1).all()
        assert (site.num_batches_tracked[:reached] > 0).all()
        assert (site.num_batches_tracked[reached:] == 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_cells_in_a_users_loop(method: str) -> None:
    layer = LSTM(3, 4, norm=BatchNorm(max_steps=5), dtype=F64).eval()
    cell = layer.to_cell()
    batches = [torch.randn(n, 6, 3, dtype=F64) for n in (3, 4)]
    with population_statistics(cell, method), population_statistics(layer, method):
        for batch in batches:
            states = None
            for step, x in enumerate(batch):
                states = cell(x, states, step=step)
            layer(batch)
    for role, site in layer.sites["l0"].items():
        twin = cell.sites[role]
        torch.testing.assert_close(site.running_mean, twin.running_mean, rtol=0, atol=1e-13)
        torch.testing.assert_close(site.running_var, twin.running_var, rtol=0, atol=1e-13)
        assert torch.equal(site.num_batches_tracked, twin.num_batches_tracked)


def test_averages_want_steps_in_order_and_totals_do_not() -> None:
    cell = LSTMCell(3, 4, norm=BatchNorm(max_steps=5), dtype=F64).eval()
    x = torch.randn(6, 3, dtype=F64)
    with population_statistics(cell):
        cell(x, step=0)
        refuses(r'got step 3, expected step 1; use "total_variance"', cell, x, step=3)
    with population_statistics(cell, "total_variance"):
        cell(x, step=3)
        cell(x, step=0)
    site = cell.sites["input"]
    products = (x @ cell.weight_ih.T).detach().numpy()
    for row in (0, 3):
        close(site.running_var[row], products.var(0))
    assert site.num_batches_tracked.tolist() == [1, 0, 0, 1, 0]
    assert torch.equal(site.running_var[1:3], torch.ones(2, 16, dtype=F64))


class Model(nn.Module):
    """Noise, dropout and two kinds of sites, of which one is never reached."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = LSTM(3, 4, norm=BatchNorm(max_steps=6), dtype=F64)
        self.readout = Linear(4, 2, norm=BatchNorm(), dtype=F64)
        self.spare = Linear(4, 2, norm=BatchNorm(), dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.recurrent(x + torch.randn_like(x))
        return self.readout(nn.functional.dropout(output[-1], training=self.training))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("no_grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_but_the_buffers_changes(method: str, no_grad) -> None:
    model = Model()
    model(torch.randn(5, 6, 3, dtype=F64)).sum().backward()
    model.spare(torch.randn(5, 4, dtype=F64))
    model.eval()
    model.spare.train()
    modes = [m.training for m in model.modules()]
    before, random = state(model), torch.get_rng_state()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with no_grad(), population_statistics(model, method):
        output = model(torch.randn(5, 6, 3, dtype=F64))
        assert not output.requires_grad
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(m.observer is None for m in model.modules() if isinstance(m, Site))
    for name, p in model.named_parameters():
        assert p.grad is None if name not in grads else torch.equal(p.grad, grads[name])
    endings = ("running_mean", "running_var")
    for name, value in model.state_dict().items():
        moved = name.endswith(endings) and "spare" not in name
        assert torch.equal(value, before[name]) is not moved, name
        assert not value.is_inference()
    # Training goes on from there.
    model.train()(torch.randn(5, 6, 3, dtype=F64)).sum().backward()
    assert model.recurrent.sites["l0"]["cell"].num_batches_tracked.tolist() == [2] * 5 + [0]


@pytest.mark.parametrize("method", METHODS)
def test_after_an_error_the_old_statistics_remain(method: str) -> None:
    model = Model()
    model(torch.randn(5, 6, 3, dtype=F64))
    x = torch.randn(5, 6, 3, dtype=F64)

    def fail() -> None:
        with population_statistics(model, method):
            model(x)
            raise KeyError("stop")

    with unchanged(model):
        refuses("stop", fail, error=KeyError)


@pytest.mark.parametrize(
    ("norm", "method", "named"),
    [
        (BatchNorm(), "average", "2 examples"),
        (BatchNorm(), "total_variance", "2 examples"),
        (LayerNorm(), "average", "LSTM"),
        (BatchNorm(), "ema", "method.*average.*total_variance"),
    ],
)
def test_where_there_is_nothing_to_estimate(norm: Norm, method: str, named: str) -> None:
    layer = LSTM(3, 4, norm=norm)
    with unchanged(layer):
        refuses(named, measure, layer, method, [])


def test_within_another() -> None:
    """Measuring while statistics are taken: the inner one is not heard of outside."""
    layer = Linear(5, 4, norm=BatchNorm(), dtype=F64).eval()
    twin = copy.deepcopy(layer)
    x, other = torch.randn(2, 8, 5, dtype=F64)
    with population_statistics(layer):
        layer(x)
        with batch_statistics(layer):
            layer(other)
    with population_statistics(twin):
        twin(x)
    assert equal(state(layer), state(twin))
