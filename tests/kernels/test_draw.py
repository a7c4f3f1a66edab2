"""DRAW's glimpses in one function, on each engine that has them, against the equations in float64.

The equations are those of Gregor et al. 2015 (section 2, eq. 3-14 and 19-29), with the paper's
LSTM (eq. 29-31), counted as there from 1.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import draw_reference
import pytest
import torch
from accuracy import assert_as_accurate, error
from draw_reference import Network
from engines import cpu_engines, needs_native, poisoned
from kernels.loop_case import Function, LoopCase, cast
from reference import Direction, Site
from torch import Tensor

from ln_zoo.kernels import draw
from ln_zoo.kernels.native import build
from ln_zoo.kernels.native.runtime import unavailable_reason
from ln_zoo.kernels.triton import draw as gpu_draw
from ln_zoo.kernels.triton.engine import TritonEngine
from ln_zoo.ops import (
    Affine,
    DrawLSTM,
    Drawn,
    DrawSettings,
    DrawWeights,
    RowNorm,
    StepNorm,
    Weights,
    divergence,
    draw_forward,
    select_draw_kernel,
)
from ln_zoo.ops.registry import kernel_named

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
#: The error allowed in float64.
DOUBLE = 1e-11
RESULTS = ("logits", "means", "log_stds")


#: Triton's interpreter is chosen for a whole process: `test_gpu_engine.py` has one.
ENGINES = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [*cpu_engines("DRAW")]


@pytest.fixture(params=ENGINES)
def under(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Lets one engine run alone, and makes sure that its steps did."""
    if request.param == "native" and unavailable_reason() is not None:
        pytest.skip(f"no native kernels: {unavailable_reason()}")
    if request.param == "triton":
        monkeypatch.setattr(TritonEngine, "unsupported_reason", lambda *arguments: None)
    made = []
    kernel = kernel_named("DRAW", request.param)
    # On other processors products of bfloat16 are computed in float32.
    monkeypatch.setattr(build, "bfloat16_pays", lambda: True)

    class Counted(kernel.steps):  # type: ignore[misc, name-defined]
        def __init__(self, *arguments: Any) -> None:
            made.append(self.__class__)
            super().__init__(*arguments)

    monkeypatch.setenv("LN_ZOO_KERNELS", request.param)
    monkeypatch.setattr(kernel, "steps", Counted)
    yield request.param
    assert made


class Size(NamedTuple):
    """Glimpses, examples, height, width, hidden units, latents, sides of the patches."""

    T: int = 3
    N: int = 3
    B: int = 7
    A: int = 9
    H: int = 20
    Z: int = 5
    R: int = 2
    W: int = 3


class Norm(NamedTuple):
    center: bool = True
    eps: float = 1e-5


NORMS = {"none": None, "layer": Norm(), "rms": Norm(center=False, eps=0.1)}
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
every_filter_norm = pytest.mark.parametrize("filter_norm", ["softmax", "eps"])

#: What has no gradients.
GIVEN = ("x", "noise")


def problem(size: Size, norm: Norm | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors in float64, such as float32 can hold."""
    T, N, B, A, H, Z, R, W = size
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) * 2 - 1

    found = {"x": rand(N, B, A).abs().round(), "noise": rand(T, N, Z) * 2}
    for name, inputs in (("enc", 2 * R * R + H), ("dec", Z)):
        found |= {
            f"{name}_ih": rand(4 * H, inputs) * (2 / inputs) ** 0.5,
            f"{name}_hh": rand(4 * H, H) * H**-0.5,
            f"{name}_b_ih": rand(4 * H) / 2,
            f"{name}_b_hh": rand(4 * H) / 2,
            f"{name}_h": rand(H),
            f"{name}_c": rand(H),
        }
        if norm is not None:
            found |= {f"{name}_gain": 0.5 + rand(H) / 10, f"{name}_shift": rand(H) / 10}
    for name, outputs in (("posterior", 2 * Z), ("read", 5), ("write", 5), ("patch", W * W)):
        found |= {f"{name}_w": rand(outputs, H) * (1.5 / H) ** 0.5, f"{name}_b": rand(outputs) / 2}
    found["canvas"] = rand(B, A)
    return {name: a.float().double() for name, a in found.items()}


def equations(
    settings: DrawSettings, norm: Norm | None, p: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """C_T, and mu and log s of each glimpse."""

    def lstm(name: str) -> Direction:
        biases = (p.get(f"{name}_b_ih"), p.get(f"{name}_b_hh"))
        found = Direction("LSTM", p[f"{name}_ih"], p[f"{name}_hh"], *biases)
        if norm is not None:
            affine = p.get(f"{name}_gain"), p.get(f"{name}_shift")
            found.sites["cell"] = Site("layer" if norm.center else "rms", *affine, norm.eps)
        return found

    affines = ((p[f"{a}_w"], p[f"{a}_b"]) for a in ("posterior", "read", "write", "patch"))
    start = (*(p[f"{name}_{s}"] for name in ("enc", "dec") for s in "hc"), p["canvas"])
    network = Network(lstm("enc"), lstm("dec"), *affines, start, settings.read, settings.write)
    eps = settings.filter_eps if settings.filter_norm == "eps" else None
    drawn = draw_reference.draw(network, p["x"], p["noise"], eps, settings.log_clamp)
    return drawn.canvases[-1], drawn.means, drawn.log_stds


def settings_of(size: Size, **options: Any) -> DrawSettings:
    return DrawSettings(size.R, size.W, **options)


def weights_of(norm: Norm | None, p: dict[str, Tensor], H: int | None = None) -> DrawWeights:
    """Of H units, by default as many as the recurrent weights have."""
    H = p["enc_hh"].shape[1] if H is None else H

    def lstm(name: str) -> DrawLSTM:
        ih, hh = p[f"{name}_ih"], p[f"{name}_hh"]
        cell = RowNorm((H,))
        if norm is not None:
            gain, shift = p.get(f"{name}_gain"), p.get(f"{name}_shift")
            cell = RowNorm((H,), True, norm.center, norm.eps, gain, shift)
        records = {"input": RowNorm((4 * H,)), "recurrent": RowNorm((4 * H,)), "cell": cell}
        weights = Weights(ih, hh, p.get(f"{name}_b_ih"), p.get(f"{name}_b_hh"))
        return DrawLSTM(weights, records, p[f"{name}_h"], p[f"{name}_c"])

    affines = (Affine(p[f"{a}_w"], p[f"{a}_b"]) for a in ("posterior", "read", "write", "patch"))
    return DrawWeights(lstm("enc"), lstm("dec"), *affines, p["canvas"])


def call(under: str, settings: DrawSettings, norm: Norm | None, p: dict[str, Tensor]) -> Drawn:
    """On the engine, after it was chosen as users have it chosen."""
    weights = weights_of(norm, p)
    kernel = select_draw_kernel(p["x"], p["noise"], weights)
    assert kernel.name == under
    return draw_forward(kernel, settings, p["x"], p["noise"], weights)


def by(
    under: str, settings: DrawSettings, norm: Norm | None
) -> Callable[[dict[str, Tensor]], tuple[Tensor, ...]]:
    return lambda p: tuple(call(under, settings, norm, p)[:3])


def plain(settings: DrawSettings, norm: Norm | None) -> Function:
    return lambda p: equations(settings, norm, p)


class TestLoop(LoopCase):
    """On a small problem of its own; other tests use its helpers."""

    results, given, changed, double = RESULTS, GIVEN, (2,), DOUBLE

    def problem(self) -> dict[str, Tensor]:
        return problem(Size(N=4), Norm())

    def equations(self, p: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return equations(settings_of(Size()), Norm(), p)

    def engine(self, under: str) -> Function:
        return by(under, settings_of(Size()), Norm())

    def none_of(self, name: str, a: Tensor) -> Tensor:
        return a[:0] if name == "x" else a[:, :0] if name == "noise" else a

    def chosen(self, p: dict[str, Tensor]) -> str | None:
        return chosen(p, weights_of(Norm(), p))


CASE = TestLoop()
run, in_float32 = CASE.run, CASE.in_float32


def compare(under: str, settings: DrawSettings, norm: Norm | None, p: dict[str, Tensor]) -> None:
    expected = run(plain(settings, norm), p, F64)
    actual = run(by(under, settings, norm), p, F32)
    assert_as_accurate(actual, expected, in_float32(plain(settings, norm), p), DOUBLE)


SIZES = [
    Size(),
    Size(T=1, N=3, B=9, A=7, H=5, R=5, W=1),
    Size(T=3, N=1, B=17, A=16, H=33, Z=17, R=1, W=5),
    Size(T=5, N=5, B=28, A=28, H=16, Z=3, R=5, W=2),
    Size(T=4, N=3, B=5, A=40, H=20, R=2, W=5),
]
ONE_OF_EVERYTHING = Size(*[1] * 8)


def name_of(value: Any) -> str:
    if isinstance(value, Size):
        return "-".join(map(str, value))
    return value if isinstance(value, str) else next(k for k, v in NORMS.items() if v == value)


@pytest.mark.parametrize(
    ("size", "filter_norm", "norm"),
    [
        (size, ("softmax", "eps")[(i + j) % 2], norm)
        for i, size in enumerate(SIZES)
        for j, norm in enumerate([NORMS["layer"], NORMS["none"], NORMS["rms"]])
    ]
    + [*itertools.product([ONE_OF_EVERYTHING], ("softmax", "eps"), NORMS.values())],
    ids=name_of,
)
def test_against_the_equations(size: Size, filter_norm: str, norm: Norm | None, under: str) -> None:
    settings = settings_of(size, filter_norm=filter_norm, filter_eps=1e-3)
    compare(under, settings, norm, problem(size, norm))


@pytest.mark.parametrize("missing", ["b_ih", "b_hh", "b_", "gain", "shift"])
def test_what_may_be_missing(missing: str, under: str) -> None:
    size, norm = Size(), Norm()
    p = {
        name: a
        for name, a in problem(size, norm).items()
        if not name.startswith(("enc", "dec")) or missing not in name
    }
    compare(under, settings_of(size), norm, p)


def test_the_lstms_may_differ(under: str) -> None:
    """One normalised, the other not."""
    size = Size()
    settings, p = settings_of(size), problem(size, Norm())
    with torch.no_grad():
        p["dec_shift"].zero_()
    p, plain = cast(p, F32), cast(p, F32)
    weights, other = weights_of(Norm(), p), weights_of(None, plain)
    kernel = select_draw_kernel(p["x"], p["noise"], weights)
    assert kernel.name == under
    mixed = draw_forward(
        kernel, settings, p["x"], p["noise"], weights._replace(decoder=other.decoder)
    )
    both = draw_forward(kernel, settings, p["x"], p["noise"], weights)
    none = draw_forward(kernel, settings, p["x"], p["noise"], other)
    # The first means see the encoder's norm, the canvas the decoder's too.
    assert torch.equal(mixed.means[0], both.means[0])
    assert not torch.allclose(mixed.means[0], none.means[0])
    assert not torch.allclose(mixed.logits, both.logits)


def moved(p: dict[str, Tensor], **numbers: tuple[float, ...]) -> dict[str, Tensor]:
    """With read and write filters where the numbers say, more or less."""
    p = dict(p)
    for side, values in numbers.items():
        p[f"{side}_w"] = p[f"{side}_w"] / 20
        p[f"{side}_b"] = torch.tensor(values, dtype=F64)
    return p


FAR = {
    "right": (30.0, 0.0, 0.0, 0.0, 0.0),
    "far left": (-300.0, 50.0, 1.0, 0.0, 0.5),
    "needles": (0.1, -0.2, -7.0, -1.0, 0.0),
    "everything": (0.0, 0.0, 9.0, 2.0, -1.0),
    "wide apart": (0.2, 0.2, 0.0, 4.0, 0.3),
}


@pytest.mark.parametrize("place", FAR.values(), ids=FAR)
@every_filter_norm
def test_windows_off_the_image(filter_norm: str, place: tuple[float, ...], under: str) -> None:
    """Each side on its own; there is no overflow, and rounding loses what it does in the loop."""
    size = Size(T=2, R=3)
    for side in ("read", "write"):
        settings = settings_of(size, filter_norm=filter_norm, filter_eps=1e-4)
        compare(under, settings, None, moved(problem(size), **{side: place}))


def test_clamped_numbers_have_no_gradient_and_are_counted(under: str) -> None:
    size = Size(T=3, N=4)
    settings = settings_of(size, log_clamp=0.3)
    p = problem(size)
    compare(under, settings, None, p)
    done = call(under, settings, None, cast(p, F32))
    assert done.clamped.dtype == torch.int64
    assert not done.clamped.requires_grad
    at_bound = (done.log_stds.abs() == torch.tensor(0.3, dtype=F32)).sum()
    assert done.clamped[0] == at_bound
    assert 0 < at_bound < done.log_stds.numel()


def test_counts_of_each_kind(under: str) -> None:
    size = Size(T=3, N=4)

    def counts(size: Size, **numbers: tuple[float, ...]) -> list[int]:
        settings = settings_of(size)
        p = moved(problem(size), **numbers)
        return call(under, settings, None, cast(p, F32)).clamped.tolist()

    assert counts(size) == [0, 0, 0]
    assert counts(size, read=(0.0, 0.0, 20.0, 0.0, 0.0)) == [0, 12, 0]
    assert counts(size, write=(0.0, 0.0, -20.0, -30.0, 0.0)) == [0, 12, 12]
    both = dict.fromkeys(("read", "write"), (0.0, 0.0, -20.0, 30.0, 0.0))
    assert counts(size, **both) == [0, 24, 24]
    assert counts(size._replace(R=1), **both) == [0, 24, 24]


@every_norm
def test_bfloat16_autocast(norm: Norm | None, under: str) -> None:
    """Products in bfloat16: errors are those of the equations with rounded products, roughly."""
    size = Size(T=4, N=5, B=12, A=12, H=48, Z=8)
    settings, p = settings_of(size), problem(size, norm)
    expected = run(plain(settings, norm), p, F64)

    def function(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", BF16):
            done = call(under, settings, norm, p)
        assert all(a.dtype == F32 for a in done[:3])
        return tuple(done[:3])

    actual = run(function, p, F32)

    def loop(k: int) -> dict[str, Tensor]:
        with torch.autocast("cpu", BF16):
            return in_float32(plain(settings, norm), p)(k)

    assert_as_accurate(actual, expected, loop)
    assert error(actual["means"], expected["means"]) > 1e-4  # products are in bfloat16 indeed
    assert all(a.dtype == F32 for a in actual.values())


def test_bfloat16_leaves_the_filters_alone(under: str) -> None:
    """With weights of 0, what is drawn is that of float32: biases set it all."""
    size = Size(T=3)
    settings = settings_of(size)
    p = cast(problem(size), F32)
    p = {name: a * 0 if name.endswith(("_w", "_ih", "_hh")) else a for name, a in p.items()}
    full = call(under, settings, None, p)
    with torch.autocast("cpu", BF16):
        mixed = call(under, settings, None, p)
    for one, two in zip(full, mixed, strict=True):
        assert torch.equal(one, two)


@needs_native
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_half_precision_may_be_slower_than_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On such a processor autocast changes nothing."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    monkeypatch.setattr(build, "bfloat16_pays", lambda: False)
    settings, norm = settings_of(Size()), Norm()
    p = problem(Size(), norm)

    def mixed(p: dict[str, Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype):
            return by("native", settings, norm)(p)

    found, expected = run(mixed, p, F32), run(by("native", settings, norm), p, F32)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_is_kept_at_full_size_is_little(under: str) -> None:
    """Less than 0.3 GB, reckoned from a tenth of the glimpses and examples."""
    size = Size(T=6, N=13, B=28, A=28, H=256, Z=100, R=2, W=5)
    p = cast(problem(size), F32)
    p["canvas"].requires_grad_()
    held: dict[int, int] = {}

    def pack(a: Tensor) -> Tensor:
        held[a.untyped_storage().data_ptr()] = a.untyped_storage().nbytes()
        return a

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda a: a):
        call(under, settings_of(size), None, p)
    weights = sum(a.nbytes for a in p.values())
    assert (sum(held.values()) - weights) / (6 * 13) * (64 * 128) < 0.3e9


def test_nan_is_not_hidden_and_stays_in_its_example(under: str) -> None:
    size = Size()
    p = cast(problem(size), F32)
    p["x"][1, 2, 3] = float("nan")
    done = call(under, settings_of(size), None, p)
    assert done.logits[1].isnan().any()
    assert done.logits[[0, 2]].isfinite().all()
    assert done.means[:, [0, 2]].isfinite().all()


@every_norm
def test_memory_is_not_read_before_it_is_written(norm: Norm | None, under: str) -> None:
    size = Size(T=4)
    settings, p = settings_of(size), problem(size, norm)
    expected = run(plain(settings, norm), p, F64)
    with poisoned((draw.memory, "empty")):
        actual = run(by(under, settings, norm), p, F32)
        with torch.no_grad():
            quiet = call(under, settings, norm, cast(p, F32))
    assert_as_accurate(actual, expected, in_float32(plain(settings, norm), p), DOUBLE)
    assert all(a.isfinite().all() for a in quiet)


def chosen(p: dict[str, Tensor], weights: DrawWeights | None = None) -> str | None:
    weights = weights_of(None, p) if weights is None else weights
    kernel = select_draw_kernel(p["x"], p["noise"], weights)
    return None if kernel is None else kernel.name


def refused(p: dict[str, Tensor], weights: DrawWeights | None = None) -> str | None:
    """The reason, which keeps any engine from being chosen."""
    weights = weights_of(None, p) if weights is None else weights
    reason = kernel_named("DRAW", "native").unsupported_reason(p["x"], p["noise"], weights)
    assert reason is None or chosen(p, weights) is None
    return reason


@needs_native
def test_what_functions_of_torch_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LN_ZOO_KERNELS", raising=False)
    p = cast(problem(Size()), F32)
    weights = weights_of(None, p)
    assert refused(p) is None

    def with_encoder(**changes: Any) -> DrawWeights:
        return weights._replace(encoder=weights.encoder._replace(**changes))

    H = Size().H
    records = weights.encoder.records
    sums = records | {"input": RowNorm((4 * H,), True, True, 1e-5)}
    assert "sums of the gates" in refused(p, with_encoder(records=sums))
    unknown = records | {"cell": None}
    assert "only the norm knows" in refused(p, with_encoder(records=unknown))
    nothing = (None,) * 5
    over_examples = records | {"cell": StepNorm(H, True, 1e-5, 0, None, None, *nothing[:3])}
    assert "over the batch" in refused(p, with_encoder(records=over_examples))
    for name in GIVEN:
        leaf = p | {name: p[name].clone().requires_grad_()}
        assert "gradients of images and noise" in refused(leaf)
    for name in p:
        assert "float64" in refused(p | {name: p[name].double()})
    for other in (BF16, F64):
        assert "computes in float32" in refused(cast(p, other))
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert "compiled" in refused(p)
    narrow = draw.DrawKernel(kernel_named("DRAW", "native").engine)
    narrow.steps = draw.DrawSteps
    with torch.autocast("cpu", torch.float16):
        reason = narrow.unsupported_reason(p["x"], p["noise"], weights)
        assert reason == "it has no products in float16"
    with torch.autocast("cpu", BF16):
        assert refused(p) is None


def test_sizes_that_do_not_fit_are_named() -> None:
    p = cast(problem(Size()), F32)
    settings, weights = settings_of(Size()), weights_of(None, p)
    kernel = kernel_named("DRAW", "native")
    for change, message in [
        ({"canvas": p["canvas"][:, 1:]}, r"canvas must be \(7, 9\) .* got \(7, 8\)"),
        ({"patch": weights.write}, r"patch.weight must be \(9, 20\)"),
        ({"read": Affine(p["read_w"], p["read_b"][1:])}, r"read.bias must be \(5,\)"),
        ({"encoder": weights.decoder}, r"encoder.weights.ih must be \(80, 28\)"),
        ({"decoder": weights.decoder._replace(h=p["x"])}, r"decoder.h must be \(20,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            draw_forward(kernel, settings, p["x"], p["noise"], weights._replace(**change))
    with pytest.raises(ValueError, match=r"patches of 3 and 3 a side"):
        draw_forward(kernel, replace(settings, read=3), p["x"], p["noise"], weights)
    for images, noise, message in [
        (p["x"][0], p["noise"], r"images must be \(N, B, A\)"),
        (p["x"], p["noise"][:0], r"T at least 1, got \(0, 3, 5\)"),
        (p["x"], p["noise"][:, 1:], r"noise must be \(3, 3, 5\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            draw_forward(kernel, settings, images, noise, weights)


def test_divergence_is_that_of_torch() -> None:
    means, log_stds = (torch.randn(4, 3, 5, dtype=F64).requires_grad_() for _ in range(2))
    found = divergence(means, log_stds)
    normal = torch.distributions.Normal
    known = torch.distributions.kl_divergence(normal(means, log_stds.exp()), normal(0.0, 1.0))
    torch.testing.assert_close(found, known.sum(2))
    torch.autograd.gradcheck(divergence, (means, log_stds))
    zeros = torch.zeros(2, 3)
    assert torch.equal(divergence(zeros, zeros), torch.zeros(2))


def test_divergence_of_nearly_nothing_is_exact() -> None:
    """s = 1 + d costs d^2 a number, to the last digits of float32."""
    log_stds = torch.full((1, 4), 1e-4)
    exact = 4 * (math.expm1(2e-4) - 2e-4) / 2
    assert divergence(torch.zeros(1, 4), log_stds).item() == pytest.approx(exact, rel=1e-3)


# Recorded graphs (`conftest.py`)


@pytest.mark.skipif(ENGINES != ["triton"], reason="the other engines record nothing")
def test_graphs_give_the_same_numbers(
    under: str, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third run, and gradients asked for later and in another order."""
    monkeypatch.setattr(gpu_draw, "may_replay", lambda a: True)
    size, norm = Size(T=1, N=1, B=5, A=6, H=8), Norm()
    settings = settings_of(size)
    problems = [problem(size, norm, seed) for seed in range(2)]
    for seed, replays in ((0, 0), (1, 2), (0, 4)):  # recorded when a size comes again
        found = run(by(under, settings, norm), problems[seed], F32)
        assert recorded.replays == replays
        wanted = run(plain(settings, norm), problems[seed], F64)
        for name, a in wanted.items():
            assert error(found[name], a) < 1e-5, name
    leaves = [
        {n: a.requires_grad_(n not in GIVEN) for n, a in cast(p, F32).items()} for p in problems
    ]
    # The second finds the first one's memory in use, and the third that of both.
    done = [call(under, settings, norm, leaves[k]) for k in (0, 1, 0)]
    for k, one in zip((0, 1, 0), done, strict=True):
        (d_patch,) = torch.autograd.grad(one.logits.sum(), leaves[k]["patch_w"])
        exact = {n: a.requires_grad_(n not in GIVEN) for n, a in cast(problems[k], F64).items()}
        (d_exact,) = torch.autograd.grad(
            equations(settings, norm, exact)[0].sum(), exact["patch_w"]
        )
        assert error(d_patch, d_exact) < 1e-5


@pytest.mark.skipif(ENGINES != ["triton"], reason="the other engines record nothing")
def test_memory_of_graphs_is_free_once_no_gradient_can_be_asked_for(
    under: str, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a visit of Python's garbage collector, which may be long in coming."""
    monkeypatch.setattr(gpu_draw, "may_replay", lambda a: True)
    size = Size(T=1, N=1, B=5, A=6, H=8)
    p = cast(problem(size), F32)
    p["patch_w"].requires_grad_()
    gc.disable()
    try:
        for _ in range(5):
            call(under, settings_of(size), None, p).logits.sum().backward()
    finally:
        gc.enable()
    assert recorded.recordings == 2  # forward and backward


def test_images_too_large_for_a_program_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonEngine, "unsupported_reason", lambda *arguments: None)
    monkeypatch.setenv("LN_ZOO_KERNELS", "triton")
    for side, engine in ((28, "triton"), (200, None)):
        p = cast(problem(Size(T=1, N=1, B=side, A=side)), F32)
        assert chosen(p) == engine
