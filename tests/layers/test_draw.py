"""`DRAWNetwork` against the equations, one image and one pixel at a time, in float64."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import draw_reference
import pytest
import torch
from draw_reference import Drawn
from layer_results import NORMS, assert_close, assert_same_statistics, filled, gradients
from refusals import refuses
from torch import Tensor

from ln_zoo.layers import DRAWNetwork, DRAWOutput
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm

F64 = torch.float64
WITHOUT_ATTENTION: dict[str, Any] = {"read_size": None, "write_size": None}
HEIGHT, WIDTH, GLIMPSES, EXAMPLES = 4, 6, 4, 3


def build(norm: str = "layer", **options: Any) -> DRAWNetwork:
    """A network in float64 with random parameters and running averages."""
    torch.manual_seed(4)
    sizes: dict[str, Any] = {"hidden_size": 5, "latent_size": 3, "read_size": 2, "write_size": 3}
    network = DRAWNetwork(HEIGHT, WIDTH, norm=NORMS[norm], **sizes | options).double()
    network = filled(network, 3 if norm == "batch-eval" else None)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith(("read.", "write.")):
                parameter.mul_(0.5)  # far outside an image the equations divide 0 by 0
    return network


def given(network: DRAWNetwork) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.rand(EXAMPLES, network.height, network.width, generator=generator, dtype=F64)
    shape = (GLIMPSES, EXAMPLES, network.latent_size)
    return images, torch.randn(shape, generator=generator, dtype=F64)


def results(done: DRAWOutput | Drawn) -> list[Tensor]:
    last = done.canvases[-1] if isinstance(done, Drawn) else done.logits
    return [a for a in (last, done.means, done.log_stds) if a is not None]


def check(network: DRAWNetwork, eps: float | None = None, generates: bool = False) -> None:
    """Results, what was traced, running averages and all gradients."""
    images, noise = given(network)
    sources = [*([] if generates else [images]), noise, *network.parameters()]
    for a in sources:
        a.requires_grad_()
    p = draw_reference.parameters_of(network)
    expected = draw_reference.draw(p, None if generates else images, noise, eps)
    done = network.generate(noise, True) if generates else network(images, noise, True)
    assert_close(results(done), results(expected), 1e-10, 1e-11)
    # The stride of a single filter is free.
    sizes = {"canvases": None, "read": network.read_size, "write": network.write_size}
    for name, size in sizes.items():
        one, two = getattr(done.trace, name), getattr(expected, name)
        assert (one is None) == (two is None)
        if one is not None:
            assert not one.requires_grad
            kept = [0, 1, 3, 4] if size == 1 else slice(None)
            assert_close(one[..., kept], two.detach()[..., kept], 1e-10, 1e-11)
    found, wanted = (gradients(results(a), sources) for a in (done, expected))
    assert_close(found, wanted, 1e-9, 1e-10)
    if not generates:
        assert_same_statistics(network.encoder.sites, p.encoder)
        assert_same_statistics(network.decoder.sites, p.decoder)


@pytest.mark.parametrize("norm", ["none", "layer", "batch-eval"])
@pytest.mark.parametrize("options", [{}, WITHOUT_ATTENTION], ids=["attention", "without"])
def test_generated_images_are_those_of_the_equations(norm: str, options: dict[str, Any]) -> None:
    check(build(norm, **options), generates=True)


OPTIONS: list[dict[str, Any]] = [
    {"peephole": True},
    {"read_size": None},
    {"write_size": None},
    WITHOUT_ATTENTION,
    {"read_size": 3, "write_size": 2},
    {"normalize": ("input", "recurrent", "cell")},
    {"normalize": ("recurrent",)},
    {"learn_initial_state": False},
    {"learn_initial_canvas": False},
    *({"filter_norm": "eps", "filter_eps": eps} for eps in (1e-8, 0.2)),
]


@pytest.mark.parametrize(
    ("norm", "options"),
    [*((norm, {}) for norm in NORMS), *(("layer", options) for options in OPTIONS)],
    ids=str,
)
def test_results_and_gradients_are_those_of_the_equations(
    norm: str, options: dict[str, Any]
) -> None:
    check(build(norm, **options), options.get("filter_eps"))


@pytest.mark.parametrize("side", ["read", "write"])
def test_one_filter(side: str) -> None:
    """Its stride has no effect; the gradient is 0, not NaN."""
    network = build(**{f"{side}_size": 1})
    check(network)
    weight = network.get_parameter(f"{side}.weight")
    (gradient,) = gradients(results(network(*given(network))), [weight])
    assert gradient[3].eq(0).all()


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (Identity(), set()),
        (LayerNorm(), {"cell.gain", "cell.shift"}),
        (RMSNorm(), {"cell.gain", "cell.shift"}),
        (BatchNorm(), {"cell.gain", "cell.shift"}),
        (WeightNorm(), {"input.scale", "recurrent.scale"}),
    ],
    ids=lambda a: type(a).__name__,
)
def test_where_norms_act(norm: Norm, expected: set[str]) -> None:
    """On sums at the cell alone, in both LSTMs; on weights in both."""
    network = build_small(norm)
    names = {name for name, _ in network.named_parameters() if "sites" in name}
    assert names == {f"{cell}.sites.{n}" for cell in ("encoder", "decoder") for n in expected}
    other = build_small(norm, normalize=("input",))
    shown = {name.split(".")[2] for name, _ in other.named_parameters() if "sites" in name}
    assert shown == (set() if isinstance(norm, Identity) else {"input"})


def build_small(norm: Norm | None = None, **options: Any) -> DRAWNetwork:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 5, "latent_size": 3}
    return DRAWNetwork(HEIGHT, WIDTH, norm=norm, **sizes | options)


@dataclass(frozen=True)
class Weighted(Norm):
    """A user's norm, with parameters called as it likes."""

    start: float = 0.5

    def init_params(self, site: Site) -> None:
        site.add_parameter("weight_on", torch.full((site.features,), self.start))
        site.add_parameter("bias_on", torch.full((site.features,), self.start))

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return a * site.weight_on + site.bias_on


def test_parameters_of_a_users_norm_start_as_it_says() -> None:
    network = build_small(Weighted(), init_std=0.01)
    own = [a for name, a in network.named_parameters() if ".sites." in name]
    assert len(own) == 4
    assert all(a.eq(0.5).all() for a in own)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 963_323),
        ({"norm": LayerNorm()}, 964_347),
        ({"norm": RMSNorm()}, 964_347),
        ({"norm": LayerNorm(), "peephole": True}, 964_347 + 2 * 3 * 256),
        ({"learn_initial_state": False}, 963_323 - 4 * 256),
        ({"learn_initial_canvas": False}, 963_323 - 784),
        # Two whole images in place of 2 x 2 x 2 numbers; 784 pixels in place of 25; no maps of 5.
        (WITHOUT_ATTENTION, 963_323 + 1024 * 2 * (784 - 4) + 257 * (784 - 25) - 2 * 1285),
    ],
    ids=str,
)
def test_number_of_parameters_at_the_sources_size(options: dict[str, Any], expected: int) -> None:
    network = DRAWNetwork(28, 28, **options)
    assert sum(p.numel() for p in network.parameters()) == expected


@pytest.mark.parametrize("norm", [LayerNorm(), WeightNorm(), BatchNorm()], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_initial_weights(norm: Norm, again: bool) -> None:
    torch.manual_seed(0)
    network = DRAWNetwork(
        9, 9, hidden_size=64, norm=norm, forget_bias=1.5, peephole=True, init_std=0.01
    )
    if again:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(3.0)
        network.reset_parameters()
    for name, parameter in network.named_parameters():
        kind = name.rpartition(".")[2]
        if ".sites." in name:
            continue
        if "weight" in kind:
            few = 4 * 0.01 / parameter.numel() ** 0.5
            assert abs(float(parameter.detach().std()) - 0.01) < few, name
            assert abs(float(parameter.detach().mean())) < few, name
        elif kind == "bias_ih":
            parts = parameter.detach().chunk(4)
            assert [set(part.tolist()) for part in parts] == [{0.0}, {1.5}, {0.0}, {0.0}]
        else:
            assert parameter.eq(0).all(), name
    for cell in (network.encoder, network.decoder):
        start = {name: a for name, a in cell.named_parameters() if ".sites." in f".{name}"}
        gain = start.get("sites.cell.gain")
        if gain is not None:
            assert gain.eq(0.1 if norm.per_timestep else 1.0).all()
            assert start["sites.cell.shift"].eq(0).all()
        else:
            # Weights in use are those drawn: each row's scale is its length.
            assert torch.allclose(cell.effective_weights().ih, cell.weight_ih)
            assert torch.allclose(start["sites.input.scale"], cell.weight_ih.norm(dim=1))


def test_initial_weights_of_torch() -> None:
    torch.manual_seed(0)
    network = DRAWNetwork(9, 9, hidden_size=64)
    for layer in (network.read, network.write, network.patch):
        assert 0.1 < float(layer.weight.detach().abs().max()) <= 0.125
        assert layer.bias.ne(0).all()
    assert 0.1 < float(network.encoder.weight_hh.detach().abs().max()) <= 0.125
    assert network.encoder.bias_ih.ne(0).all()
    filled = DRAWNetwork(9, 9, hidden_size=64, forget_bias=0.0).encoder
    forget = (filled.bias_ih + filled.bias_hh).chunk(4)[1]
    assert forget.eq(0).all()
    assert filled.bias_ih.ne(0).sum() == 3 * 64
    assert abs(float(network.posterior.weight.detach().std()) - 0.01) < 0.001
    assert network.posterior.bias.eq(0).all()


@pytest.mark.parametrize("init_std", [None, 0.01])
def test_a_read_window_that_starts_inside_the_image(init_std: float | None) -> None:
    networks = []
    for bias in (None, -1.0):
        torch.manual_seed(0)
        networks.append(DRAWNetwork(28, 28, init_std=init_std, read_stride_bias=bias))
    networks[1].load_state_dict(networks[0].state_dict())
    torch.manual_seed(0)
    networks[1].reset_parameters()
    changed = {
        name: parameter.ne(other)
        for (name, parameter), other in zip(
            networks[1].named_parameters(), networks[0].parameters(), strict=True
        )
    }
    assert [name for name, each in changed.items() if each.any()] == ["read.bias"]
    assert changed["read.bias"].tolist() == [False, False, False, True, False]
    state = torch.zeros(1, 256)
    strides = []
    for network in networks:
        grid = network.read(state)[0].detach()
        strides.append(float(grid[3].exp()) * 27 / (network.read_size - 1))
    assert strides[0] > 24
    assert abs(strides[1] - 27 / math.e) < 1e-4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"read_size": 0}, "read_size .*0"),
        ({"write_size": -1}, "write_size .*-1"),
        ({"filter_norm": "sum"}, "filter_norm .*'sum'"),
        ({"filter_eps": 0.0}, r"filter_eps .*0\.0"),
        ({"log_clamp": -1.0}, r"log_clamp .*-1\.0"),
        ({"log_clamp": float("inf")}, "log_clamp .*inf"),
        ({"init_std": float("nan")}, "init_std .*nan"),
        ({"normalize": ("sum",)}, "normalize .*'sum'"),
        ({"normalize": "cell"}, "normalize .*'cell'"),
        ({"read_stride_bias": -11.0}, r"read_stride_bias .*log_clamp=10\.0 .*-11\.0"),
        ({"read_stride_bias": float("nan")}, "read_stride_bias .*nan"),
        ({"read_stride_bias": -1.0, "read_size": None}, r"read_stride_bias=-1\.0 .*read_size"),
    ],
    ids=str,
)
def test_wrong_options(options: dict[str, Any], named: str) -> None:
    refuses(named, build_small, **options)


@pytest.mark.parametrize(
    ("images", "noise", "named"),
    [
        ((2, 6, 4), (3, 2, 3), r"images .*\(N, 4, 6\).*\(2, 6, 4\)"),
        ((2, 1, 4, 6), (3, 2, 3), r"images .*\(2, 1, 4, 6\)"),
        ((2, 4, 6), (3, 1, 3), r"noise .*\(T, 2, 3\).*\(3, 1, 3\)"),
        ((2, 4, 6), (3, 2, 4), r"noise .*\(3, 2, 4\)"),
        ((2, 4, 6), (0, 2, 3), r"noise .*\(0, 2, 3\)"),
        ((2, 4, 6), (2, 3), r"noise .*\(2, 3\)"),
        (None, (0, 2, 3), r"latents .*\(0, 2, 3\)"),
        (None, (3, 2, 4), r"latents .*\(3, 2, 4\)"),
        (None, (3,), r"latents .*\(3,\)"),
    ],
)
def test_wrong_sizes(images: tuple[int, ...] | None, noise: tuple[int, ...], named: str) -> None:
    network = build_small()
    run = network.generate if images is None else network
    given = [torch.zeros(shape) for shape in (images, noise) if shape is not None]
    refuses(named, run, *given)


def test_any_number_of_glimpses_and_examples() -> None:
    network = build()
    images, noise = given(network)
    for examples in (0, 1, 2):
        for glimpses in (1, 3):
            done = network(images[:examples], noise[:glimpses, :examples])
            assert done.logits.shape == (examples, HEIGHT, WIDTH)
            assert done.means.shape == done.log_stds.shape == (glimpses, examples, 3)
    assert network(images, noise).trace is None


def test_the_trace_changes_nothing() -> None:
    network = build()
    images, noise = given(network)
    plain, traced = network(images, noise), network(images, noise, trace=True)
    # A kernel may run the one, and functions of torch run the other.
    torch.testing.assert_close(plain.logits, traced.logits)
    assert torch.equal(traced.trace.canvases[-1], traced.logits)
    assert torch.equal(traced.trace.canvases[0][1], network.initial["canvas"])
    made = network.generate(noise, trace=True)
    assert made.means is made.log_stds is made.trace.read is None
    assert torch.equal(made.trace.canvases[-1], made.logits)


def test_logarithms_beyond_the_bound_are_clamped_and_counted() -> None:
    network = build(log_clamp=2.0)
    images, noise = given(network)
    with torch.no_grad():
        for layer in (network.read, network.write, network.posterior):
            layer.weight.mul_(0.01)
            layer.bias.zero_()
    assert network(images, noise).clamped == 0
    with torch.no_grad():
        network.read.bias[2] = 3.0
    assert network(images, noise).clamped == GLIMPSES * EXAMPLES
    with torch.no_grad():
        network.write.bias[3] = -3.0
    assert network(images, noise).clamped == 2 * GLIMPSES * EXAMPLES
    with torch.no_grad():
        network.posterior.bias[3:5] = 900.0
        network.posterior.bias[0] = 900.0  # a mean may be anything
    done = network(images, noise, trace=True)
    assert done.clamped == 4 * GLIMPSES * EXAMPLES
    assert done.log_stds[..., :2].eq(2).all()
    assert done.means[..., 0].gt(800).all()
    e = torch.tensor(2.0, dtype=F64).exp()
    assert torch.allclose(done.trace.read[..., 3], e.sqrt())
    assert torch.allclose(done.trace.write[..., 2], 2.5 / e)
    assert done.logits.isfinite().all()


@pytest.mark.parametrize("options", [{}, WITHOUT_ATTENTION], ids=["attention", "without"])
def test_under_autocast_only_products_of_weights_are_rounded(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters, canvas, latents and cell states are float32, and results close."""
    network = build(**options).float()
    images, noise = (a.float() for a in given(network))
    exact = network(images, noise, trace=True)
    banks: list[Tensor] = []
    grid = DRAWNetwork._grid

    def spied(*arguments: Any) -> Any:
        found = grid(*arguments)
        banks.extend(found)
        return found

    monkeypatch.setattr(DRAWNetwork, "_grid", spied)
    rounded_products: list[torch.dtype] = []
    network.patch.register_forward_hook(lambda *a: rounded_products.append(a[2].dtype))
    states: list[Tensor] = []
    for cell in (network.encoder, network.decoder):
        cell.register_forward_hook(lambda *a: states.extend(a[2]))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(images, noise, trace=True)
    assert len(banks) == (0 if options else 3 * 2 * GLIMPSES)
    assert len(states) == 4 * GLIMPSES
    assert set(rounded_products) == {torch.bfloat16}
    tensors = [*banks, *states, *results(rounded), rounded.trace.canvases]
    assert {a.dtype for a in tensors} == {torch.float32}
    for one, two in zip(results(rounded), results(exact), strict=True):
        assert not torch.equal(one, two)
        assert (one - two).abs().max() < 0.05 * two.abs().max()


@pytest.mark.parametrize("norm", ["none", "layer", "batch", "weight"])
def test_weights_in_half_precision(norm: str) -> None:
    network = build(norm).float()
    images, noise = (a.float() for a in given(network))
    exact = network(images, noise)
    half = copy.deepcopy(network).bfloat16()
    done = half(images.bfloat16(), noise, trace=True)
    assert {a.dtype for a in (*results(done), done.trace.canvases)} == {torch.float32}
    for one, two in zip(results(done), results(exact), strict=True):
        assert (one - two).abs().max() < 0.1 * two.abs().max()
    done.logits.sum().backward()
    assert half.patch.weight.grad is not None
    assert half.generate(noise).logits.isfinite().all()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """`torch.compile` as far as the graphs it sees; the modes that were asked for."""
    from ln_zoo.layers import draw

    modes: list[str] = []
    compile = torch.compile

    def seen(function: Any, *, mode: str) -> Any:
        modes.append(mode)
        return compile(function, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", seen)
    draw._compiled.cache_clear()
    yield modes
    draw._compiled.cache_clear()


def test_a_glimpse_is_one_graph(
    without_compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same numbers and gradients, also in copies with other weights."""
    network = build(hidden_size=3, latent_size=2)
    images, noise = given(network)
    sources = list(network.parameters())
    expected = results(network(images, noise))
    other = copy.deepcopy(network)
    other.compile_glimpse("max-autotune")
    with torch.no_grad():
        other.patch.bias.add_(1)
        wanted = network.generate(noise).logits
    network.compile_glimpse("reduce-overhead")
    done = results(network(images, noise))
    assert without_compiler == ["max-autotune", "reduce-overhead"]
    assert_close(done, expected, 1e-10, 1e-11)
    assert_close(gradients(done, sources), gradients(expected, sources), 1e-9, 1e-10)
    # A CUDA graph would overwrite the glimpse before, where no gradients are to come.
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr("ln_zoo.layers.draw._compiled", None)
        torch.testing.assert_close(network(images, noise).logits, done[0], rtol=1e-10, atol=1e-11)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(network)))
    with torch.no_grad():
        assert torch.allclose(copied.generate(noise).logits, wanted, rtol=1e-10)
        copied.patch.bias.add_(1)
        assert not torch.allclose(copied.generate(noise).logits, wanted, rtol=1e-3)


def test_a_mode_that_torch_does_not_know() -> None:
    refuses(r"compile_mode: .*fancy.*reduce-overhead", build().compile_glimpse, "fancy")
