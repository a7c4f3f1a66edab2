"""`WindowLSTM` against the equations, one example and one step at a time, in float64."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import reference
import torch
from accuracy import assert_as_accurate, generic_loop, moved
from engines import cpu_engines, needs_native
from layer_results import NORMS, assert_close, assert_same_statistics, filled, flat, gradients
from reference import Direction
from refusals import refuses
from torch import Tensor
from torch.nn import functional as F

from ln_zoo.kernels.native.runtime import unavailable_reason
from ln_zoo.layers import DRAWNetwork, WindowLSTM, WindowState
from ln_zoo.layers import window as window_module
from ln_zoo.norms import LayerNorm, Site, WeightNorm

F64 = torch.float64


def build(norm: str = "layer", sizes: tuple[int, ...] = (3, 6, 5, 3), **options: Any) -> Any:
    """A layer in float64 with random parameters, gains, shifts, scales and running averages."""
    torch.manual_seed(4)
    layer = WindowLSTM(*sizes, norm=NORMS[norm], **options).double()
    start = [a.detach().clone() for a in layer.window.parameters()]
    layer = filled(layer, 3 if norm == "batch-eval" else None)
    with torch.no_grad():
        for parameter, before in zip(layer.window.parameters(), start, strict=True):
            parameter.mul_(0.5).add_(before)
        # So that the window moves on.
        layer.window.bias[-layer.components :] += 1.5
    return layer


def given(layer: WindowLSTM, T: int = 17, N: int = 4, U: int = 6) -> tuple[Tensor, Tensor, Any]:
    """Inputs, vectors of texts of different lengths, and a state."""
    E = layer.character_size
    text = (
        torch.randn(N, U, E, dtype=F64)
        * (torch.arange(U) < U - torch.arange(N)[:, None])[..., None]
    )
    state = WindowState(
        *(torch.randn(N, layer.hidden_size, dtype=F64) for _ in range(2)),
        1 + torch.rand(N, layer.components, dtype=F64),
        torch.randn(N, E, dtype=F64),
    )
    return torch.randn(T, N, layer.input_size, dtype=F64), text, state


def equations(
    layer: WindowLSTM, x: Tensor, text: Tensor, state: WindowState
) -> tuple[Direction, tuple[Tensor, ...]]:
    """The reference of the cell; outputs, windows, last states and phi."""
    d, of = reference.read("LSTM", layer.cell), layer.window
    forms = layer.window_parameters, layer.window_input
    return d, reference.run_window(d, of.weight, of.bias, x, text, state, *forms)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    run = window_module.windowed_lstm
    monkeypatch.setattr(
        window_module,
        "windowed_lstm",
        lambda name, *arguments: found.append(name) or run(name, *arguments),
    )
    return found


def check(layer: WindowLSTM) -> None:
    """Results and all gradients."""
    x, text, state = given(layer)
    sources = [x, *state, *layer.parameters()]
    for a in sources:
        a.requires_grad_()
    d, (*expected, phi) = equations(layer, x, text, state)
    done = layer(x, text, state, trace=True)
    assert_close(done, (expected, phi), 1e-10)
    assert_close(gradients(done[:3], sources), gradients(expected, sources), 1e-9)
    assert_same_statistics(layer.cell.sites, d)


@pytest.mark.parametrize("norm", NORMS)
def test_equations(norm: str, asked: list[str]) -> None:
    check(build(norm))
    assert asked == []  # no kernel has float64


@pytest.mark.parametrize("places", [(), ("cell",), ("input",), ("recurrent", "cell")], ids=str)
@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_some_sites(places: tuple[str, ...], norm: str) -> None:
    layer = build(norm, normalize=places)
    assert {name.split(".")[2] for name, _ in layer.named_parameters() if "sites" in name} <= {
        *places
    }
    check(layer)


@pytest.mark.parametrize("parameters", ["exp", "softplus"])
@pytest.mark.parametrize("reads", ["state", "all"])
def test_forms_of_the_window(parameters: str, reads: str) -> None:
    layer = build("layer", window_parameters=parameters, window_input=reads)
    if reads == "all":
        assert layer.window.weight.shape == (9, 5 + 3 + 6)
        # What it shows may make it show more, without end.
        layer.window.weight.data.mul_(0.3)
    check(layer)


def test_options_of_the_cell_reach_it(asked: list[str]) -> None:
    layer = build("layer", peephole=True)
    check(layer)
    x, text, state = given(layer)
    x.requires_grad_()
    clipped = build("layer", peephole=True, derivative_bound=0.05)
    found, plain = (gradients([a(x, text, state).output], [x])[0] for a in (clipped, layer))
    assert not torch.allclose(found, plain)
    assert asked == []


def test_no_state_is_zeros() -> None:
    layer = build()
    x, text, _ = given(layer)
    start = layer.start(4)
    assert [tuple(a.shape) for a in start] == [(4, 6), (4, 6), (4, 3), (4, 5)]
    assert all(a.dtype == F64 and not a.any() for a in start)
    assert_close(layer(x, text), layer(x, text, start), 0)


def test_a_text_may_have_gradients(asked: list[str]) -> None:
    layer = build()
    x, text, state = given(layer)
    text.requires_grad_()
    expected = gradients(equations(layer, x, text, state)[1][:-1], [text])
    (found,) = gradients(flat(layer(x, text, state)), [text])
    assert_close(found, expected, 1e-9)
    assert asked == []


def test_a_text_may_be_of_whole_numbers() -> None:
    layer = build()
    x, _, state = given(layer)
    letters = F.one_hot(torch.randint(5, (4, 6)), 5)
    assert torch.equal(layer(x, letters, state).output, layer(x, letters.double(), state).output)


def test_parameters_and_their_start() -> None:
    torch.manual_seed(0)
    layer = WindowLSTM(3, 400, 57, norm=LayerNorm())
    shapes = {name: tuple(a.shape) for name, a in layer.named_parameters()}
    assert shapes.pop("window.weight") == (30, 400)
    assert shapes.pop("window.bias") == (30,)
    assert shapes.pop("cell.weight_ih") == (1600, 60)
    assert sum(math.prod(shape) for shape in shapes.values()) == 1600 * (400 + 4) + 800
    alpha, beta, kappa = layer.window.bias.exp().chunk(3)
    assert alpha.sum().item() == pytest.approx(1)
    assert torch.equal(beta, torch.ones(10))
    # A character in about 20 steps.
    assert kappa.mean().item() == pytest.approx(math.exp(-3))
    fast = WindowLSTM(3, 4, 5, 2, window_parameters="softplus", kappa_bias=1.0)
    assert F.softplus(fast.window.bias[:2]).sum().item() == pytest.approx(1)
    assert torch.equal(fast.window.bias[4:], torch.ones(2))


def test_reset_starts_anew() -> None:
    torch.manual_seed(3)
    layer = WindowLSTM(3, 6, 5, 3, norm=WeightNorm(), peephole=True, kappa_bias=-2.0)
    fresh = {name: a.clone() for name, a in layer.state_dict().items()}
    with torch.no_grad():
        for a in layer.parameters():
            a.fill_(9)
    layer.reset_parameters()
    state = layer.state_dict()
    for name, a in state.items():
        assert a.abs().max() < 5, name
    assert torch.equal(state["window.bias"], fresh["window.bias"])
    norms = layer.cell.weight_hh.norm(dim=1)
    torch.testing.assert_close(layer.cell.sites["recurrent"].scale, norms)


@pytest.mark.parametrize("norm", ["layer", "batch-eval"])
def test_copies_behave_the_same(norm: str) -> None:
    layer = build(norm)
    x, text, state = given(layer)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    torch.manual_seed(77)
    other = WindowLSTM(3, 6, 5, 3, norm=NORMS[norm]).double().train(layer.training)
    other.load_state_dict(layer.state_dict())
    expected = layer(x, text, state)
    for twin in (*twins, other):
        assert_close(twin(x, text, state), expected, 0)
        # The original goes on by itself.
        for a in twin.parameters():
            a.data.zero_()
    assert layer.window.bias.any()


@pytest.fixture(params=[*cpu_engines("window"), "0"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LN_ZOO_KERNELS", request.param)
    return request.param


def single(norm: str = "layer", **options: Any) -> tuple[WindowLSTM, Tensor, Tensor, Any]:
    layer = build(norm, (3, 20, 5, 3), **options)
    with torch.no_grad():
        for parameter in layer.cell.parameters():
            parameter.mul_(0.4)
    x, text, state = given(layer)
    return layer.float(), x.float(), text.float(), WindowState(*(a.float() for a in state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype, kernels: str) -> None:
    layer, x, text, state = single()
    expected = flat(layer(x, text, state))
    grads = gradients(expected, list(layer.parameters()))
    with torch.autocast("cpu", dtype):
        done = flat(layer(x, text, state))
        narrow = layer(x.to(dtype), text.to(dtype), state).output
        # What other layers make is taken up in float32.
        assert narrow.dtype == torch.float32
        # A backward within autocast is the kernels' own; functions of torch go outside of it.
        again = [] if kernels == "0" else gradients(done, list(layer.parameters()))
    again = again or gradients(done, list(layer.parameters()))
    assert {a.dtype for a in (*done, *again)} == {torch.float32}
    assert_close((done, again), (expected, grads), 0)


def test_half_precision_layers_run() -> None:
    layer, x, text, _ = single()
    expected = layer(x, text).output
    narrow = layer.bfloat16()(x.bfloat16(), text.bfloat16())
    assert narrow.output.dtype == narrow.state.kappa.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.output.float(), expected, rtol=0, atol=0.1)


@pytest.mark.usefixtures("compiler")
def test_compiles_whole() -> None:
    layer = build("layer")
    x, text, state = given(layer, 3)
    x.requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    found, expected = (of(x, text, state) for of in (compiled, layer))
    assert_close(found, expected, 1e-10)
    assert_close(gradients(found, [x]), gradients(expected, [x]), 1e-10)


@needs_native
def test_transforms_of_functions(asked: list[str]) -> None:
    layer, x, text, state = single()
    layer.requires_grad_(False)
    expected = layer(x, text, state).output
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x, text, state).output.sum(), x)
    x = x.detach()
    assert len(asked) == 2

    def loop(k: int) -> dict[str, Tensor]:
        y = moved(x, k).clone().requires_grad_()
        with generic_loop():
            output = layer(y, text, state).output
        (g,) = torch.autograd.grad(output.sum(), y)
        return {"output": output, "gradient": g, "tangent": (g * y).sum()}

    _, tangent = torch.func.jvp(lambda x: layer(x, text, state).output.sum(), (x,), (x,))
    found = {
        "output": torch.vmap(lambda x: layer(x, text, state).output)(torch.stack([x, x]))[1],
        "gradient": torch.func.grad(lambda x: layer(x, text, state).output.sum())(x),
        "tangent": tangent,
    }
    wanted = {"output": expected, "gradient": gradient, "tangent": (gradient * x).sum()}
    assert_as_accurate(found, wanted, loop)
    assert len(asked) == 2


def test_gradients_of_gradients_need_the_generic_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(sizes=(2, 3, 3, 2))
    x, text, state = given(layer, 16, 2, 3)
    x.requires_grad_()

    def second(layer: WindowLSTM, x: Tensor, text: Tensor, state: Any) -> Tensor:
        output = layer(x, text, state).output
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    if unavailable_reason() is None:
        narrow, y, *rest = single()
        with pytest.raises(RuntimeError, match="no gradients of gradients"):
            second(narrow, y.requires_grad_(), *rest)
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    assert second(layer, x, text, state).isfinite().all()
    assert torch.autograd.gradgradcheck(
        lambda x: layer(x, text, state).output, (x,), fast_mode=True
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({name: 0}, name) for name in ("input_size", "hidden_size", "character_size")),
        ({"components": 0}, "components"),
        ({"window_parameters": "relu"}, "window_parameters .*'relu'"),
        ({"window_input": "h1"}, "window_input .*'h1'"),
        ({"derivative_bound": 0.0}, r"derivative_bound .*0\.0"),
        ({"norm": LayerNorm(), "normalize": ("gates",)}, "gates"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    sizes = {"input_size": 3, "hidden_size": 4, "character_size": 5, "components": 2}
    refuses(named, WindowLSTM, **sizes | options)


@pytest.mark.parametrize(
    ("x", "text", "name"),
    [
        *(((*shape,), (4, 6, 5), "input") for shape in ((18, 4), (18, 4, 2), (0, 4, 3))),
        *(((18, 4, 3), shape, "text") for shape in ((3, 6, 5), (4, 6, 4), (6, 5))),
    ],
    ids=str,
)
def test_wrong_shapes(x: tuple[int, ...], text: tuple[int, ...], name: str) -> None:
    refuses(rf"{name} must be \(", build(), torch.zeros(x), torch.zeros(text))


@pytest.mark.parametrize("field", WindowState._fields)
def test_wrong_states(field: str) -> None:
    """A kernel would read beyond them, or they would broadcast."""
    layer = build()
    x, text, state = given(layer)
    a = getattr(state, field)
    for wrong in (a[:3], a[:1], a[:, 1:], a[None]):
        with pytest.raises(ValueError, match=rf"state\.{field} must be \(4, {a.shape[1]}\)"):
            layer(x, text, state._replace(**{field: wrong}))


@pytest.mark.parametrize("kernels", ["1", "0"])
def test_norms_are_called_once_at_the_start_of_a_sequence(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[str, int]] = []

    class Hearing(LayerNorm):
        def on_sequence_start(self, site: Site, steps: int) -> None:
            began.append((site.role, steps))

    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    layer = WindowLSTM(3, 6, 5, 3, norm=Hearing())
    layer(torch.randn(17, 2, 3), torch.randn(2, 4, 5))
    assert sorted(began) == [("cell", 17), ("input", 17), ("recurrent", 17)]
    began.clear()
    network = DRAWNetwork(4, 6, hidden_size=5, latent_size=3, norm=Hearing())
    network(torch.rand(2, 4, 6), torch.randn(3, 2, 3))
    network.generate(torch.randn(5, 2, 3))
    # Encoder and decoder, which normalise cell states alone.
    assert began == 2 * [("cell", 3)] + 2 * [("cell", 5)]
