"""Recurrent batch normalisation by kernels, against the generic loop in float64.

The loop itself is held against the equations in tests/layers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, moved
from engines import cpu_engines, poisoned
from layer_results import flat, gradients, results_of
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ln_zoo import ops
from ln_zoo.kernels.native import layers as native_layers
from ln_zoo.kernels.native.engine import NativeLayers
from ln_zoo.layers import GRU, LSTM, RNN
from ln_zoo.norms import BatchNorm, LayerNorm, Norm, RMSNorm
from ln_zoo.ops import (
    CELLS,
    KERNELS,
    RecurrentCall,
    RowNorm,
    StepNorm,
    Weights,
    calls,
    chunks,
    memory,
    registry,
)
from ln_zoo.ops.engines.torch_rnn import TorchRNN
from ln_zoo.ops.recurrent_kernel import Recurrence
from ln_zoo.ops.spec import Examples, Spec
from ln_zoo.ops.time_chunks import time_chunks

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
#: All that normalise over examples.
KINDS = [k for k in KERNELS if isinstance(k, Recurrence) and k.name in cpu_engines()]
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": LSTM,
    "GRU": GRU,
    "RNN_TANH": RNN,
    "RNN_RELU": lambda *sizes, **options: RNN(*sizes, nonlinearity="relu", **options),
}
every_cell = pytest.mark.parametrize("cell", LAYERS)
#: The error allowed in float64.
DOUBLE = 1e-11


@dataclass
class Under:
    """The kernel under test, and the best precision that it has.

    `native.layers` has padded calls of two steps at least, of a batch, and leaves the others to it.
    """

    kernel: Recurrence
    dtype: torch.dtype
    monkeypatch: pytest.MonkeyPatch
    one_call: NativeLayers | None

    @property
    def name(self) -> str:
        return self.kernel.name

    def run(self, kernels: str, function: Callable[[], Any]) -> Any:
        """Calls a function that runs layers: with ``"0"`` on the generic loop, else on this."""
        picked, pick = [], ops.select_kernel

        def noted(call: RecurrentCall) -> Any:
            found = pick(call)
            wanted = None if kernels == "0" else self.kernel
            if wanted and self.one_call and not torch.compiler.is_compiling():
                norms = [r for direction in call.records for r in direction.values()]
                batch = any(isinstance(r, StepNorm) and r.batch for r in norms)
                T, N = call.x.shape[:2] if call.batch_sizes is None else (0, 0)
                if T > 1 and batch < N and call.x.dtype == F32:
                    wanted = self.one_call
            picked.append((found, wanted))
            return found

        with self.monkeypatch.context() as patch:
            patch.setenv("LN_ZOO_KERNELS", kernels)
            patch.setattr(calls, "select_kernel", noted)
            if kernels != "0":
                own = [self.kernel] if self.one_call is None else [self.one_call, self.kernel]
                patch.setattr(registry, "KERNELS", own)
            result = function()
        assert picked, "no layer was run"
        assert all(kernel is wanted for kernel, wanted in picked)
        return result


@pytest.fixture(params=[*KINDS, NativeLayers()], ids=[*(kind.name for kind in KINDS), "one call"])
def under(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Under:
    """Every kernel; a layer that is not run by it when it should be fails the test."""
    one_call = request.param if isinstance(request.param, NativeLayers) else None
    kernel = next(kind for kind in KINDS if kind.name == request.param.name)
    place = Examples(batch=True, eps=1e-5)
    spec = Spec("LSTM", place, place, place)
    for dtype in (F64, F32):
        x, w = torch.zeros(2, 3, 4, dtype=dtype), torch.zeros(16, 4, dtype=dtype)
        reason = kernel.engine.unsupported_reason(spec, x, w, dtype)
        if reason is None:
            break
    else:
        pytest.skip(f"{kernel.name}: {reason}")
    return Under(kernel, dtype, monkeypatch, one_call)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = functools.partial(min, 2)
    monkeypatch.setattr(
        chunks, "time_chunks", lambda sizes, rows, n=1: time_chunks(sizes, cut(rows), n)
    )
    monkeypatch.setattr(native_layers, "rows_of_chunk", lambda rows, saved: 2)


def build(cell: str, norm: Norm, seed: int = 0, **options: Any) -> nn.Module:
    """A layer (3 inputs, 5 units) in float64 with random gains and shifts."""
    torch.manual_seed(seed)
    layer = LAYERS[cell](3, 5, norm=norm, dtype=F64, **options)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "sites" in name:
                parameter.uniform_(-0.5, 0.5)
                parameter.add_(torch.sign(parameter) * 0.3)
    return layer


def pack(lengths: tuple[int, ...], seed: int = 1) -> Tensor | PackedSequence:
    """Inputs (T, N, 3) where all lengths are equal, else packed."""
    torch.manual_seed(seed)
    sequences = [torch.randn(n, 3, dtype=F64) for n in lengths]
    if len(set(lengths)) == 1:
        return torch.stack(sequences, dim=1)
    return pack_sequence(sequences, enforce_sorted=False)


def shifted(layer: nn.Module, dtype: torch.dtype, run: int) -> nn.Module:
    """A copy of a layer for a run of the generic loop."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(moved(parameter, run))
    return layer.to(dtype)


def batches(layer: Any, dtype: torch.dtype, xs: list[Any], run: int = 0) -> list[Tensor]:
    """All outputs and gradients of batches, one after the other, and the buffers at last."""
    layer = shifted(layer, dtype, run)
    found = []
    for k, x in enumerate(xs):
        torch.manual_seed(k)
        data = moved(flat(x)[0], run).to(dtype)
        examples = int(x.batch_sizes[0]) if isinstance(x, PackedSequence) else x.shape[1]
        shape = (len(layer.sites), examples, layer.hidden_size)
        states = [torch.randn(shape, dtype=F64).to(dtype) for _ in layer.cell.states]
        given = x._replace(data=data) if isinstance(x, PackedSequence) else data
        found += results_of(layer, given, states).values()
    return [*found, *layer.buffers()]


def assert_same(
    actual: list[Tensor], expected: list[Tensor], loop: Callable[[int], list[Tensor]]
) -> None:
    """Whole numbers are equal; the others are as exact as the generic loop's."""
    floats = [b.is_floating_point() for b in expected]
    for k, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert floats[k] or torch.equal(a, b), f"number {k}: {a} {b}"

    def named(tensors: list[Tensor]) -> dict[str, Tensor]:
        return {f"{k}, {tuple(a.shape)}": a for k, a in enumerate(tensors) if floats[k]}

    assert_as_accurate(named(actual), named(expected), lambda k: named(loop(k)), DOUBLE)


def assert_kernel_equals_loop(under: Under, layer: nn.Module, xs: list[Any]) -> None:
    """All outputs, statistics and gradients of some batches, against the generic loop in float64.

    A batch of two or three amplifies rounding without bound: runs of the loop in float32 show how
    far.
    """
    expected = under.run("0", lambda: batches(layer, F64, xs))
    actual = under.run(under.name, lambda: batches(layer, under.dtype, xs))
    assert_same(actual, expected, lambda k: under.run("0", lambda: batches(layer, F32, xs, k)))


LENGTHS = {
    "equal": (6, 6, 6, 6),
    "one step": (1, 1, 1),
    "never alone": (7, 7, 3, 5, 5),
    "one is left": (7, 4, 2, 4, 3),
    "one is left early": (8, 1, 1, 1),
}


@pytest.mark.parametrize(
    ("cell", "lengths"),
    # All lengths with one cell, and those that matter most with the others.
    [("LSTM", name) for name in LENGTHS]
    + [(c, n) for c in ("GRU", "RNN_TANH", "RNN_RELU") for n in ("equal", "one is left")],
)
def test_two_layers_both_ways_over_batches(
    under: Under, cuts: None, cell: str, lengths: str
) -> None:
    layer = build(cell, BatchNorm(max_steps=4, eps=0.1), num_layers=2, bidirectional=True)
    xs = [pack(LENGTHS[lengths], seed) for seed in range(2)]
    assert_kernel_equals_loop(under, layer, xs)


NORM = BatchNorm(eps=0.1, max_steps=3)


@pytest.mark.parametrize(
    ("cell", "norm", "options"),
    [
        ("LSTM", BatchNorm(eps=0.1, max_steps=1), {}),
        ("GRU", BatchNorm(eps=0.1, max_steps=3, momentum=0.9), {}),
        ("RNN_TANH", BatchNorm(eps=0.1, momentum=1.0), {}),
        *((cell, BatchNorm(eps=0.1, unbiased=True), {}) for cell in LAYERS),
        *((cell, BatchNorm(eps=0.1), {"bias": False}) for cell in LAYERS),
        *(
            ("LSTM", NORM, {"normalize": places})
            for places in (("input",), ("recurrent",), ("cell",), ("input", "cell"))
        ),
        *(("GRU", NORM, {"normalize": (place,)}) for place in ("input", "recurrent")),
    ],
    ids=str,
)
def test_options(under: Under, cell: str, norm: Norm, options: dict[str, Any]) -> None:
    """In training; if only some places normalise, in evaluation too."""
    layer = build(cell, norm, **options)
    xs = [pack(lengths, k) for k, lengths in enumerate([(5, 5, 5), (2, 6, 3), (4, 4, 1, 7)])]
    assert_kernel_equals_loop(under, layer, xs)
    if "normalize" in options:
        assert_kernel_equals_loop(under, layer.eval(), xs)


@pytest.mark.parametrize(
    ("cell", "lengths"),
    [("LSTM", (9, 4, 6)), ("LSTM", (9,)), ("GRU", (9, 4, 6)), ("RNN_TANH", (9,))],
)
def test_evaluation(under: Under, cuts: None, cell: str, lengths: tuple[int, ...]) -> None:
    layer = build(cell, BatchNorm(max_steps=5, eps=0.1), num_layers=2, bidirectional=True)
    layer(pack((3, 3, 3)))  # the last row reached is the third
    assert_kernel_equals_loop(under, layer.eval(), [pack(lengths)])
    layer.train()(pack((12, 12, 12)))
    assert_kernel_equals_loop(under, layer.eval(), [pack(lengths)])


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("role", ["input", "recurrent", "cell"])
def test_one_place_may_be_in_evaluation_mode(under: Under, cell: str, role: str) -> None:
    layer = build(cell, BatchNorm(eps=0.1, max_steps=4))
    layer(pack((5, 5, 5)))
    sites = layer.sites["l0"]
    if role not in sites:
        pytest.skip(f"no {role} place in a {cell}")
    sites[role].eval()
    assert_kernel_equals_loop(under, layer, [pack((6, 6, 6)), pack((6, 3, 4))])


@every_cell
def test_more_units_than_fit_a_register(under: Under, cell: str) -> None:
    torch.manual_seed(0)
    norm = BatchNorm(recurrent_gain=0.3, eps=0.1)
    layer = LAYERS[cell](17, 67, norm=norm, dtype=F64)
    assert_kernel_equals_loop(under, layer, [torch.randn(9, 11, 17, dtype=F64)])


def test_without_gradients(under: Under, cuts: None) -> None:
    """The same numbers, and the same running averages."""
    layer = build("LSTM", BatchNorm(max_steps=3), bidirectional=True).to(under.dtype)
    x = pack((7, 4, 2, 4)).to(dtype=under.dtype)

    def results(grad: bool, k: int = 0) -> list[Tensor]:
        twin = copy.deepcopy(layer)
        with torch.set_grad_enabled(grad):
            found = flat(twin(x._replace(data=moved(x.data, k))))
        assert twin.sites["l0"]["cell"].num_batches_tracked.tolist() == [1, 1, 2]
        return [*found, *twin.buffers()]

    with_graph, without = (under.run(under.name, lambda g=g: results(g)) for g in (True, False))
    assert_same(without, with_graph, lambda k: under.run("0", lambda: results(False, k)))


def test_another_forward_before_the_backward(under: Under) -> None:
    """Running averages move on; gradients of what went before do not."""
    layer = build("LSTM", BatchNorm(max_steps=3)).to(under.dtype)
    first, second = (pack(lengths).to(dtype=under.dtype) for lengths in ((5, 3, 3), (6, 6, 6)))
    parameters = list(layer.parameters())

    def run() -> None:
        for mode in (True, False):
            twin = copy.deepcopy(layer).train(mode)
            results = flat(twin(first))
            expected = gradients(results, list(twin.parameters()))
            layer.train(mode)
            results = flat(layer(first))
            layer.train()(second)
            found = gradients(results, parameters)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    under.run(under.name, run)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN_TANH"])
def test_memory_that_was_never_written_is_never_read(under: Under, cuts: None, cell: str) -> None:
    """torch fills new memory with NaN, and `poisoned` what is kept for the next call."""
    layer = build(cell, BatchNorm(eps=0.1, max_steps=3), bidirectional=True)
    xs = [pack((6, 6, 6)), pack((6, 2, 3, 3))]
    torch.use_deterministic_algorithms(True)
    try:
        with poisoned((memory, "scratch"), (under.kernel.engine, "empty")):
            assert_kernel_equals_loop(under, layer, xs)
            assert_kernel_equals_loop(under, layer.eval(), xs)
    finally:
        torch.use_deterministic_algorithms(False)


@every_cell
def test_equal_examples_have_finite_gradients(under: Under, cell: str) -> None:
    norm = BatchNorm(unbiased=cell == "GRU")
    layer = LAYERS[cell](3, 5, norm=norm, dtype=under.dtype)
    for x in (torch.zeros(9, 4, 3), torch.randn(9, 1, 3).expand(9, 4, 3)):
        data = x.to(under.dtype).requires_grad_()
        output, *_ = results = under.run(under.name, lambda d=data: flat(layer(d)))
        assert output.isfinite().all()
        # All examples are the same: what each place gives is its shift.
        assert (output - output[:, :1]).abs().max() < 1e-3
        found = gradients(results, [data, *layer.parameters()])
        assert all(g.isfinite().all() for g in found)


def test_a_large_mean_costs_no_precision(under: Under) -> None:
    """It comes off before products are taken."""
    layer = build("LSTM", BatchNorm(), normalize=("input",))
    torch.manual_seed(0)
    # Whole numbers, so that the offset itself rounds nothing.
    x = torch.randint(-8, 9, (4, 16, 3)).double()

    def results(kernels: str, a: Tensor, k: int = 0) -> list[Tensor]:
        narrow = shifted(layer, under.dtype, k)
        return under.run(kernels, lambda: flat(narrow(a.to(under.dtype))))

    # The offset is taken off the inputs, whose last bits are those of numbers so large.
    found, wanted = results(under.name, x + 4096), results(under.name, x)
    assert_same(found, wanted, lambda k: results("0", moved(x, k) + 4096, k))


@every_cell
def test_a_batch_without_examples(under: Under, cell: str) -> None:
    layer = LAYERS[cell](3, 4, norm=BatchNorm(), dtype=under.dtype)
    x = torch.randn(5, 0, 3, dtype=under.dtype)
    assert under.run(under.name, lambda: layer.eval()(x)[0].shape) == (5, 0, 4)


@every_cell
def test_autocast(under: Under, cell: str) -> None:
    """Products in bfloat16, statistics in float32: as far from float32 as the generic loop is."""
    if under.kernel.engine.unsupported_reason(
        Spec("LSTM", *[Examples(True, 1e-5)] * 3), torch.zeros(2, 3, 4), torch.zeros(16, 4), BF16
    ):
        pytest.skip(f"{under.name} has no products in bfloat16")
    layer = build(cell, BatchNorm(eps=0.1), bidirectional=True).float()
    x = pack((7, 4, 4, 2)).float()

    def run(precise: bool) -> list[Tensor]:
        twin = copy.deepcopy(layer)
        with torch.autocast("cpu", BF16, enabled=not precise):
            results = flat(twin(x))
        assert results[0].dtype == (F32 if precise else BF16)
        assert all(state.dtype == F32 for state in results[1:])
        found = gradients([r.float() for r in results], list(twin.parameters()))
        averages = [b for b in twin.buffers() if b.is_floating_point()]
        assert all(b.dtype == F32 for b in averages)
        return [*results, *found, *averages]

    exact = under.run("0", lambda: run(True))
    loop = under.run("0", lambda: run(False))
    ours = under.run(under.name, lambda: run(False))

    def distances(numbers: list[Tensor]) -> Tensor:
        return torch.stack(
            [(a.float() - b).norm() / b.norm() for a, b in zip(numbers, exact, strict=True)]
        )

    assert distances(ours).max() < 2 * distances(loop).max() < 0.2
    assert distances(ours).max() > 1e-4  # products are rounded


def name_of(value: Any) -> str | None:
    """The part that a parameter has in the name of its test; ``None``: pytest's own."""
    return getattr(value, "name", None)


NATIVE, ATEN = (
    next(kernel for kernel in KINDS if kernel.name == name) for name in ("native", "aten")
)


@pytest.mark.parametrize(
    ("cell", "training", "under"),
    [("LSTM", True, NATIVE), pytest.param("GRU", False, ATEN, marks=pytest.mark.slow)],
    indirect=["under"],
    ids=name_of,
)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole(under: Under, cell: str, training: bool) -> None:
    layer = build(cell, BatchNorm(max_steps=2), bidirectional=True).to(under.dtype)
    x = torch.randn(3, 5, 3, dtype=under.dtype)
    layer(x)
    layer.train(training)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def run(module: nn.Module, of: nn.Module, k: int = 0) -> list[Tensor]:
        results = flat(module(moved(x, k)))
        return [*results, *gradients(results, list(of.parameters())), *of.buffers()]

    def loop(k: int, before: nn.Module) -> list[Tensor]:
        again = copy.deepcopy(before)
        return under.run("0", lambda: run(again, again, k))

    for _ in range(2):
        before = copy.deepcopy(twin)
        actual = under.run(under.name, lambda: run(compiled, layer))
        expected = under.run(under.name, lambda: run(twin, twin))
        assert_same(actual, expected, lambda k, before=before: loop(k, before))


def test_one_name_stands_for_all_that_an_engine_runs() -> None:
    kernels, _ = registry.allowed("native")
    assert {task for kernel in kernels for task in kernel.tasks} == {
        "layers", "step", "window", "DRAW"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"names out of (?!.*native.*native).*native"):
        registry.allowed("nativ")


def test_refusals(under: Under) -> None:
    step = LSTM(3, 4, norm=BatchNorm()).sites["l0"]["input"].to_spec()
    own, row, plain = replace(step, features=12), RowNorm((12,), scale=True), RowNorm((12,))
    weights = Weights(torch.zeros(12, 3), torch.zeros(12, 4))

    def reason(w: Weights = weights, **sites: Any) -> str | None:
        states = (torch.zeros(1, 3, 4),)
        call = RecurrentCall(CELLS["GRU"], [sites], torch.zeros(2, 3, 3), None, states, [w])
        return under.kernel.unsupported_reason(call)

    assert reason(input=own, recurrent=plain) is None
    assert reason(input=row, recurrent=plain) is None
    assert "recurrent site" in str(reason(input=own, recurrent=row))
    assert "recurrent site" in str(reason(input=own, recurrent=None))
    projected = weights._replace(hr=torch.zeros(2, 4))
    assert "projected" in str(reason(projected, input=own, recurrent=plain))


def test_calls_that_kernels_refuse() -> None:
    layer = GRU(3, 4, norm=BatchNorm())
    sites = {role: site.to_spec() for role, site in layer.sites["l0"].items()}
    weights = Weights(layer.weight_ih_l0, layer.weight_hh_l0)
    x, states = torch.zeros(2, 3, 3), (torch.zeros(1, 3, 4),)
    call = RecurrentCall(CELLS["GRU"], [sites], x, None, states, [weights])
    assert "input site" in str(TorchRNN().unsupported_reason(call))
    assert "single step" in str(NativeLayers().unsupported_reason(call._replace(x=x[:1])))
    assert "one example" in str(NativeLayers().unsupported_reason(call._replace(x=x[:, :1])))


@pytest.mark.parametrize("base", [BatchNorm, LayerNorm, RMSNorm])
def test_a_subclass_that_computes_otherwise_is_not_described(base: type[Norm]) -> None:
    class Doubled(base):  # type: ignore[misc, valid-type]
        def normalize(self, site: Any, a: Tensor, step: int | None = None) -> Tensor:
            return 2 * super().normalize(site, a, step)

    class Renamed(base):  # type: ignore[misc, valid-type]
        pass

    layer, plain = (LSTM(3, 4, norm=norm()) for norm in (Doubled, base))
    plain.load_state_dict(layer.state_dict())
    assert layer.sites["l0"]["input"].to_spec() is None
    assert LSTM(3, 4, norm=Renamed()).sites["l0"]["input"].to_spec() is not None
    x = torch.randn(5, 3, 3)
    assert (layer(x)[0] - plain(x)[0]).abs().max() > 1e-3
