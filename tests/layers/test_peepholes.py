"""Peepholes (Graves 2013, eq. 7-11) and clipped derivatives (there, 2.1), with any norm."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from ln_zoo.layers import LSTM, LSTMCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import RecurrentCall, clip_derivative, lstm_cell, select_kernel

F64 = torch.float64
NORMS = [
    Identity(),
    LayerNorm(eps=1e-3),
    LayerNorm(eps=1e-3, per_gate=True),
    RMSNorm(),
    BatchNorm(),
]
every_norm = pytest.mark.parametrize("norm", NORMS, ids=repr)
OPTIONS = [
    {"peephole": True},
    {"derivative_bound": 0.1},
    {"peephole": True, "derivative_bound": 0.1},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def randomise(module: Any) -> Any:
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter) - 0.5)
    return module


def assert_close(one: Any, two: Any, tolerance: float = 1e-11) -> None:
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# The equations


def statistics(a: Tensor, norm: Norm, group: int) -> Tensor:
    """Rows normalised in groups of features, or features over examples."""
    if isinstance(norm, BatchNorm):
        return (a - a.mean(0)) / (a.var(0, correction=0) + norm.eps).sqrt()
    parts = []
    for part in a.split(group, 1):
        centre = part.mean(1, keepdim=True) if isinstance(norm, LayerNorm) else 0
        square = ((part - centre) ** 2).mean(1, keepdim=True)
        parts.append((part - centre) / (square + norm.eps).sqrt())
    return torch.cat(parts, 1)


def site(sites: Any, role: str, norm: Norm, a: Tensor) -> Tensor:
    if isinstance(norm, Identity):
        return a
    hidden = sites["cell"].gain.shape[0]
    alone = role == "cell" or getattr(norm, "per_gate", False)
    a = statistics(a, norm, hidden if alone else 4 * hidden) * sites[role].gain
    return a if sites[role].shift is None else a + sites[role].shift


Step = Callable[..., tuple[Tensor, Tensor]]


def step_of(parameters: dict[str, Tensor], sites: Any, norm: Norm) -> Step:
    """Eq. 7-11 with the paper's normalisation in eq. 20-22."""
    w, p = parameters, parameters["peephole"]

    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        sums = site(sites, "input", norm, x @ w["ih"].T) + w["b_ih"] + w["b_hh"]
        sums = sums + site(sites, "recurrent", norm, h @ w["hh"].T)
        i, f, g, o = sums.chunk(4, 1)
        i, f = torch.sigmoid(i + p[0] * c), torch.sigmoid(f + p[1] * c)
        c = f * c + i * torch.tanh(g)
        o = torch.sigmoid(o + p[2] * c)
        h = o * torch.tanh(site(sites, "cell", norm, c))
        return (h if "hr" not in w else h @ w["hr"].T), c

    return step


def steps_of(layer: LSTM, norm: Norm) -> list[Step]:
    steps = []
    for suffix in layer.sites:
        names = {
            **{"ih": "weight_ih", "hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"},
            **{"peephole": "weight_peephole"},
        }
        if layer.proj_size:
            names["hr"] = "weight_hr"
        found = {key: getattr(layer, f"{name}_{suffix}") for key, name in names.items()}
        steps.append(step_of(found, layer.sites[suffix], norm))
    return steps


def through(step: Step, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    outputs = []
    for now in x:
        h, c = step(now, h, c)
        outputs.append(h)
    return torch.stack(outputs), h, c


def gradients(results: Any, sources: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    loss = sum((a * torch.randn(a.shape, generator=generator).to(a.dtype)).sum() for a in results)
    return torch.autograd.grad(loss, list(sources))


@every_norm
def test_a_layer_is_the_equations(norm: Norm, loop: str) -> None:
    layer = randomise(LSTM(3, 5, norm=norm, peephole=True, dtype=F64))
    x, h, c = (torch.randn(size, dtype=F64) for size in ((7, 4, 3), (1, 4, 5), (1, 4, 5)))
    sources = [x.requires_grad_(), h.requires_grad_(), c.requires_grad_(), *layer.parameters()]
    output, (h_n, c_n) = layer(x, (h, c))
    expected = through(steps_of(layer, norm)[0], x, h[0], c[0])
    found = (output, h_n[0], c_n[0])
    assert_close(found, expected)
    assert_close(gradients(found, sources), gradients(expected, sources))


@pytest.mark.parametrize("norm", [Identity(), LayerNorm(eps=1e-3)], ids=repr)
@pytest.mark.parametrize("proj_size", [0, 2])
def test_layers_and_directions_of_packed_sequences(norm: Norm, proj_size: int, loop: str) -> None:
    options = {"num_layers": 2, "bidirectional": True, "proj_size": proj_size, "peephole": True}
    layer = randomise(LSTM(3, 5, norm=norm, dtype=F64, **options))
    sequences = [torch.randn(n, 3, dtype=F64) for n in (6, 2, 4)]
    output, _ = layer(pack_sequence(sequences, enforce_sorted=False))
    steps = steps_of(layer, norm)
    for x, found in zip(sequences, unpack_sequence(output), strict=True):
        a = x[:, None]
        start = (a.new_zeros(1, proj_size or 5), a.new_zeros(1, 5))
        for forward, backward in (steps[:2], steps[2:]):
            there, back = through(forward, a, *start)[0], through(backward, a.flip(0), *start)[0]
            a = torch.cat([there, back.flip(0)], 2)
        assert_close([found], [a[:, 0]])


@every_norm
def test_a_cell_is_a_layer_of_one_step_at_a_time(norm: Norm, loop: str) -> None:
    layer = randomise(LSTM(3, 5, norm=norm, peephole=True, derivative_bound=0.2, dtype=F64))
    cell = LSTMCell(3, 5, norm=norm, peephole=True, derivative_bound=0.2, dtype=F64)
    names = {name: name.replace("_l0", "").replace("l0.", "") for name in layer.state_dict()}
    cell.load_state_dict({names[name]: a for name, a in layer.state_dict().items()})
    x = torch.randn(6, 4, 3, dtype=F64)
    state, outputs = None, []
    for t, now in enumerate(x):
        state = cell(now, state, step=t)
        outputs.append(state[0])
    output, (h, c) = layer(x)
    assert_close((torch.stack(outputs), *state), (output, h[0], c[0]))
    found = gradients([torch.stack(outputs)], cell.parameters())
    own = dict(layer.named_parameters())
    wanted = gradients([output], [own[n] for n in own])
    by_name = dict(zip((names[n] for n in own), wanted, strict=True))
    for (name, _), gradient in zip(cell.named_parameters(), found, strict=True):
        assert_close([gradient], [by_name[name]])


@pytest.mark.parametrize("norm", [Identity(), LayerNorm(), WeightNorm()], ids=repr)
def test_peepholes_of_zero_do_nothing(norm: Norm, loop: str) -> None:
    plain = randomise(LSTM(3, 5, norm=norm, dtype=F64))
    layer = LSTM(3, 5, norm=norm, peephole=True, dtype=F64)
    missing, unexpected = layer.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == (["weight_peephole_l0"], [])
    nn.init.zeros_(layer.weight_peephole_l0)
    x = torch.randn(20, 4, 3, dtype=F64)
    assert_close([layer(x)[0]], [plain(x)[0]])


def test_without_gradients_a_step_is_the_same(loop: str) -> None:
    """Online steps have a way of their own, which knows nothing of peepholes."""
    for options in OPTIONS:
        cell = randomise(LSTMCell(3, 5, norm=LayerNorm(), **options))
        x, state = torch.randn(2, 3), (torch.randn(2, 5), torch.randn(2, 5))
        loud = cell(x, state)
        with torch.no_grad():
            quiet = cell(x, state)
            again = cell(x, state)
        assert_close(quiet, loud, 1e-6)
        assert_close(again, quiet, 0)


# Parameters


def test_parameters_by_name_and_number() -> None:
    layer = LSTM(3, 400, 2, norm=LayerNorm(), bidirectional=True, peephole=True)
    names = {name for name, _ in layer.named_parameters() if "peephole" in name}
    assert names == {f"weight_peephole_l{n}{side}" for n in (0, 1) for side in ("", "_reverse")}
    assert all(layer.get_parameter(name).shape == (3, 400) for name in names)
    plain = LSTM(3, 400, 2, norm=LayerNorm(), bidirectional=True)
    numbers = [sum(a.numel() for a in of.parameters()) for of in (layer, plain)]
    assert numbers[0] - numbers[1] == 4 * 3 * 400
    assert not hasattr(LSTMCell(3, 4), "weight_peephole")
    assert LSTMCell(3, 4, peephole=True).weight_peephole.shape == (3, 4)
    assert LSTM(3, 4, peephole=True, proj_size=2).weight_peephole_l0.shape == (3, 4)


@pytest.mark.parametrize("cls", [LSTM, LSTMCell])
def test_they_are_drawn_as_other_weights_are(cls: type) -> None:
    torch.manual_seed(0)
    module = cls(3, 100, peephole=True)
    (weight,) = (a for name, a in module.named_parameters() if "peephole" in name)
    assert weight.abs().max() <= 0.1
    assert weight.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.1)
    with torch.no_grad():
        weight.fill_(7)
    module.reset_parameters()
    assert weight.abs().max() <= 0.1
    assert weight.std() > 0.05


def test_without_peepholes_nothing_is_drawn() -> None:
    """A seed gives the weights that it always gave."""
    torch.manual_seed(0)
    theirs = nn.LSTM(3, 4)
    torch.manual_seed(0)
    ours = LSTM(3, 4, derivative_bound=1.0)
    for name, a in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], a)


@every_option
def test_copies_behave_the_same(options: dict[str, Any]) -> None:
    x = torch.randn(4, 2, 3)
    for cls in (LSTM, LSTMCell):
        module = randomise(cls(3, 5, norm=LayerNorm(), **options))
        given = x if cls is LSTM else x[0]
        expected = gradients([module(given)[0] * 9], module.parameters())
        with torch.no_grad():
            module(given)  # what a cell remembers of it must not be in the way
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            found = gradients([twin(given)[0] * 9], twin.parameters())
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Clipping


@pytest.mark.parametrize("bound", [0.5, 10.0])
def test_a_number_passes_and_its_gradient_is_clipped(bound: float) -> None:
    a = torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0], dtype=F64, requires_grad=True)
    same = clip_derivative(a, bound)
    assert torch.equal(same, a)
    coming = torch.tensor([0.1, -0.1, 100.0, -100.0, float("nan")], dtype=F64)
    same.backward(coming)
    expected = torch.tensor([0.1, -0.1, bound, -bound, float("nan")], dtype=F64)
    torch.testing.assert_close(a.grad, expected, equal_nan=True)


def clipped_backward(
    w: dict[str, Tensor], x: Tensor, d_out: Tensor, bound: float, peephole: bool
) -> dict[str, Tensor]:
    """The way back by hand, step by step, each gate's derivative clipped where it arises."""
    T, N, _ = x.shape
    H = w["hh"].shape[1]
    p = w["peephole"] if peephole else x.new_zeros(3, H)
    h, c = x.new_zeros(N, H), x.new_zeros(N, H)
    kept = []
    for now in x:
        sums = now @ w["ih"].T + h @ w["hh"].T + w["b_ih"] + w["b_hh"]
        i, f, g, o = sums.chunk(4, 1)
        i, f, g = (i + p[0] * c).sigmoid(), (f + p[1] * c).sigmoid(), g.tanh()
        after = f * c + i * g
        o = (o + p[2] * after).sigmoid()
        kept.append((h, c, i, f, g, o, after))
        h, c = o * after.tanh(), after
    found = {name: torch.zeros_like(a) for name, a in w.items()} | {"x": torch.zeros_like(x)}
    dh, dc = x.new_zeros(N, H), x.new_zeros(N, H)
    for t in reversed(range(T)):
        h, c, i, f, g, o, after = kept[t]
        dh = dh + d_out[t]
        do = (dh * after.tanh() * o * (1 - o)).clamp(-bound, bound)
        dc = dc + dh * o * (1 - after.tanh() ** 2) + do * p[2]
        di = (dc * g * i * (1 - i)).clamp(-bound, bound)
        df = (dc * c * f * (1 - f)).clamp(-bound, bound)
        dg = (dc * i * (1 - g**2)).clamp(-bound, bound)
        d = torch.cat([di, df, dg, do], 1)
        found["x"][t] = d @ w["ih"]
        found["ih"] += d.T @ x[t]
        found["hh"] += d.T @ h
        found["b_ih"] += d.sum(0)
        found["b_hh"] += d.sum(0)
        if peephole:
            found["peephole"] += torch.stack(
                [(a * b).sum(0) for a, b in ((di, c), (df, c), (do, after))]
            )
        dc = dc * f + di * p[0] + df * p[1]
        dh = d @ w["hh"]
    return found


@pytest.mark.parametrize("bound", [0.02, 0.3, 1e6])
@pytest.mark.parametrize("peephole", [True, False])
def test_derivatives_are_clipped_where_they_arise(bound: float, peephole: bool, loop: str) -> None:
    layer = randomise(LSTM(3, 5, peephole=peephole, derivative_bound=bound, dtype=F64))
    x = torch.randn(6, 4, 3, dtype=F64, requires_grad=True)
    names = {"ih": "weight_ih", "hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}
    if peephole:
        names["peephole"] = "weight_peephole"
    w = {key: getattr(layer, f"{name}_l0") for key, name in names.items()}
    d_out = torch.randn(6, 4, 5, dtype=F64)
    with torch.no_grad():
        expected = clipped_backward(w, x, d_out, bound, peephole)
    output, _ = layer(x)
    found = torch.autograd.grad(output, [*w.values(), x], d_out)
    assert_close(found, expected.values())
    free = LSTM(3, 5, peephole=peephole, dtype=F64)
    free.load_state_dict(layer.state_dict())
    unclipped = torch.autograd.grad(free(x)[0], x, d_out)[0]
    assert_close([output], [free(x)[0]])  # nothing changes on the way there
    assert torch.allclose(unclipped, found[-1]) == (bound == 1e6)


@pytest.mark.parametrize("norm", [*NORMS[1:], WeightNorm()], ids=repr)
def test_a_bound_that_is_never_reached_changes_nothing(norm: Norm, loop: str) -> None:
    bounded = randomise(LSTM(3, 5, norm=norm, derivative_bound=1e6, dtype=F64))
    plain = LSTM(3, 5, norm=norm, dtype=F64)
    plain.load_state_dict(bounded.state_dict())
    x = torch.randn(6, 4, 3, dtype=F64, requires_grad=True)
    results = []
    for layer in (bounded, plain):
        output, _ = layer(x)
        results.append((output, *gradients([output], [x, *layer.parameters()])))
    assert_close(*results, tolerance=1e-9)


@every_norm
def test_the_bound_holds_behind_the_norm(norm: Norm) -> None:
    """Of a bias each example and step has a share of the bound at most."""
    layer = randomise(LSTM(3, 5, norm=norm, derivative_bound=1e-3, dtype=F64))
    layer(torch.randn(6, 4, 3, dtype=F64))[0].sum().mul(1e6).backward()
    assert layer.bias_ih_l0.grad.abs().max() <= 6 * 4 * 1e-3 * (1 + 1e-12)
    assert layer.bias_ih_l0.grad.abs().max() > 1e-3


@pytest.mark.parametrize("cls", [LSTM, LSTMCell])
@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_bounds_that_are_not_positive_are_refused(cls: type, bound: float) -> None:
    with pytest.raises(ValueError, match=r"derivative_bound must be positive, got"):
        cls(3, 4, derivative_bound=bound)


# Who runs it


@every_option
def test_no_kernel_takes_them(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LN_ZOO_KERNELS", raising=False)
    for norm in (Identity(), LayerNorm(), BatchNorm()):
        layer = LSTM(3, 5, norm=norm, **options)
        (weights,) = (layer._effective_weights(*d) for d in layer._directions().items())
        (sites,) = layer._directions().values()
        records = [{role: s.to_spec() for role, s in sites.items()}]
        x, states = torch.randn(20, 2, 3), (torch.zeros(1, 2, 5),) * 2
        call = RecurrentCall(layer.cell, records, x, None, states, [weights])
        assert select_kernel(call) is None
    assert not lstm_cell(**options).has_kernels
    assert lstm_cell().has_kernels


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("cls", "options"),
    [(LSTM, OPTIONS[-1])]
    + [
        pytest.param(cls, options, marks=pytest.mark.slow)
        for cls, some in ((LSTM, OPTIONS[:-1]), (LSTMCell, OPTIONS))
        for options in some
    ],
    ids=str,
)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole(cls: type, options: dict[str, Any]) -> None:
    module = randomise(cls(3, 4, norm=LayerNorm(), **options))
    x = torch.randn(2, 3, 3) if cls is LSTM else torch.randn(3, 3)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x)[0], module(x)[0]
    assert_close([found], [expected], 1e-6)
    assert_close(
        gradients([found], module.parameters()), gradients([expected], module.parameters()), 1e-5
    )


@every_option
def test_transforms_of_functions(options: dict[str, Any]) -> None:
    layer = randomise(LSTM(3, 4, norm=LayerNorm(), dtype=F64, **options)).requires_grad_(False)
    x = torch.randn(5, 3, 2, 3, dtype=F64)  # five batches
    mapped = torch.vmap(lambda x: layer(x)[0])(x)
    assert_close(mapped, [layer(part)[0] for part in x])
    found = torch.vmap(torch.func.grad(lambda x: layer(x)[0].square().sum()))(x)
    for part, gradient in zip(x, found, strict=True):
        part = part.clone().requires_grad_()
        (expected,) = torch.autograd.grad(layer(part)[0].square().sum(), part)
        assert_close([gradient], [expected])


def test_gradients_of_gradients() -> None:
    layer = LSTM(2, 3, norm=LayerNorm(), peephole=True, derivative_bound=100.0, dtype=F64)
    x = torch.randn(3, 2, 2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], (x,), fast_mode=True)


@pytest.mark.parametrize("mode", ["autocast", "bfloat16"])
def test_half_precision(mode: str) -> None:
    torch.manual_seed(9)
    layer = LSTM(3, 4, norm=LayerNorm(), peephole=True, derivative_bound=10.0)
    x = torch.randn(5, 6, 3)
    expected, (_, c_n) = layer(x)
    if mode == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        output, (_, c) = layer(x)
    assert output.dtype == torch.bfloat16
    assert c.dtype == layer.weight_peephole_l0.dtype
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.05)
    torch.testing.assert_close(c.float(), c_n, rtol=0, atol=0.1)
    output.float().sum().backward()
    assert layer.weight_peephole_l0.grad.isfinite().all()
