"""`DRAWNetwork` against the equations, one image and one pixel at a time, in float64."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import draw_reference
import pytest
import torch
from draw_reference import F64, Drawn
from reference import Rule
from torch import Tensor, nn

from ln_zoo.layers import DRAWNetwork, DRAWOutput
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, Site, WeightNorm

NORMS: dict[str, tuple[Norm, Rule]] = {
    "none": (Identity(), Rule("none")),
    "layer": (LayerNorm(eps=1e-3), Rule("layer", eps=1e-3)),
    "rms": (RMSNorm(eps=1e-3), Rule("rms", eps=1e-3)),
    "weight": (WeightNorm(), Rule("weight")),
    "batch": (
        BatchNorm(eps=1e-3, max_steps=3, momentum=0.3),
        Rule("batch", eps=1e-3, max_steps=3, momentum=0.3),
    ),
    "batch-eval": (BatchNorm(eps=1e-3, max_steps=3), Rule("batch", eps=1e-3, max_steps=3)),
}
WITHOUT_ATTENTION: dict[str, Any] = {"read_size": None, "write_size": None}
HEIGHT, WIDTH, GLIMPSES, EXAMPLES = 4, 6, 4, 3


def build(norm: str = "layer", **options: Any) -> DRAWNetwork:
    """A network in float64 with random parameters and running averages."""
    generator = torch.Generator().manual_seed(4)
    sizes: dict[str, Any] = {"hidden_size": 5, "latent_size": 3, "read_size": 2, "write_size": 3}
    network = DRAWNetwork(HEIGHT, WIDTH, norm=NORMS[norm][0], **sizes | options).double()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=F64)
            parameter.copy_(2 * noise - 1)
            if name.endswith(("gain", "scale")):
                parameter.add_(0.3 * parameter.sign())
            if name.startswith(("read.", "write.")):
                parameter.mul_(0.5)  # far outside an image the equations divide 0 by 0
        for name, buffer in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                noise = torch.rand(buffer.shape, generator=generator, dtype=F64)
                buffer.copy_(0.1 + noise)
            elif norm == "batch-eval":
                buffer[:2] = 7  # the last of three rows was never reached
    return network.train(norm != "batch-eval")


def given(network: DRAWNetwork) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.rand(EXAMPLES, network.height, network.width, generator=generator, dtype=F64)
    shape = (GLIMPSES, EXAMPLES, network.latent_size)
    return images, torch.randn(shape, generator=generator, dtype=F64)


def gradients(results: list[Tensor], sources: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(6)
    parts = [(a * torch.randn(a.shape, generator=generator, dtype=F64)).sum() for a in results]
    return torch.autograd.grad(
        torch.stack(parts).sum(), sources, allow_unused=True, materialize_grads=True
    )


def results(done: DRAWOutput | Drawn) -> list[Tensor]:
    last = done.canvases[-1] if isinstance(done, Drawn) else done.logits
    return [a for a in (last, done.means, done.log_stds) if a is not None]


def check(network: DRAWNetwork, norm: str, eps: float | None = None, made_up: bool = False) -> None:
    """Results, what was traced, running averages and all gradients."""
    images, noise = given(network)
    rule = NORMS[norm][1]
    rules = tuple(
        draw_reference.direction(cell, copy.copy(rule))
        for cell in (network.encoder, network.decoder)
    )
    sources = [noise, *network.parameters()] if made_up else [images, noise, *network.parameters()]
    for a in sources:
        a.requires_grad_()
    expected = draw_reference.draw(network, rules, None if made_up else images, noise, eps)
    done = network.generate(noise, True) if made_up else network(images, noise, True)
    for one, two in zip(results(done), results(expected), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)
    assert done.trace is not None
    for one, two in (
        (done.trace.canvases, expected.canvases),
        (done.trace.read, expected.read),
        (done.trace.write, expected.write),
    ):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert not one.requires_grad
            torch.testing.assert_close(one, two.detach(), rtol=1e-10, atol=1e-11)
    found = gradients(results(done), sources)
    wanted = gradients(results(expected), sources)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)
    if not made_up:
        assert all(a.ne(0).any() for a in wanted)
        buffers = dict(network.named_buffers())
        for prefix, d in zip(("encoder", "decoder"), rules, strict=True):
            for role, statistics in d.statistics.items():
                for kind, value in (("mean", statistics.mean), ("var", statistics.var)):
                    kept = buffers[f"{prefix}.sites.{role}.running_{kind}"]
                    torch.testing.assert_close(kept, value, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("norm", NORMS)
def test_results_and_gradients_are_those_of_the_equations(norm: str) -> None:
    check(build(norm), norm)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("norm", ["none", "layer", "batch-eval"])
@pytest.mark.parametrize("options", [{}, WITHOUT_ATTENTION], ids=["attention", "without"])
def test_images_made_up_are_those_of_the_equations(norm: str, options: dict[str, Any]) -> None:
    check(build(norm, **options), norm, made_up=True)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize(
    "options",
    [
        {"peephole": True},
        {"read_size": None},
        {"write_size": None},
        WITHOUT_ATTENTION,
        {"read_size": 3, "write_size": 2},
        {"normalize": ("input", "recurrent", "cell")},
        {"normalize": ("recurrent",)},
        {"learn_initial_state": False},
        {"learn_initial_canvas": False},
    ],
    ids=str,
)
def test_every_option_is_that_of_the_equations(options: dict[str, Any]) -> None:
    check(build("layer", **options), "layer")


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("eps", [1e-8, 0.2])
def test_filters_divided_by_their_sum_and_eps(eps: float) -> None:
    network = build(filter_norm="eps", filter_eps=eps)
    check(network, "layer", eps=eps)


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("options", [{"read_size": 1}, {"write_size": 1}], ids=str)
def test_one_filter(options: dict[str, Any]) -> None:
    """Its stride has no effect; the gradient is 0, not NaN."""
    network = build(**options)
    images, noise = given(network)
    rules = tuple(
        draw_reference.direction(cell, NORMS["layer"][1])
        for cell in (network.encoder, network.decoder)
    )
    expected = results(draw_reference.draw(network, rules, images, noise))
    done = results(network(images, noise))
    for one, two in zip(done, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)
    sources = list(network.parameters())
    found = dict(zip(dict(network.named_parameters()), gradients(done, sources), strict=True))
    wanted = gradients(expected, sources)
    for (name, one), two in zip(found.items(), wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10, msg=name)
    layer = "read" if "read_size" in options else "write"
    assert found[f"{layer}.weight"][3].eq(0).all()


@pytest.mark.parametrize("peephole", [False, True])
def test_without_a_norm_it_is_torchs_cell(peephole: bool) -> None:
    """The same weights in `torch.nn.LSTMCell`, with all else in functions of torch."""
    network = build("none", **WITHOUT_ATTENTION, peephole=peephole)
    if peephole:  # that see nothing
        for cell in (network.encoder, network.decoder):
            assert cell.weight_peephole is not None
            nn.init.zeros_(cell.weight_peephole)
    cells = []
    for cell in (network.encoder, network.decoder):
        theirs = nn.LSTMCell(cell.input_size, cell.hidden_size, dtype=F64)
        theirs.load_state_dict({name: getattr(cell, name) for name in theirs.state_dict()})
        cells.append(theirs)
    images, noise = given(network)
    start = {name: a.expand(EXAMPLES, *a.shape) for name, a in network.initial.items()}
    encoder = (start["encoder_h"], start["encoder_c"])
    decoder, canvas = (start["decoder_h"], start["decoder_c"]), start["canvas"]
    for t in range(GLIMPSES):
        both = torch.cat([images.flatten(1), (images - canvas.sigmoid()).flatten(1)], 1)
        encoder = cells[0](torch.cat([both, decoder[0]], 1), encoder)
        mean, log_std = network.posterior(encoder[0]).chunk(2, 1)
        decoder = cells[1](mean + log_std.exp() * noise[t], decoder)
        canvas = canvas + network.patch(decoder[0]).view_as(canvas)
    assert torch.allclose(network(images, noise).logits, canvas, rtol=1e-12, atol=1e-12)


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
    """As it starts."""
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


def test_a_users_own_norm() -> None:
    """Its parameters start as it says, and are applied as it says."""
    network = build_small(Weighted(0.5))
    for cell in (network.encoder, network.decoder):
        assert cell.sites["cell"].weight_on.eq(0.5).all()  # type: ignore[index]
        assert cell.sites["cell"].bias_on.eq(0.5).all()  # type: ignore[index]
    network.double()
    images, noise = given(network)
    plain = build_small().double()
    weights = plain.state_dict()
    weights.update({k: v for k, v in network.state_dict().items() if k in weights})
    plain.load_state_dict(weights)
    outputs = [a(images, noise).logits for a in (network, plain)]
    assert not torch.allclose(*outputs, rtol=1e-3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".sites." in name:
                parameter.fill_(float("weight" in name))
    assert torch.allclose(network(images, noise).logits, outputs[1], rtol=1e-12)


# How it starts


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


def test_parts_at_the_sources_size() -> None:
    counts = {
        name: sum(p.numel() for p in child.parameters())
        for name, child in DRAWNetwork(28, 28).named_children()
    }
    assert counts == {
        "encoder": 533_504 + 1024,  # torch has a second bias
        "decoder": 365_568 + 1024,
        "posterior": 51_400,
        "read": 1_285,
        "write": 1_285,
        "patch": 6_425,
        "initial": 1_024 + 784,
    }


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
        assert layer is not None
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


# What it is given


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "every size must be at least 1, got {'hidden_size': 0}"),
        (
            {"read_size": 0, "write_size": -1},
            "at least 1, got {'read_size': 0, 'write_size': -1}",
        ),
        ({"filter_norm": "sum"}, "filter_norm must be one of softmax, eps, got 'sum'"),
        ({"filter_eps": 0.0}, "filter_eps must be positive, got 0.0"),
        ({"log_clamp": -1.0}, "log_clamp must be positive and at most 20.0, .* got -1.0"),
        ({"log_clamp": float("inf")}, "log_clamp must be positive and at most 20.0, .* got inf"),
        ({"init_std": float("nan")}, "init_std must be positive, got nan"),
        ({"normalize": ("sum",)}, "normalize names 'sum', but this layer's places are 'input'"),
        ({"normalize": "cell"}, "normalize must be a tuple of names, got 'cell'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_small(**options)


@pytest.mark.parametrize(
    ("images", "noise", "message"),
    [
        ((2, 6, 4), (3, 2, 3), r"images must be \(N, 4, 6\), got \(2, 6, 4\)"),
        ((2, 1, 4, 6), (3, 2, 3), r"images must be \(N, 4, 6\), got \(2, 1, 4, 6\)"),
        ((2, 4, 6), (3, 1, 3), r"noise must be \(T, 2, 3\) with T at least 1, got \(3, 1, 3\)"),
        ((2, 4, 6), (3, 2, 4), r"noise must be \(T, 2, 3\) .* got \(3, 2, 4\)"),
        ((2, 4, 6), (0, 2, 3), r"T at least 1, got \(0, 2, 3\)"),
        ((2, 4, 6), (2, 3), r"noise must be \(T, 2, 3\) .* got \(2, 3\)"),
        (None, (0, 2, 3), r"T at least 1, got \(0, 2, 3\)"),
        (None, (3, 2, 4), r"latents must be \(T, 2, 3\) .* got \(3, 2, 4\)"),
        (None, (3,), r"latents must be \(T, 1, 3\) .* got \(3,\)"),
    ],
)
def test_sizes_that_do_not_fit(
    images: tuple[int, ...] | None, noise: tuple[int, ...], message: str
) -> None:
    network = build_small()
    if images is None:
        with pytest.raises(ValueError, match=message):
            network.generate(torch.zeros(noise))
    else:
        with pytest.raises(ValueError, match=message):
            network(torch.zeros(images), torch.zeros(noise))


def test_any_number_of_glimpses_and_examples() -> None:
    network = build()
    images, noise = given(network)
    for examples in (0, 1, 2):
        for glimpses in (1, 3):
            done = network(images[:examples], noise[:glimpses, :examples])
            assert done.logits.shape == (examples, HEIGHT, WIDTH)
            assert done.means.shape == done.log_stds.shape == (glimpses, examples, 3)
    assert network(images, noise).trace is None


@pytest.mark.parametrize("norm", ["none", "layer", "rms", "weight", "batch-eval"])
def test_images_do_not_see_one_another(norm: str) -> None:
    network = build(norm)
    images, noise = given(network)
    together = network(images, noise)
    for n in range(EXAMPLES):
        alone = network(images[n : n + 1], noise[:, n : n + 1])
        for one, two in zip(results(alone), results(together), strict=True):
            axis = 0 if one is alone.logits else 1
            assert torch.allclose(one, two.narrow(axis, n, 1), rtol=1e-10, atol=1e-12)


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
            assert layer is not None
            layer.weight.mul_(0.01)
            layer.bias.zero_()
    assert network(images, noise).clamped == 0
    assert network.read is not None
    assert network.write is not None
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


@pytest.mark.parametrize("filter_norm", ["softmax", "eps"])
def test_windows_beyond_the_image_have_finite_gradients(filter_norm: Any) -> None:
    network = build(filter_norm=filter_norm).float()
    with torch.no_grad():
        for layer in (network.read, network.write):
            assert layer is not None
            layer.weight.mul_(0.01)
            layer.bias.copy_(torch.tensor([40.0, -40.0, -6.0, -2.0, 0.0]))
    images, noise = (a.float() for a in given(network))
    done = network(images, noise, trace=True)
    assert done.trace.read[..., 0].gt(WIDTH).all()
    assert done.trace.read[..., 1].lt(0).all()
    moved = done.logits - network.initial["canvas"]
    # By softmax everything falls to the upper right corner; eps leaves nothing.
    if filter_norm == "softmax":
        assert moved[:, 0, -1].abs().gt(1e-3).all()
        moved = moved.clone()
        moved[:, 0, -1] = 0
    assert moved.abs().max() < 1e-5
    (done.logits.square().sum() + done.means.square().sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_narrow_filters_on_every_pixel_see_and_draw_the_image_itself() -> None:
    """With R = W = 28 they do what the network does without attention."""
    sizes: dict[str, Any] = {"hidden_size": 4, "latent_size": 2, "norm": LayerNorm()}
    torch.manual_seed(0)
    near = DRAWNetwork(28, 28, read_size=28, write_size=28, init_std=0.3, **sizes).double()
    whole = DRAWNetwork(28, 28, **WITHOUT_ATTENTION, **sizes).double()
    state = near.state_dict()
    whole.load_state_dict({name: state[name] for name in whole.state_dict()})
    with torch.no_grad():
        for layer in (near.read, near.write):
            assert layer is not None
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor([0.0, 0.0, -8.0, 0.0, 0.0]))
    images, noise = torch.rand(2, 28, 28, dtype=F64), torch.randn(3, 2, 2, dtype=F64)
    for one, two in zip(results(near(images, noise)), results(whole(images, noise)), strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)
    one, two = near.generate(noise).logits, whole.generate(noise).logits
    assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


# Precision, copies, transforms


def test_derivatives_of_derivatives() -> None:
    network = build(hidden_size=3, latent_size=2)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(2, HEIGHT, WIDTH, generator=generator, dtype=F64, requires_grad=True)
    noise = torch.randn(2, 2, 2, generator=generator, dtype=F64, requires_grad=True)

    def run(images: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        return tuple(results(network(images, noise)))

    assert torch.autograd.gradcheck(run, (images, noise))
    assert torch.autograd.gradgradcheck(run, (images, noise), fast_mode=True)


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


def test_under_autocast_places_are_not_rounded() -> None:
    """bfloat16 would put a centre at 20.3 to 20.25."""
    network = build("none").float()
    assert network.read is not None
    assert network.write is not None
    with torch.no_grad():
        for layer in (network.read, network.write):
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor([0.70137, 0.30211, 0.10107, 0.20117, 0.05071]))
    images, noise = (a.float() for a in given(network))
    exact = network(images, noise, trace=True).trace
    with torch.autocast("cpu", torch.bfloat16):
        rounded = network(images, noise, trace=True).trace
    assert torch.equal(exact.read, rounded.read)
    assert torch.equal(exact.write, rounded.write)


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


def test_copies_and_pickles() -> None:
    network = build()
    images, noise = given(network)
    expected = network(images, noise).logits
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert torch.equal(other(images, noise).logits, expected)
        with torch.no_grad():
            other.patch.bias.add_(1)
        assert not torch.equal(other(images, noise).logits, expected)
    assert torch.equal(network(images, noise).logits, expected)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`torch.compile` as far as the graphs it sees; the modes that were asked for."""
    from ln_zoo.layers import draw

    modes: list[str] = []
    compile = torch.compile

    def seen(function: Any, *, mode: str) -> Any:
        modes.append(mode)
        return compile(function, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", seen)
    draw._compiled.cache_clear()
    yield modes  # type: ignore[misc]
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
    for one, two in zip(done, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)
    for one, two in zip(gradients(done, sources), gradients(expected, sources), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)
    # A CUDA graph would overwrite the glimpse before, where no gradients are to come.
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr("ln_zoo.layers.draw._compiled", None)
        torch.testing.assert_close(network(images, noise).logits, done[0], rtol=1e-10, atol=1e-11)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(network)))
    with torch.no_grad():
        assert torch.allclose(copied.generate(noise).logits, wanted, rtol=1e-10)
        copied.patch.bias.add_(1)
        assert not torch.allclose(copied.generate(noise).logits, wanted, rtol=1e-3)


@pytest.mark.slow
def test_a_compiled_glimpse(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build(hidden_size=8)
    images, noise = given(network)
    sources = list(network.parameters())
    expected = results(network(images[:2], noise[:2, :2]))
    network.compile_glimpse("default")
    try:
        done = results(network(images[:2], noise[:2, :2]))
    except Exception as error:
        if "compiler" in str(error).lower():
            pytest.skip(f"torch found no compiler: {error}")
        raise
    for one, two in zip(done, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)
    for one, two in zip(gradients(done, sources), gradients(expected, sources), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-10)


def test_a_mode_that_torch_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"compile_mode: .*fancy.*reduce-overhead"):
        build().compile_glimpse("fancy")


@pytest.mark.parametrize("kernels", ["1", "0"])
def test_the_norm_hears_of_each_sequence_once(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[tuple[str, int]] = []

    class Hearing(LayerNorm):
        def on_sequence_start(self, site: Site, steps: int) -> None:
            began.append((site.role, steps))

    monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
    network = build_small(Hearing())
    network(torch.rand(2, HEIGHT, WIDTH), torch.randn(3, 2, 3))
    # Encoder and decoder, which normalise cell states alone.
    assert began == 2 * [("cell", 3)]
    network.generate(torch.randn(5, 2, 3))
    assert began[2:] == 2 * [("cell", 5)]
