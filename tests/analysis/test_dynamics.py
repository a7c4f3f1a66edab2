"""Growth of perturbations: systems whose exponents are known, and Jacobians of whole sequences."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from cli_support import rows_of
from torch import Tensor, nn
from unchanged import unchanged

from ln_zoo.analysis import (
    Dynamics,
    dynamics_table,
    gradient_flow,
    gradient_norms,
    hidden_dynamics,
    initial_dynamics,
    lyapunov_exponents,
    network_dynamics,
    perturbation_growth,
    site_gains,
    write_dynamics,
)
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.plots import plot_dynamics

F64 = torch.float64
T, N, I, H = 5, 3, 2, 3  # noqa: E741


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def made(cls: type, norm: Norm, size: int = H, inputs: int = I, **options) -> LSTM | GRU | RNN:
    torch.manual_seed(0)
    layer = cls(inputs, size, norm=norm, dtype=F64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(0.3, 1).mul_(torch.randn_like(parameter).sign())
    return layer


@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_around_zero_exponents_are_eigenvalues(cls: type) -> None:
    """Without inputs and biases states stay 0, where each step is a known linear map."""
    values = torch.tensor([1.6, 0.6, -0.2, -1.2], dtype=F64)  # far apart: they converge quickly
    basis = torch.linalg.qr(normal(4, 4)).Q
    layer = cls(2, 4, bias=False, dtype=F64)
    with torch.no_grad():
        layer.weight_hh_l0.normal_()
        # The candidate's block; to the first order gates do not depend on a state of 0.
        blocks = layer.weight_hh_l0.view(-1, 4, 4)
        blocks[0 if cls is RNN else 2] = basis @ values.diag() @ basis.T
    # Gates of 1/2: h' = (U h) / 4 + h / 2 in a GRU; c' = c / 2 + (U h) / 2, h' = c' / 2 in an LSTM.
    factors = values.abs() if cls is RNN else 0.5 + values / 4
    expected = factors.log().sort(descending=True).values
    found = lyapunov_exponents(layer, torch.zeros(90, 2, 2, dtype=F64), count=4, skip=70)
    torch.testing.assert_close(found, expected.expand(2, -1), rtol=1e-6, atol=1e-6)


def jacobian(layer: LSTM | GRU | RNN, x: Tensor, states: tuple[Tensor, ...]) -> Tensor:
    """Of the final states by the initial ones, by reverse mode, of one example or of a batch."""

    def final(*given: Tensor) -> Tensor:
        hx = given if len(given) > 1 else given[0]
        _, last = layer(x, hx)
        parts = last if isinstance(last, tuple) else (last,)
        return torch.cat([part[0] for part in parts], dim=-1).flatten()

    rows = torch.autograd.functional.jacobian(final, states)
    examples = x.shape[1]
    blocks = [row.reshape(len(row), examples, -1) for row in rows]
    return torch.cat(blocks, dim=-1).flatten(1)


def start(cls: type) -> tuple[Tensor, ...]:
    return tuple(normal(1, N, H, seed=seed) for seed in range(2 if cls is LSTM else 1))


def volume(whole: Tensor, systems: int, system: int, count: int) -> Tensor:
    """Logarithm of the volume that a Jacobian makes of the perturbations that seed 0 draws."""
    moved = whole @ torch.linalg.qr(normal(systems, len(whole), count)).Q[system]
    return torch.linalg.svdvals(moved).log().sum()


NORMS = [LayerNorm(eps=0.5), RMSNorm(eps=0.5), WeightNorm(), Identity()]
KEPT = BatchNorm(eps=0.5, max_steps=T)


@pytest.mark.parametrize("norm", [*NORMS, KEPT], ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
@pytest.mark.parametrize("count", [1, 2])
def test_growth_is_that_of_volumes(cls: type, norm: Norm, count: int) -> None:
    """Kept statistics leave examples apart."""
    layer, x, states = made(cls, norm), normal(T, N, I), start(cls)
    layer(normal(T, 10, I, seed=1))
    hx = states if cls is LSTM else states[0]
    options = {"statistics": "kept"} if norm is KEPT else {}
    growth = perturbation_growth(layer, x, hx, count=count, **options)
    assert growth.shape == (T, N, count)
    layer.eval()
    for example in range(N):
        part = tuple(state[:, example : example + 1].contiguous() for state in states)
        expected = volume(jacobian(layer, x[:, example : example + 1], part), N, example, count)
        torch.testing.assert_close(growth[:, example].sum(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_under_batch_statistics_the_batch_is_one_system(cls: type, count: int) -> None:
    layer, x, states = made(cls, BatchNorm(eps=0.5, max_steps=2)), normal(T, N, I), start(cls)
    growth = perturbation_growth(layer, x, states if cls is LSTM else states[0], count=count)
    assert growth.shape == (T, 1, count)
    expected = volume(jacobian(layer, x, states), 1, 0, count)
    torch.testing.assert_close(growth.sum(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm", [LayerNorm(eps=0.0), RMSNorm(eps=0.0)], ids=repr)
@pytest.mark.parametrize("cls", [LSTM, GRU, RNN])
def test_exponents_do_not_see_the_scale_of_normalised_weights(cls: type, norm: Norm) -> None:
    layer, x, states = made(cls, norm), normal(8, N, I), start(cls)
    hx = states if cls is LSTM else states[0]
    role = "sum" if cls is RNN else "recurrent"
    before, gains = perturbation_growth(layer, x, hx), site_gains(layer, x, hx)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(4)
        layer.weight_ih_l0.mul_(4)
    torch.testing.assert_close(perturbation_growth(layer, x, hx), before, rtol=1e-9, atol=1e-9)
    found = site_gains(layer, x, hx)
    # A site takes back what the weights did: gain / sigma is a quarter.
    assert found.gains[role] == pytest.approx(gains.gains[role] / 4)
    assert found.share == pytest.approx(gains.share)


def test_gain_of_a_site_by_hand() -> None:
    """One step of a simple RNN: all of its site's Jacobian, and the perturbation that is drawn."""
    layer, x, h = made(RNN, LayerNorm(eps=0.0)), normal(1, 1, I), normal(1, 1, H)
    terms = [(h[0] @ layer.weight_hh_l0.T).detach(), (x[0] @ layer.weight_ih_l0.T).detach()]
    sums = sum(terms).flatten()
    z, sigma = (sums - sums.mean()) / sums.std(correction=0), sums.std(correction=0)
    ones = torch.ones(H, dtype=F64)
    projector = torch.eye(H, dtype=F64) - (torch.outer(ones, ones) + torch.outer(z, z)) / H
    drawn = torch.linalg.qr(normal(1, H, 1, seed=5)).Q.flatten()
    into = layer.weight_hh_l0.detach() @ drawn
    behind = layer.sites["l0"]["sum"].gain.detach() * (projector @ into) / sigma
    found = site_gains(layer, x, h, seed=5)
    assert found.gains == {"sum": pytest.approx(float(behind.norm() / into.norm()))}
    squares = [float(term.square().sum()) for term in terms]
    assert found.share == pytest.approx(squares[0] / sum(squares))


def test_first_probe_of_a_plain_lstm() -> None:
    """It shrinks perturbations by 9 % a step, from an orthogonal start with forget bias 1."""

    def factors(start: str) -> list[float]:
        options = {"hidden_size": 64, "norms": [Identity, LayerNorm], "gains": (1.0,)}
        return [each.factor for each in initial_dynamics(normal(40, 2, 64), start=start, **options)]

    for start in ("orthogonal", "identity"):
        plain, normalised = factors(start)
        assert plain == pytest.approx(0.91, abs=0.02)
        assert 1.02 < normalised < 1.06
    plain, normalised = factors("torch")
    assert plain == pytest.approx(0.60, abs=0.02)
    assert normalised > 1


def test_scale_of_recurrent_weights() -> None:
    """What the paper calls stable (section 3.1): under layer norm it does not matter."""
    options = {"hidden_size": 32, "norms": [LayerNorm, WeightNorm, Identity], "gains": (0.5,)}
    runs = (initial_dynamics(normal(30, 2, 32), recurrent_scale=s, **options) for s in (1.0, 30.0))
    small, large = ([each.factor for each in run] for run in runs)
    assert large[0] == pytest.approx(small[0], rel=0.01)  # but for eps
    assert large[1] == pytest.approx(small[1], rel=1e-6)
    assert large[2] > 1.2 * small[2]
    # Scales of weight norm are set to the gain.
    options = {"hidden_size": 16, "norms": [WeightNorm], "gains": (0.1, 1.0)}
    small, large = initial_dynamics(normal(12, 2, 20), "RNN", **options)
    # Rows of length 0.1 shrink a perturbation by about that.
    assert small.factor == pytest.approx(0.1, rel=0.5)
    assert large.factor > 3 * small.factor


def test_a_measurement_is_its_parts() -> None:
    layer, x, states = made(GRU, LayerNorm()), normal(12, N, I), normal(1, N, H)

    def loss(outputs: Tensor) -> Tensor:
        return outputs[-1].square().sum()

    found = hidden_dynamics(layer, x, states, loss=loss, skip=4, seed=3)
    growth = perturbation_growth(layer, x, states, seed=3)
    torch.testing.assert_close(found.growth, growth)
    torch.testing.assert_close(found.exponents, growth[4:].mean(0))
    torch.testing.assert_close(found.gradients, gradient_norms(layer, x, states, loss))
    first, last = found.gradients[4], found.gradients[-1]
    assert found.gradient_factor == pytest.approx(float(first / last) ** (1 / 7))
    assert found.sites == site_gains(layer, x, states, skip=4, seed=3)
    assert (found.group, found.name, found.skip) == ("GRU", "LayerNorm", 4)
    assert hidden_dynamics(layer, x).skip == 3


@pytest.mark.parametrize("statistics", ["batch", "kept"])
def test_nothing_of_the_layer_is_changed(statistics: str) -> None:
    layer, x = made(LSTM, BatchNorm(max_steps=3)), normal(T, N, I)
    layer(x)
    # One state for all examples, as models expand it.
    states = tuple(normal(1, 1, H, seed=seed).expand(-1, N, -1) for seed in (0, 1))
    if statistics == "batch":
        states = tuple(state + normal(1, N, H) for state in states)
    with unchanged(layer):
        found = hidden_dynamics(layer, x, states, statistics=statistics)
    assert found.growth.isfinite().all()


def test_gradients_with_kept_statistics() -> None:
    layer, x = made(GRU, KEPT), normal(T, N, I)
    layer(normal(T, 10, I, seed=1))
    found = gradient_norms(layer, x, loss=lambda h: h[-1].sum(), statistics="kept")
    layer.eval()
    part, _ = layer(x[:2], torch.zeros(1, N, H, dtype=F64))
    states = part[-1:].detach().requires_grad_()

    def rest() -> Tensor:
        # Steps 3 on from the second state, with the statistics of their own steps.
        shifted = made(GRU, KEPT).eval()
        shifted.load_state_dict(layer.state_dict())
        for site in shifted.sites["l0"].values():
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                buffer = site.get_buffer(name)
                buffer.copy_(buffer.roll(-2, 0))
        return shifted(x[2:], states)[0][-1].sum()

    (gradient,) = torch.autograd.grad(rest(), states)
    assert float(found[1]) == pytest.approx(float(gradient.norm()), rel=1e-9)


class Tagger(nn.Module):
    def __init__(self, recurrent: LSTM | GRU | RNN, states: object = None) -> None:
        super().__init__()
        self.recurrent, self.states = recurrent, states
        torch.manual_seed(3)
        self.readout = nn.Linear(recurrent.proj_size or recurrent.hidden_size, 4, dtype=F64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, last = self.recurrent(x, hx=self.states)
        h = last[0] if isinstance(last, tuple) else last
        return self.readout(output), h[-1]


def outputs_of(network: nn.Module, batch: Tensor) -> Tensor:
    return network(batch)[0].square().mean()


def last_state_of(network: nn.Module, batch: Tensor) -> Tensor:
    return network(batch)[1].cos().sum()


STACKS = [
    (LSTM, LayerNorm(eps=0.5), {"proj_size": 2}),
    (LSTM, BatchNorm(eps=0.5), {"peephole": True}),
    (GRU, WeightNorm(), {"bias": False}),
    (RNN, RMSNorm(eps=0.5), {}),
]


@pytest.mark.parametrize("loss", [outputs_of, last_state_of])
@pytest.mark.parametrize(("cls", "norm", "options"), STACKS, ids=lambda value: repr(value)[:30])
def test_layers_of_a_module_are_single_layers(cls: type, norm: Norm, options: dict, loss) -> None:
    """Against layers that are made one by one, with copies of the weights."""
    whole = made(cls, norm, num_layers=3, **options)
    width = whole.proj_size or H
    sizes = [width, H] if cls is LSTM else [H]
    states = tuple(normal(3, N, size, seed=seed) for seed, size in enumerate(sizes))
    hx = states if cls is LSTM else states[0]
    network, x = Tagger(whole, hx), normal(8, N, I, seed=7)
    found = network_dynamics(network, x, loss, count=2, skip=3, statistics="batch", seed=5)
    assert list(found) == [f"recurrent.l{number}" for number in range(3)]

    parts, below = [], x
    for number in range(3):
        part = made(cls, norm, inputs=I if number == 0 else width, **options)
        keys = {key: re.sub(r"\bl0\b|(?<=_)l0\b", f"l{number}", key) for key in part.state_dict()}
        part.load_state_dict({key: whole.state_dict()[old] for key, old in keys.items()})
        parts.append(part)
    parts_of_states = list(zip(*(s.split(1) for s in states), strict=True))
    own_states = parts_of_states if cls is LSTM else [h for (h,) in parts_of_states]
    for number, part in enumerate(parts):

        def rest(outputs: Tensor, number: int = number) -> Tensor:
            for k in range(number + 1, 3):
                outputs, _ = parts[k](outputs, own_states[k])
            if loss is last_state_of:
                return outputs[-1].cos().sum()
            return network.readout(outputs).square().mean()

        measure = {"loss": rest, "count": 2, "skip": 3, "seed": 5}
        wanted = hidden_dynamics(part, below, own_states[number], **measure)
        each = found[f"recurrent.l{number}"]
        torch.testing.assert_close(each.growth, wanted.growth, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(each.gradients, wanted.gradients, rtol=1e-9, atol=1e-12)
        assert each.gradients.min() > 0
        assert each.sites.gains == pytest.approx(wanted.sites.gains)
        assert each.sites.share == pytest.approx(wanted.sites.share)
        below = part(below, own_states[number])[0].detach()


def test_layers_apart_in_a_network_that_reads_examples_first() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = made(GRU, LayerNorm(), batch_first=True)
            self.high = made(LSTM, LayerNorm(), inputs=H + I)

        def forward(self, x: Tensor) -> Tensor:  # (N, T, I)
            h, _ = self.low(x)
            return self.high(torch.cat([h, x], -1).transpose(0, 1))[0][-1]

    network, x = Two().train(), normal(N, 10, I)
    with unchanged(network):
        found = network_dynamics(network, x, lambda net, x: net(x).square().sum())
    assert list(found) == ["low", "high"]

    def read(h: Tensor) -> Tensor:
        return torch.cat([h, x.transpose(0, 1)], -1)

    h = network.low(x)[0].detach().transpose(0, 1)
    low, high = found.values()
    assert low.growth.equal(perturbation_growth(network.low, x.transpose(0, 1)))
    assert high.growth.equal(perturbation_growth(network.high, read(h)))
    loss = lambda h: network.high(read(h))[0][-1].square().sum()  # noqa: E731
    wanted = gradient_norms(network.low, x.transpose(0, 1), loss=loss)
    torch.testing.assert_close(low.gradients, wanted)
    wanted = gradient_norms(network.high, read(h), loss=lambda h: h[-1].square().sum())
    torch.testing.assert_close(high.gradients, wanted)


def test_first_steps_of_a_layer_and_layers_of_relu() -> None:
    network, x = Tagger(made(GRU, LayerNorm())), normal(9, N, I)
    (found,) = network_dynamics(network, x, last_state_of, steps=4).values()
    (wanted,) = network_dynamics(network, x[:4], last_state_of).values()
    assert found.growth.equal(wanted.growth)
    assert found.gradients.equal(wanted.gradients)
    assert len(found.gradients) == 4
    layer = made(RNN, LayerNorm(), num_layers=2, nonlinearity="relu")
    low, _ = network_dynamics(Tagger(layer), normal(T, N, I), outputs_of).values()
    single = made(RNN, LayerNorm(), nonlinearity="relu")
    single.load_state_dict({key: layer.state_dict()[key] for key in single.state_dict()})
    assert low.growth.equal(perturbation_growth(single, normal(T, N, I)))


def first(network: nn.Module, batch: object, **given: object) -> Tensor:
    output = network(batch, **given)[0]
    return (output if isinstance(output, Tensor) else output.data).sum()


X = normal(T, N, I)
RESET = torch.zeros(T, N, dtype=torch.bool)
PACKED = nn.utils.rnn.pack_padded_sequence(X, torch.tensor([5, 4, 2]))


def given(**arguments: object):
    return lambda network, batch: first(network, batch, **arguments)


@pytest.mark.parametrize(
    ("network", "loss", "batch", "words"),
    [
        (nn.Linear(I, H, dtype=F64), first, X, "Linear"),
        (made(GRU, LayerNorm()), lambda *a: first(*a) + first(*a), X, "GRU.*repeatedly"),
        (made(GRU, LayerNorm(), bidirectional=True), first, X, "GRU.*two"),
        (made(RNN, LayerNorm()), first, X[:, 0], r"network_dynamics: RNN.*\(5, 2\)"),
        (made(GRU, LayerNorm(), zoneout=0.2), first, X, "zoneout.*0.2"),
        (made(GRU, LayerNorm(), num_layers=2, zoneout=0.2), first, X, "zoneout.*0.2"),
        (made(GRU, LayerNorm()), given(reset=RESET), X, "GRU.*reset"),
        (made(GRU, LayerNorm()), given(hx=None, reset=RESET), X, "GRU.*reset"),
        (made(GRU, LayerNorm()), given(mask=~RESET), X, "GRU.*mask"),
        (nn.Sequential(made(GRU, LayerNorm())), first, PACKED, "GRU 0.*packed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_networks_are_refused(network: nn.Module, loss, batch: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        network_dynamics(network, batch, loss)
    assert not any(module._forward_pre_hooks for module in network.modules())


def measured(group: str, name: str) -> Dynamics:
    growth = torch.log(torch.tensor([[[9.0, 1.0]], [[2.0, 0.5]], [[2.0, 0.5]]]).double())
    found = hidden_dynamics(made(RNN, Identity()), normal(3, 1, I), group=group, name=name)
    gradients = torch.tensor([8.0, 4.0, 1.0]).double()
    return Dynamics(group, name, growth, found.sites, gradients, 1)


def test_table_csv_and_picture(tmp_path: Path) -> None:
    found = [measured("LSTM", "LayerNorm 1"), measured("LSTM", "Identity"), measured("GRU", "x y")]
    head, _, first, *_ = dynamics_table(found).splitlines()
    assert "exponent 2" in head
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:5] == ["LSTM LayerNorm 1", "+100.0 %", "0.6931", "-0.6931", "+300.0 %"]
    assert cells[6] == "sum 1"
    write_dynamics(found, tmp_path / "a/dynamics.csv")
    rows = rows_of(tmp_path / "a/dynamics.csv")
    assert len(rows) == 9
    assert rows[1] == {
        "group": "LSTM", "layer": "LayerNorm 1", "t": "2",
        "log_perturbation": f"{math.log(18):.5g}", "gradient_norm": "4",
    }  # fmt: skip
    plot_dynamics(found, tmp_path / "b/dynamics.png", "a title")
    assert (tmp_path / "b/dynamics.png").read_bytes().startswith(b"\x89PNG")


LAYER = GRU(I, H, dtype=F64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: perturbation_growth(GRU(I, H, num_layers=2, dtype=F64), X), "num_layers=2"),
        (lambda: perturbation_growth(LAYER, X, count=4), "count.*3.*4"),
        (lambda: perturbation_growth(LAYER, X, statistics="mean"), "statistics.*'mean'"),
        (lambda: lyapunov_exponents(LAYER, X, skip=-1), "skip.*4.*-1"),
        (lambda: lyapunov_exponents(LAYER, X, skip=T), "skip.*4.*5"),
        (lambda: next(initial_dynamics(X, "MUT")), "cell.*'MUT'"),
        (lambda: next(initial_dynamics(X, start="zeros")), "start.*'zeros'"),
        (lambda: next(initial_dynamics(X[0])), r"initial_dynamics.*\(3, 2\)"),
        (lambda: next(initial_dynamics(X[:0])), r"initial_dynamics.*\(0, 3, 2\)"),
        (lambda: dynamics_table([]), "dynamics_table"),
        (lambda: plot_dynamics([], Path("none.png")), "rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_fit(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "measure",
    [perturbation_growth, lyapunov_exponents, site_gains, hidden_dynamics, gradient_norms],
)
def test_layers_and_inputs_of_other_kinds(measure) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.modules\.rnn\.GRU"):
        measure(nn.GRU(I, H, dtype=F64), X)
    for wrong in (X[0], X[:0], X[:, :0]):
        with pytest.raises(ValueError, match=rf"\(T, N, I\).*\({wrong.shape[0]}, "):
            measure(LAYER, wrong)


def test_generators_of_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    random = torch.get_rng_state()
    first, *_ = initial_dynamics(normal(T, N, I), hidden_size=H, norms=[LayerNorm], seed=9)
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), random)
    # And the weights are those of the seed.
    torch.manual_seed(9)
    layer = LSTM(I, H, norm=LayerNorm(0.1), dtype=F64)
    h = 0.1 * torch.randn(1, N, H, generator=torch.Generator().manual_seed(9), dtype=F64)
    states = h, torch.zeros_like(h)
    assert perturbation_growth(layer, normal(T, N, I), states, seed=9).equal(first.growth)
    # Layers lie where the inputs do: all is drawn on the CPU before it is moved.
    moved = []
    monkeypatch.setattr(LSTM, "to", lambda layer, device: moved.append(device) or layer)
    x = normal(T, N, I)
    list(initial_dynamics(x, hidden_size=H, norms=[Identity]))
    gradient_flow(x, "LSTM", H, norms=[Identity])
    assert moved == [x.device, x.device]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("start", ["torch", "orthogonal"])
def test_a_gpu_measures_the_same(start: str) -> None:
    random = torch.cuda.get_rng_state()
    options = {"hidden_size": 8, "norms": [LayerNorm, Identity], "start": start}
    on_cpu = initial_dynamics(normal(20, N, I), **options)
    on_gpu = initial_dynamics(normal(20, N, I).cuda(), **options)
    for here, there in zip(on_cpu, on_gpu, strict=True):
        assert there.growth.is_cuda
        torch.testing.assert_close(there.growth.cpu(), here.growth, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(there.gradients.cpu(), here.gradients, rtol=1e-6, atol=1e-12)
    flows = [gradient_flow(x, "GRU", 8) for x in (normal(20, N, I), normal(20, N, I).cuda())]
    for here, there in zip(*flows, strict=True):
        torch.testing.assert_close(there.norms.cpu(), here.norms, rtol=1e-6, atol=1e-12)
    assert torch.equal(torch.cuda.get_rng_state(), random)
