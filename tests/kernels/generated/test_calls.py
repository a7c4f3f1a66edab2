"""What a call may have: packed sequences, resets, noise, projections, layers, states, threads."""

from __future__ import annotations

import ctypes
import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engines import names_of
from kernels.generated.generated_case import PLACES, assert_exact, gated_cell, packed
from layer_results import assert_threads_run_parts, randomised
from own_cell import MGU, JointGRU
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ln_zoo.kernels.generated import kernel
from ln_zoo.layers import LSTM, RecurrentLayer
from ln_zoo.norms import LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import Cell, Place, States, Weights, linear, lstm_cell

T, N, E, H = 5, 4, 3, 6
#: Numbers of weights, of units, of examples and of threads; shares of columns.
SHARES = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)


def slow(*values: Any) -> list[Any]:
    """Parameters whose kernels take long to compile."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True)
def all_on_generated(chosen: list[Any]) -> Any:
    torch.manual_seed(0)
    yield
    assert "generated" in names_of(chosen)


def mgu(**options: Any) -> Any:
    return randomised(MGU(E, H, norm=LayerNorm(), **options))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_layers_directions_and_states(layout: str) -> None:
    layer = mgu(num_layers=2, bidirectional=True)
    x = torch.randn(T, N, E)
    given = packed(x, [5, 2, 4, 4]) if layout == "packed" else x
    assert_exact(layer, given, [torch.randn(4, N, H)])


def test_a_state_of_one_sign() -> None:
    """Random states would make it NaN."""

    def step(wx: Any, states: Any, w: Any, sites: Any, t: Any) -> Any:
        h, count = states
        a, _ = (wx + sites["recurrent"](linear(h, w.hh), t)).chunk(2, -1)
        return a.tanh() * (count + 1).rsqrt(), count + 1

    counting = Cell("counting", step, PLACES, states=("h", "count"))
    layer = randomised(RecurrentLayer(E, H, cell=counting, norm=LayerNorm()))
    assert_exact(layer, torch.randn(T, N, E), [torch.randn(1, N, H), torch.rand(1, N, H)])


@pytest.mark.parametrize("examples", [1, 7, 9])
def test_weights_of_few_rows_are_not_packed(examples: int) -> None:
    """At up to 24 rows of all steps; 70 units are no whole vectors."""
    cell = gated_cell(torch.tanh, "few rows")
    layer = randomised(RecurrentLayer(E, 70, cell=cell, norm=RMSNorm()))
    assert_exact(layer, torch.randn(3, examples, E), [torch.randn(1, examples, 70)])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_resets(layout: str) -> None:
    layer = mgu(bidirectional=True)
    x, reset = torch.randn(T, N, E), torch.rand(T, N) < 0.4
    if layout == "padded":
        assert_exact(layer, x, [torch.randn(2, N, H)], reset)
        return
    lengths = [5, 3, 3, 1]
    flags = packed(reset, lengths)
    assert_exact(layer, packed(x, lengths), [torch.randn(2, N, H)], flags)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(
    "noise",
    [{"zoneout": 0.4}, {"recurrent_dropout": 0.4}, {"weight_dropout": 0.4}],
    ids=lambda noise: next(iter(noise)),
)
def test_noise(noise: dict[str, float], layout: str, training: bool) -> None:
    layer = mgu(**noise).train(training)
    x = torch.randn(T, N, E)
    assert_exact(layer, packed(x, [4, 5, 2, 1]) if layout == "packed" else x)


def test_all_noise_with_resets_and_two_states() -> None:
    options: dict[str, Any] = {"zoneout": (0.3, 0.0), "recurrent_dropout": 0.3}
    layer = randomised(LSTM(E, H, norm=LayerNorm(), weight_dropout=0.2, **options))
    # Nine examples: each step multiplies its own inputs.
    assert_exact(layer, torch.randn(T, 9, E), None, torch.rand(T, 9) < 0.3)


@pytest.mark.parametrize("size", [3, 12, *slow(2, 4, 6, 9)])
def test_projections(size: int) -> None:
    layer = randomised(LSTM(E, 13, 2, proj_size=size, norm=LayerNorm(), zoneout=0.2))
    assert_exact(layer, torch.randn(T, N, E))


@pytest.mark.parametrize("hidden", [1, 33, *slow(2, 7, 16)])
@pytest.mark.parametrize("norm", [LayerNorm(), *slow(LayerNorm(per_gate=True), WeightNorm())])
def test_widths_and_norms(hidden: int, norm: Any) -> None:
    cell = lstm_cell(peephole=True, derivative_bound=0.2)
    layer = randomised(RecurrentLayer(E, hidden, cell=cell, norm=norm))
    assert_exact(layer, torch.randn(T, N, E))


def test_products_of_sums_and_without_biases() -> None:
    assert_exact(randomised(JointGRU(E, H, norm=LayerNorm(eps=1e-3))), torch.randn(T, N, E))
    assert_exact(randomised(MGU(E, H, bias=False, norm=RMSNorm())), torch.randn(T, N, E))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("examples", [1, 2, 40])
def test_threads_and_chunks(threads: int, examples: int) -> None:
    torch.set_num_threads(threads)
    layer = randomised(MGU(20, 48, norm=LayerNorm()), 0.1)
    x = torch.randn(40, examples, 20)
    assert_exact(layer, x)
    with torch.no_grad():
        one = layer(x)[0]
    assert torch.equal(one, layer(x)[0])


@pytest.mark.parametrize("projects", [False, True])
def test_threads_run_parts_of_many_examples(projects: bool) -> None:
    cell = lstm_cell(peephole=True)
    layer: Any = randomised(
        RecurrentLayer(E, 7, cell=cell, norm=LayerNorm(), proj_size=H) if projects else MGU(E, H)
    )
    states = [torch.randn(1, 41, H), *([torch.randn(1, 41, 7)] if projects else [])]
    # The backward pass has as many threads as the forward pass.
    assert_threads_run_parts(layer, torch.randn(20, 41, E), states, one_thread_backward=True)


@pytest.mark.parametrize("shares", [2, 3])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_threads_that_share_the_columns_of_products(
    shares: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(shares)
    # 200 columns are four panels of 64; one share has no example of its own.
    layer = randomised(MGU(20, 200, norm=LayerNorm(), zoneout=0.2), 0.1)
    # 400 rows are two chunks.
    x: Any = torch.randn(200, 2, 20) if layout == "padded" else torch.randn(9, 4, 20)
    if layout == "packed":
        x = packed(x, [9, 3, 7, 1])
    torch.manual_seed(0)
    alone = layer(x)[0]
    asked = []

    def rule(*numbers: int) -> int:
        asked.append(numbers)
        return shares

    callback = SHARES(rule)
    monkeypatch.setattr(
        kernel.product_functions(), "shares", ctypes.cast(callback, ctypes.c_void_p)
    )
    torch.manual_seed(0)
    together = layer(x)[0]
    assert asked[0] == (2 * 200 * 200, 200, 2 if layout == "padded" else 4, shares)
    pairs = [(alone, together)] if layout == "padded" else zip(alone, together, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None)
    torch.set_num_threads(1)  # of the loop; `rule` still gives as many shares
    assert_exact(layer.eval(), x)


@pytest.mark.parametrize("frozen", [False, True])
def test_products_with_weights_of_the_cells_own(frozen: bool) -> None:
    """Of which some rows are not used; and more rows of the recurrent weight than of the other."""

    def step(wx: Tensor, states: States, w: Weights, sites: Any, t: int | None) -> States:
        (h,) = states
        mixing, scale = w.own
        u, z = (linear(h, w.hh) + w.bias_hh).chunk(2, -1)
        a = linear((wx + u).tanh(), mixing[H : 2 * H]) * scale[0]
        return (z.sigmoid() * h + (1 - z.sigmoid()) * a.tanh(),)

    places = Place("input", (1,), weight="ih"), Place("recurrent", (2,), weight="hh")
    cell = Cell("mixing", step, places, weights=(("mixing", 3 * H), ("scale", 1)))
    layer = randomised(RecurrentLayer(E, H, 2, cell=cell, norm=LayerNorm(), bidirectional=True))
    layer.weight_mixing_l1.requires_grad_(not frozen)
    assert (layer.bias_ih_l0.shape, layer.bias_hh_l0.shape) == ((H,), (2 * H,))
    assert_exact(layer, torch.randn(T, N, E))


@dataclass(frozen=True)
class Narrow(Norm):
    """A gain and a shift, each as wide as the projection, for the step to apply."""

    def init_params(self, site: Any) -> None:
        for name in ("gain", "shift") if site.recurrent else ():
            site.add_parameter(name, torch.rand(4))


def test_parameters_narrower_than_the_hidden_state() -> None:
    def step(wx: Tensor, states: States, w: Weights, sites: Any, t: int | None) -> States:
        h, c = states
        a, z = (wx + linear(h, w.hh) + w.bias).chunk(2, -1)
        c = z.sigmoid() * c + (1 - z.sigmoid()) * a.tanh()
        site = sites["recurrent"]
        return linear(c, w.hr) * site.gain + site.shift, c

    cell = Cell("narrow", step, PLACES, ("h", "c"), projects=True)
    layer = randomised(RecurrentLayer(E, 7, cell=cell, norm=Narrow(), proj_size=4))
    assert_exact(layer, torch.randn(T, N, E))


def test_packed_chunks() -> None:
    torch.set_num_threads(2)
    layer = randomised(MGU(20, 48, norm=LayerNorm()), 0.1)
    lengths = torch.randint(1, 16, (40,)).tolist()
    assert_exact(layer, packed(torch.randn(max(lengths), 40, 20), lengths))


def test_double_backward() -> None:
    layer = randomised(MGU(E, H, norm=LayerNorm()))
    x = torch.randn(T, N, E, requires_grad=True)
    found = []
    for kernels in ("generated", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LN_ZOO_KERNELS", kernels)
            out, _ = layer(x)
            (d,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(d.square().sum(), [x, layer.weight_hh_l0]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_a_parameter_that_is_not_used_has_no_gradient() -> None:
    layer = RecurrentLayer(E, H, cell=gated_cell(torch.tanh), norm=LayerNorm())
    layer.register_parameter("spare", nn.Parameter(torch.zeros(3)))
    out, _ = layer(torch.randn(T, N, E))
    out.sum().backward()
    assert layer.spare.grad is None
    assert layer.weight_hh_l0.grad.any()


def test_a_kernel_is_made_inside_a_checkpoint() -> None:
    """Neither sees what the other saves; the kernel is unknown before."""
    cell = gated_cell(lambda a: a.tanh().tanh(), "of a checkpoint")
    layer = randomised(RecurrentLayer(E, H, cell=cell, norm=LayerNorm()))
    x, found = torch.randn(T, N, E), []
    for run in (functools.partial(checkpoint, layer, use_reentrant=False), layer):
        output, _ = run(x)
        found.append(torch.autograd.grad(output.sin().sum(), [*layer.parameters()]))
    torch.testing.assert_close(*found)


def test_layers_are_freed() -> None:
    layer = RecurrentLayer(E, H, cell=gated_cell(torch.tanh), norm=LayerNorm())
    layer(torch.randn(T, N, E))[0].sum().backward()
    gone = weakref.ref(layer.sites["l0"]["input"]), weakref.ref(layer.bias_ih_l0)
    del layer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
