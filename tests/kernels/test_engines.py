"""Every engine that runs here against the equations in float64: outputs, states, gradients."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, generic_loop, limits, moved, ratios
from cli_support import python as forked_python
from engines import NEW_MEMORY, cpu_engines, poisoned
from equations import (
    NOISE,
    equations,
    label,
    masks_for,
    random_operands,
    resets_for,
    resetting,
    without_input_bias,
)
from kernels.engine_case import given_for
from kernels.loop_case import LoopCase, Under
from layer_results import results_of
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ln_zoo.kernels.native import build, mixed_precision
from ln_zoo.kernels.native.engine import NativeLayers
from ln_zoo.kernels.native.steps import NativeSteps
from ln_zoo.layers import GRU, LSTM, RNN, RecurrentLayer
from ln_zoo.norms import LayerNorm, Norm, RMSNorm
from ln_zoo.ops import (
    CARRIED_LSTM,
    DREAMER_GRU_INNER_BIAS,
    JOINT_CARRIED_LSTM,
    JOINT_LSTM,
    KERNELS,
    LIGHT_GRU,
    chunks,
    registry,
)
from ln_zoo.ops.engines.aten import steps as aten_steps
from ln_zoo.ops.engines.base import NO_MASKS, Engine, Masks, Products
from ln_zoo.ops.replay import replay
from ln_zoo.ops.spec import Examples, Operands, Rows, Spec

HAS_PACKED = torch.backends.mkldnn.is_available()
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
#: Means and variances over examples, of each place, where rows are normalised.
NO_STATISTICS = (None, None, None)
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
PLACES = {
    "LSTM": ("input", "recurrent", "cell"),
    "GRU": ("input", "recurrent"),
    "LSTM+joint": ("recurrent", "cell"),
    "LSTM+carried": ("input", "recurrent", "cell"),
    "LSTM+joint+carried": ("recurrent", "cell"),
    "GRU+joint": ("recurrent",),
    "light GRU": ("input", "recurrent"),
}
#: Other cells than torch's, as `Spec.encode` writes them, and a cell of each.
FORMS = {
    "LSTM+joint": JOINT_LSTM,
    "LSTM+carried": CARRIED_LSTM,
    "LSTM+joint+carried": JOINT_CARRIED_LSTM,
    "GRU+joint": DREAMER_GRU_INNER_BIAS,
    "light GRU": LIGHT_GRU,
}
every_cell = pytest.mark.parametrize("cell", GATES)
every_form = pytest.mark.parametrize("cell", [*GATES, *FORMS])
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": LSTM,
    "GRU": GRU,
    "RNN_TANH": RNN,
    "RNN_RELU": lambda *sizes, **options: RNN(*sizes, nonlinearity="relu", **options),
    **{name: functools.partial(RecurrentLayer, cell=cell) for name, cell in FORMS.items()},
}
# With gains of 1 networks multiply rounding errors from step to step.
NORMS: dict[str, Norm] = {"layer": LayerNorm(gain=0.5), "rms": RMSNorm(gain=0.5)}


def refusal(engine: Engine, dtype: torch.dtype) -> str | None:
    spec = Spec("LSTM", Rows(), Rows(), Rows())
    return engine.unsupported_reason(spec, torch.zeros(1, 1, 2), torch.zeros(8, 2), dtype)


def alone(name: str, monkeypatch: pytest.MonkeyPatch) -> Under:
    """Layers run on this engine, whose calls are counted."""
    engine = registry.engine_named(name)
    if reason := refusal(engine, F32):
        pytest.skip(f"{name}: {reason}")
    # Padded calls run without the frame.
    kernels = [kernel for kernel in KERNELS if not isinstance(kernel, NativeLayers)]
    monkeypatch.setattr(registry, "KERNELS", kernels)
    return Under(engine, F32 if refusal(engine, F64) else F64).alone(monkeypatch)


@pytest.fixture(params=cpu_engines())
def under(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Under]:
    """Lets one engine run alone, and makes sure that it did."""
    found = alone(request.param, monkeypatch)
    yield found
    assert found.calls


@pytest.fixture
def double(under: Under) -> Under:
    if under.dtype != F64:
        under.calls = 1
        pytest.skip(f"{under.engine.name} has no float64")
    return under


def problem(spec: Spec, T: int, N: int, F: int, H: int, **options: Any) -> Operands:
    return random_operands(spec, (T, N), N, F, H, **options)


def specification(cell: str, center: bool, places: tuple[str, ...] | None = None) -> Spec:
    places = PLACES.get(cell, ("sum",)) if places is None else places
    arithmetic, *forms = cell.split("+")
    joint, carried = "joint" in forms, "carried" in forms
    gates = {"LSTM": (4,), "GRU": (3,) if joint else (2, 1), "light GRU": (2,)}
    groups = gates.get(arithmetic, (1,))
    rows, one = Rows(True, center, 1e-5, groups), Rows(True, center, 1e-5, (1,))
    out = bool({"cell", "sum"} & set(places))
    return Spec(
        arithmetic,
        rows if "input" in places else Rows(),
        rows if "recurrent" in places else Rows(),
        one if out else Rows(),
        joint=joint,
        carried=carried and out,
    )


def run(
    function: Callable[[Operands], tuple[Tensor, ...]], operands: Operands, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Outputs, final states and the gradient of every operand, by name."""
    leaves = Operands(
        *(None if a is None else a.to(dtype, copy=True).requires_grad_() for a in operands)
    )
    results = function(leaves)
    generator = torch.Generator().manual_seed(99)
    cotangents = [torch.randn(r.shape, generator=generator).to(dtype) for r in results]
    there = {name: a for name, a in leaves._asdict().items() if a is not None}
    gradients = torch.autograd.grad(results, list(there.values()), cotangents)
    found = dict(zip(("out", "h", "c"), (r.detach() for r in results), strict=False))
    return found | {f"d{name}": g for name, g in zip(there, gradients, strict=True)}


def shifted(operands: Operands, k: int) -> Operands:
    """The operands of a run of the generic loop."""
    return Operands(*(moved(a, k) for a in operands))


def by_loop(
    spec: Spec, operands: Operands, masks: Masks = NO_MASKS
) -> Callable[[int], dict[str, Tensor]]:
    """What `run` gives of the generic loop in float32."""

    def replayed(o: Operands) -> tuple[Tensor, ...]:
        return replay(spec, without_input_bias(spec, o), None, masks=masks)

    return lambda k: run(replayed, shifted(operands, k), F32)


@functools.lru_cache(maxsize=4)
def reference(
    spec: Spec, *size: int, gain: float = 1.0, seed: int = 0
) -> tuple[Operands, dict[str, Tensor], Callable[[int], dict[str, Tensor]]]:
    """A problem, its results in float64, and those of the generic loop by run.

    With `in_turn`, the next engine takes them again.
    """
    operands = problem(spec, *size, gain=gain, seed=seed)
    expected = run(lambda o: equations(spec, o), operands, F64)
    return operands, expected, functools.cache(by_loop(spec, operands))


#: All engines on one case before the next case.
in_turn = pytest.mark.parametrize("under", cpu_engines(), indirect=True)


def compare(under: Under, spec: Spec, operands: Operands, masks: Masks = NO_MASKS) -> None:
    expected = run(lambda o: equations(spec, o, masks), operands, F64)
    found = run(by(under, spec, masks=masks), operands, under.dtype)
    assert_as_accurate(found, expected, by_loop(spec, operands, masks))


def by(
    under: Under, spec: Spec, save: bool = True, masks: Masks = NO_MASKS
) -> Callable[[Operands], tuple[Tensor, ...]]:
    """The operator as a function of operands."""

    def function(operands: Operands) -> tuple[Tensor, ...]:
        dropout = None if masks.dropout is None else masks.dropout.to(operands.h0.dtype)
        drawn = masks._replace(dropout=dropout)
        out, h, c, *_ = torch.ops.ln_zoo.recurrence(
            *without_input_bias(spec, operands),
            *(*NO_STATISTICS, *drawn, None, *spec.numbers(), under.engine.name, save),
        )
        return (out, h, c) if spec.cell == "LSTM" else (out, h)

    return function


class Operator(LoopCase):
    """The operator in float32."""

    cell: str
    given, changed = (), (0,)
    contiguous = Operands._fields[1:]  # but for inputs
    # The generic loop computes them.
    test_other_gradients_are_refused = None
    test_transforms_of_functions_are_left_to_others = None
    test_the_fastest_engine_is_taken_that_is_allowed = None

    @property
    def spec(self) -> Spec:
        return specification(self.cell, True)

    def problem(self) -> dict[str, Tensor]:
        operands = without_input_bias(self.spec, problem(self.spec, 6, 3, 4, 12))
        return {name: a for name, a in operands._asdict().items() if a is not None}

    def none_of(self, name: str, a: Tensor) -> Tensor:
        return a[:, :0] if name == "x" else a[:0] if name in ("h0", "c0") else a

    def equations(self, p: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return equations(self.spec, Operands(**dict.fromkeys(Operands._fields) | p))

    def engine(self, under: Under) -> Callable[[dict[str, Tensor]], tuple[Tensor, ...]]:
        function = by(under, self.spec)
        return lambda p: function(Operands(**dict.fromkeys(Operands._fields) | p))


class TestLSTM(Operator):
    cell, results = "LSTM", ("out", "h", "c")


class TestGRU(Operator):
    cell, results = "GRU", ("out", "h")


class TestRNN(Operator):
    cell, results = "RNN_TANH", ("out", "h")


def rotated(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All pairs of the first two columns; the others take turns, so that any two values meet."""
    first, second, *others = columns
    return [
        (a, b, *(other[(i + j) % len(other)] for other in others))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]


SIZES = [  # T, N, features I of the input, H, gain
    (1, 1, 7, 5, 1.0),
    (1, 3, 7, 257, 1.0),
    (16, 3, 7, 5, 1.0),
    (16, 3, 7, 100, 1.0),
    (16, 1, 7, 257, 1.0),
    (17, 5, 7, 370, 0.5),
    (37, 3, 7, 257, 0.5),
    (63, 1, 7, 100, 0.5),
]


def assert_as_good_as_float32(under: Under, spec: Spec, problems: list[Any]) -> None:
    """Errors are those of the generic loop in float32: in the median, where there are several.

    The median, since a ReLU that opens by rounding alone changes gradients a lot.
    """
    if len(problems) == 1:
        operands, expected, loop = problems[0]
        assert_as_accurate(run(by(under, spec), operands, F32), expected, loop)
        return
    found: list[dict[str, float]] = []
    for operands, expected, loop in problems:
        ours = run(by(under, spec), operands, F32)
        found.append(ratios(ours, expected, limits(expected, loop)))
    for name in found[0]:
        errors = sorted(of[name] for of in found)
        assert errors[len(errors) // 2] <= 1, (name, errors)


@in_turn
@pytest.mark.parametrize(
    ("cell", "size", "center"),
    [
        *rotated(GATES, SIZES, (True, False)),
        *(
            (cell, SIZES[j], (i + j // 2) % 2 == 0)
            for i, cell in enumerate(FORMS)
            for j in range(i % 2, len(SIZES), 2)
        ),
    ],
    ids=str,
)
def test_float32_against_the_equations(
    cell: str, size: tuple[Any, ...], center: bool, under: Under
) -> None:
    *sizes, gain = size
    spec = specification(cell, center)
    seeds = range(3 if cell in ("RNN_RELU", "light GRU") else 1)
    problems = [reference(spec, *sizes, gain=gain, seed=seed) for seed in seeds]
    assert_as_good_as_float32(under, spec, problems)


@every_form
def test_layer_norm_of_weights_far_from_mean_zero(cell: str, under: Under) -> None:
    """The mean of summed inputs is hundreds of their deviations, and it has no effect."""
    spec = specification(cell, True)
    problems = []
    for seed in range(3 if cell in ("RNN_RELU", "light GRU") else 1):
        o = problem(spec, 20, 3, 7, 100, seed=seed)
        o = o._replace(w_ih=o.w_ih + 10, w_hh=o.w_hh + 10)
        problems.append((o, run(lambda o: equations(spec, o), o, F64), by_loop(spec, o)))
    assert_as_good_as_float32(under, spec, problems)


SUBSETS = [
    (cell, places)
    for cell in (*GATES, *FORMS)
    for n in range(4)
    for places in itertools.combinations(PLACES.get(cell, ("sum",)), n)
]


@in_turn
@pytest.mark.parametrize(
    ("cell", "places", "center"), [(*of, i % 2 == 0) for i, of in enumerate(SUBSETS)], ids=str
)
def test_any_places(cell: str, places: tuple[str, ...], center: bool, under: Under) -> None:
    spec = specification(cell, center, places)
    operands, expected, loop = reference(spec, 7, 3, 4, 12)
    assert_as_accurate(run(by(under, spec), operands, under.dtype), expected, loop)


@pytest.mark.parametrize(
    ("cell", "groups", "center"),
    [
        *(("LSTM", (1, 1, 1, 1), True), ("LSTM", (3, 1), False), ("LSTM", (1, 2, 1), True)),
        *(("GRU", (3,), True), ("GRU", (1, 2), False), ("light GRU", (1, 1), True)),
        *(("GRU+joint", (1, 1, 1), True), ("GRU+joint", (2, 1), False)),
        ("LSTM+joint+carried", (1, 1, 1, 1), False),
    ],
)
def test_any_groups_of_gates(
    cell: str, groups: tuple[int, ...], center: bool, under: Under
) -> None:
    spec = specification(cell, center)
    rows = replace(spec.recurrent, groups=groups)
    spec = replace(spec, input=Rows() if spec.joint else rows, recurrent=rows)
    compare(under, spec, problem(spec, 7, 3, 4, 12))


def test_the_relu_of_a_light_gru(under: Under) -> None:
    """Its derivative at 0 is 0, as torch has it, and NaN passes."""
    spec = specification("light GRU", True, ())
    o = problem(spec, 2, 3, 4, 5)
    zeros = {name: torch.zeros_like(getattr(o, name)) for name in ("w_ih", "w_hh", "bias")}
    found = run(by(under, spec), o._replace(**zeros), under.dtype)
    of_candidate, of_gate = found["dbias"].split(5)
    assert not of_candidate.any()
    assert of_gate.all()
    zeros["bias"][:5] = float("nan")
    found = run(by(under, spec), o._replace(**zeros), under.dtype)
    assert found["out"].isnan().all()


@every_cell
def test_no_biases_and_other_eps(cell: str, under: Under) -> None:
    spec = specification(cell, True)
    spec = replace(spec, **{k: replace(getattr(spec, k), eps=0.3) for k in ("input", "out")})
    compare(under, spec, problem(spec, 7, 3, 4, 12)._replace(bias=None, bias_hn=None))


@pytest.mark.parametrize(
    ("cell", "noise", "size", "places"),
    rotated([*GATES, *FORMS], NOISE, [(3, 1, 2, 5), (19, 5, 7, 37)], [None, None, (), ()]),
    ids=str,
)
def test_noise_against_the_equations(
    cell: str, noise: str, size: tuple[int, ...], places: tuple[str, ...] | None, under: Under
) -> None:
    T, N, _, H = size
    plain = specification(cell, center=T > 3, places=places)
    spec, masks = masks_for(plain, noise, (T, N), N, H)
    compare(under, spec, problem(spec, *size), masks)


@pytest.mark.parametrize(
    ("cell", "noise"),
    [(cell, n) for i, cell in enumerate([*GATES, *FORMS]) for n in (None, NOISE[i % 4])],
)
def test_resets_against_the_equations(cell: str, noise: str | None, under: Under) -> None:
    T, N, H = 19, 5, 37
    spec, masks = specification(cell, center=True), NO_MASKS
    if noise is not None:
        spec, masks = masks_for(spec, noise, (T, N), N, H)
    masks = masks._replace(reset=resets_for(T, N))
    compare(under, spec, problem(spec, T, N, 7, H), masks)


@pytest.mark.parametrize(
    ("cell", "places"), [("LSTM", ("cell",)), ("LSTM", ()), ("GRU", None), ("RNN_TANH", None)]
)
def test_zoneout_of_one_state(cell: str, places: tuple[str, ...] | None, under: Under) -> None:
    spec = specification(cell, True, places)
    _, masks = masks_for(spec, "zoneout", (6, 4), 4, 9)
    operands = problem(spec, 6, 4, 3, 9)
    compare(under, spec, operands, masks._replace(zoneout_c=None))
    if cell == "LSTM":
        compare(under, spec, operands, masks._replace(zoneout_h=None))


def make(cell: str, norm: str = "layer", **options: Any) -> nn.Module:
    """A layer in float64 with random parameters, such as float32 can hold."""
    torch.manual_seed(11)
    layer = LAYERS[cell](4, 12, norm=NORMS[norm], **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.4 - 0.2)
    return layer.double()


def randn(*shape: int) -> Tensor:
    """In float64, such as float32 can hold."""
    return torch.randn(shape).double()


def states_for(cell: str, layer: nn.Module, examples: int) -> tuple[Tensor, ...]:
    runs = layer.num_layers * (2 if layer.bidirectional else 1)
    return tuple(randn(runs, examples, 12) for _ in layer.cell.states)


def results_in(
    layer: nn.Module, x: Any, hx: tuple[Tensor, ...] | None, dtype: torch.dtype, run: int = 0
) -> dict[str, Tensor]:
    """`results_of` in a precision, of inputs and parameters `moved` for a run of that number."""

    def cast(a: Any) -> Any:
        if isinstance(a, PackedSequence):
            return a._replace(data=cast(a.data))
        return moved(a, run).detach().to(dtype, copy=True).requires_grad_()

    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(moved(parameter, run))
    return results_of(layer.to(dtype), cast(x), hx and tuple(cast(s) for s in hx))


def layer_by_loop(
    layer: nn.Module, x: Any, hx: tuple[Tensor, ...] | None = None
) -> Callable[[int], dict[str, Tensor]]:
    """Results of a layer by the generic loop in float32."""

    def loop(k: int) -> dict[str, Tensor]:
        with generic_loop():
            return results_in(layer, x, hx, F32, k)

    return loop


def compare_layers(
    layer: nn.Module, x: Any, hx: Any, under: Under, dtype: torch.dtype | None = None
) -> None:
    """The engine against the generic loop in float64, which tests/layers holds to the equations."""
    with generic_loop():
        calls = under.calls
        expected = results_in(layer, x, hx, F64)
        assert under.calls == calls
    found = results_in(layer, x, hx, dtype or under.dtype)
    assert under.calls > calls
    assert_as_accurate(found, expected, layer_by_loop(layer, x, hx))


@pytest.mark.parametrize(
    ("cell", "options", "lengths", "norm"),
    rotated(
        [*GATES, *FORMS],
        [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "bidirectional": True}],
        [(5, 5, 5), (7, 4, 4, 1), (6, 1)],
        [*NORMS],
    ),
    ids=str,
)
def test_layers_of_sequences_of_any_length(
    cell: str, options: dict[str, Any], lengths: tuple[int, ...], norm: str, under: Under
) -> None:
    layer = make(cell, norm, **options)
    x = pack_sequence([randn(n, 4) for n in lengths])
    compare_layers(layer, x, states_for(cell, layer, len(lengths)), under)


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Under]:
    """Lets native run with so many threads and shares of units, whatever the sizes."""
    found = alone("native", monkeypatch)

    def choose(threads: int, shares: int) -> Under:
        torch.set_num_threads(threads)
        monkeypatch.setattr(NativeSteps, "_shares", lambda steps, examples, masks: shares)
        return found

    return choose


@pytest.mark.parametrize(
    ("cell", "resets", "center", "places"),
    rotated([*GATES, *FORMS], (False, True), (True, False), (None, None, (), ("recurrent",))),
    ids=str,
)
def test_threads_that_share_the_units(
    cell: str,
    resets: bool,
    center: bool,
    places: tuple[str, ...] | None,
    sharing: Callable[[int, int], Under],
) -> None:
    """Of 37 units no share has as many as another, and of 3 one thread may have two."""
    spec = specification(cell, center, None if cell.startswith("RNN") and places else places)
    operands = problem(spec, 9, 3, 4, 37, seed=3)
    masks = NO_MASKS._replace(reset=resets_for(9, 3)) if resets else NO_MASKS
    expected = run(lambda o: equations(spec, o, masks), operands, F64)
    loop = by_loop(spec, operands, masks)
    same: dict[int, dict[str, Tensor]] = {}
    for threads, shares in [(1, 2), (2, 2), (2, 3), (3, 3)]:
        under = sharing(threads, shares)
        found = run(by(under, spec, masks=masks), operands, F32)
        assert_as_accurate(found, expected, loop)
        # What is computed depends on the shares, not on who does it.
        for name, value in same.setdefault(shares, found).items():
            assert torch.equal(value, found[name]), (name, threads, shares)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN_TANH", "LSTM+joint+carried", "light GRU"])
def test_sequences_of_any_length_where_threads_share_the_units(
    cell: str, sharing: Callable[[int, int], Under]
) -> None:
    layer, lengths = make(cell, num_layers=2, bidirectional=True), (7, 4, 4, 1)
    x = pack_sequence([randn(n, 4) for n in lengths])
    compare_layers(layer, x, states_for(cell, layer, 4), sharing(2, 3))
    flags = resets_for(7, 4).view(7, 4)
    layer = resetting(layer, pack_sequence([flags[:n, i] for i, n in enumerate(lengths)]))
    compare_layers(layer, x, states_for(cell, layer, 4), sharing(2, 3))


_MANY_THREADS = """
import torch
from ln_zoo.layers import LSTM
from ln_zoo.norms import LayerNorm
from ln_zoo.kernels.native import layers as native_layers
torch.set_num_threads(THREADS)
native_layers.shares_of_units = lambda *layout: THREADS
layer, x = LSTM(8, 64, norm=LayerNorm()), torch.randn(100, 4, 8)
for _ in range(20):
    layer(x)[0].sum().backward()
print("done")
"""


def test_more_threads_than_processors_do_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait for others that do not run: 20 training steps, where threads meet 14,000 times."""
    if reason := refusal(registry.engine_named("native"), F32):
        pytest.skip(f"native: {reason}")
    threads = 2 * (os.cpu_count() or 1)
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    done = forked_python(tmp_path, _MANY_THREADS.replace("THREADS", str(threads)), timeout=120)
    assert done.out == "done\n", done.err


@pytest.mark.parametrize(
    ("cell", "lengths", "noise"),
    rotated(
        [*GATES, *FORMS],
        [(9, 7, 7, 2, 1), (9, 9, 9)],
        [{}, {"zoneout": 0.25}, {"recurrent_dropout": 0.5}],
    ),
    ids=str,
)
def test_many_chunks_are_as_one(
    cell: str,
    lengths: tuple[int, ...],
    noise: dict[str, float],
    under: Under,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = make(cell, **noise).train(len(lengths) > 3 or "zoneout" not in noise)
    x = pack_sequence([randn(n, 4) for n in lengths])
    monkeypatch.setattr(aten_steps, "PIECE", 4 * 48)
    steps: list[int] = []
    cut = chunks.time_chunks
    for rows in (4, 10):
        with monkeypatch.context() as patch:
            patch.setattr(
                chunks,
                "time_chunks",
                lambda sizes, *_, rows=rows: steps.append(1) or cut(sizes, rows),
            )
            compare_layers(layer, x, states_for(cell, layer, len(lengths)), under)
    assert len(steps) == 4


@every_cell
@pytest.mark.parametrize("lengths", [(9, 9, 9, 9), (9, 7, 7, 2, 1)], ids=str)
@pytest.mark.parametrize("under", ["aten"], indirect=True)
def test_the_ways_of_a_long_and_wide_layer(
    cell: str, lengths: tuple[int, ...], under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch prepares its weights where that pays: here it does so anywhere."""
    packed: list[int] = []
    monkeypatch.setattr(aten_steps, "MANY", 1)
    monkeypatch.setattr(
        aten_steps, "_packs", lambda w: packed.append(1) or (w.dtype == F32 and HAS_PACKED)
    )
    layer = make(cell)
    x = pack_sequence([randn(n, 4) for n in lengths])
    start = states_for(cell, layer, len(lengths))
    for dtype in {under.dtype, F32}:
        compare_layers(layer, x, start, under, dtype)
    assert packed


def test_dropout_draws_what_the_generic_loop_draws(
    under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make("LSTM", num_layers=3, dropout=0.5).to(under.dtype)
    x = torch.randn(5, 3, 4, dtype=under.dtype)

    def output(kernels: str, k: int = 0) -> dict[str, Tensor]:
        monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
        torch.manual_seed(3)
        return {"out": layer(moved(x, k))[0]}

    one, two = (output(under.engine.name) for _ in range(2))
    assert torch.equal(one["out"], two["out"])
    assert_as_accurate(one, output("0"), lambda k: output("0", k))


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN_TANH", "LSTM+joint+carried"])
def test_without_gradients_nothing_is_kept(cell: str, under: Under) -> None:
    spec = specification(cell, True)
    operands = [None if a is None else a.to(F32) for a in problem(spec, 3, 2, 4, 12)]
    for save in (False, True):
        *_, v, u, cells, stats, _ = torch.ops.ln_zoo.recurrence(
            *operands, *NO_STATISTICS, *NO_MASKS, None, *spec.numbers(), under.engine.name, save
        )
        kept = v.numel() + u.numel() + cells.numel() + stats.numel()
        assert kept > 0 if save else kept == 0


def test_a_call_that_kept_nothing_cannot_go_back(under: Under) -> None:
    spec = specification("GRU", True)
    with pytest.raises(RuntimeError, match="save=False and keeps nothing"):
        run(by(under, spec, save=False), problem(spec, 2, 2, 3, 4), F32)


@pytest.mark.parametrize(
    ("cell", "lengths"),
    [*zip([*GATES, *FORMS], itertools.cycle([(6, 3, 1), (6, 6, 6)]), strict=False)],
)
def test_memory_is_not_read_before_it_is_written(
    cell: str, lengths: tuple[int, ...], under: Under
) -> None:
    layer = make(cell, bidirectional=True)
    x = pack_sequence([randn(n, 4) for n in lengths])
    with poisoned(*NEW_MEMORY, (under.engine, "empty")):
        compare_layers(layer, x, states_for(cell, layer, len(lengths)), under)
        with torch.no_grad():
            assert layer.to(under.dtype)(x.to(under.dtype))[0].data.isfinite().all()


HALF_MODES = ["autocast", "bfloat16", "bfloat16, resets"]


@pytest.mark.parametrize(
    ("cell", "mode"),
    [
        pytest.param(cell, mode, marks=() if cell in GATES and i % 3 == j else pytest.mark.slow)
        for i, cell in enumerate([*GATES, *FORMS])
        for j, mode in enumerate(HALF_MODES)
    ],
)
def test_half_precision_is_no_worse_than_the_generic_loop(
    cell: str, mode: str, under: Under, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := refusal(under.engine, BF16):
        under.calls = 1
        pytest.skip(f"{under.engine.name}: {reason}")
    # Elsewhere, and in small calls, it runs in float32: native/test_mixed_precision.py.
    monkeypatch.setattr(build, "bfloat16_pays", lambda: True)
    monkeypatch.setitem(mixed_precision.MIN_MULTIPLICATIONS, "layers", 0)
    gaps: dict[str, dict[str, list[float]]] = {"0": {}, under.engine.name: {}}
    seeds = 61 if cell in FORMS else 7  # there the median of a few varies by a half
    for seed in range(seeds):
        layer = make(cell).to(BF16)
        if "resets" in mode:
            layer = resetting(layer, resets_for(8, 3).view(8, 3))
        torch.manual_seed(seed)
        x = torch.randn(8, 3, 4).to(BF16).to(F64)
        hx = tuple(s.to(BF16).to(F64) for s in states_for(cell, layer, 3))
        monkeypatch.setenv("LN_ZOO_KERNELS", "0")
        exact = copy.deepcopy(layer).double()
        expected = results_of(exact, x, hx)
        dtype = F32 if mode == "autocast" else BF16
        for kernels, found in gaps.items():
            monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
            narrow = copy.deepcopy(layer).to(dtype)
            given, *starts = (a.to(dtype) for a in (x, *hx))
            with torch.autocast("cpu", BF16, enabled=mode == "autocast"):
                results = results_of(narrow, given, starts)
            assert results.pop("output").dtype == BF16
            assert {a.dtype for a in results.values()} == {dtype}
            for name, a in results.items():
                gap = (a.double() - expected[name]).norm() / expected[name].norm()
                found.setdefault(name, []).append(gap.item())
    for name in gaps["0"]:
        # The median: a ReLU that opens by rounding alone changes gradients a lot.
        both = gaps[under.engine.name], gaps["0"]
        ours, theirs = (sorted(found[name])[seeds // 2] for found in both)
        assert ours <= 1.5 * theirs, name


def arguments_of(spec: Spec, under: Under, *, packed: bool, noise: str | None) -> list[Any]:
    operands = problem(spec, 4, 3, 2, 4)
    x, sizes = operands.x, None
    if packed:
        sizes = torch.tensor([3, 3, 2, 2 if spec.examples else 1])
        x = x.flatten(0, 1)[: sizes.sum()]
    leaves = [
        None if a is None else a.to(under.dtype).requires_grad_() for a in operands._replace(x=x)
    ]
    masks = NO_MASKS
    if noise is not None:
        spec, masks = masks_for(spec, noise, tuple(x.shape[:-1]), 3, 4)
    if masks.dropout is not None:
        masks = masks._replace(dropout=masks.dropout.to(under.dtype))
    given = [None if a is None else a.to(under.dtype) for a in given_for(spec, 4)]
    return [*leaves, *given, *masks, sizes, *spec.numbers(), under.engine.name]


def over_examples(cell: str, batch: bool) -> Spec:
    """By statistics of the batch, or given ones."""
    place, none = Examples(batch, 0.1, int(batch)), Rows()
    places = {"LSTM": (place, place, place), "GRU": (place, place, none)}
    return Spec(cell, *places.get(cell, (none, none, place)))


@pytest.mark.parametrize(
    ("spec", "packed", "noise", "under"),
    [
        (specification("LSTM", True), True, "zoneout", "aten"),
        (specification("GRU", True), True, "all", "native"),
        (specification("RNN_TANH", True), False, "recurrent dropout", "native"),
        (over_examples("LSTM", True), False, None, "native"),
        (over_examples("GRU", False), True, None, "aten"),
    ],
    indirect=["under"],
)
def test_operators_are_well_formed(
    spec: Spec, packed: bool, noise: str | None, under: Under
) -> None:
    given = arguments_of(spec, under, packed=packed, noise=noise)
    torch.library.opcheck(torch.ops.ln_zoo.recurrence.default, (*given, True))
    plain = [a.detach() if isinstance(a, Tensor) else a for a in given]
    out, h, c, *kept = torch.ops.ln_zoo.recurrence(*plain, True)
    backward = (
        *(torch.ones_like(out), torch.ones_like(h), torch.ones_like(c) if c.numel() else None),
        *(*plain[:-4], out, *kept, *plain[-4:]),
    )
    for needs in ([True] * 12, [True, False] * 6):
        torch.library.opcheck(
            torch.ops.ln_zoo.recurrence_backward.default,
            (*backward, needs),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize(
    ("spec", "packed", "noise"),
    [
        # Any two of packing, noise and centring meet.
        *(
            (specification(cell, i % 4 < 2), i % 2 > 0, (None, "zoneout", "all")[i % 3])
            for i, cell in enumerate([*GATES, *FORMS])
        ),
        *((over_examples("LSTM", batch), batch, None) for batch in (True, False)),
        *((over_examples("GRU", batch), not batch, None) for batch in (True, False)),
        (over_examples("RNN_TANH", True), True, None),
        (over_examples("RNN_RELU", False), True, None),
    ],
    ids=label,
)
def test_gradients_and_theirs_are_those_of_finite_differences(
    spec: Spec, packed: bool, noise: str | None, double: Under
) -> None:
    *leaves, sizes, integers, floats, name = arguments_of(spec, double, packed=packed, noise=noise)
    options = sizes, integers, floats, name
    there = [a for a in leaves if a is not None and a.requires_grad]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        tensors = [next(given) if a is not None and a.requires_grad else a for a in leaves]
        operands = without_input_bias(spec, Operands(*tensors[:12]))
        results = torch.ops.ln_zoo.recurrence(*operands, *tensors[12:], *options, True)
        return results[: 3 if spec.cell == "LSTM" else 2]

    assert torch.autograd.gradcheck(function, there, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, there, fast_mode=True)


# Compiled, an operator is one node, whatever the cell: those of two states and of one.
@pytest.mark.parametrize(
    ("cell", "under"), [("LSTM", "native"), ("GRU", "aten")], indirect=["under"]
)
@pytest.mark.usefixtures("compiler")
def test_compiles_whole(cell: str, under: Under) -> None:
    layer = make(cell, bidirectional=True).to(under.dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 3, 4, dtype=under.dtype)
    expected = results_of(layer, x)
    calls = under.calls
    loop = layer_by_loop(layer, x)
    assert_as_accurate(results_of(layer, x, call=lambda x, _: compiled(x)), expected, loop)
    assert under.calls > calls
    with torch.no_grad():
        quiet, _ = compiled(x)
    assert_as_accurate({"output": quiet}, {"output": expected["output"]}, loop)


def test_transforms_of_functions_are_left_to_the_generic_loop(under: Under) -> None:
    """Their numbers: tests/layers/test_transforms.py."""
    layer = make("GRU").to(under.dtype)
    x = torch.randn(5, 3, 4, dtype=under.dtype)
    layer(x)
    calls = under.calls
    torch.vmap(lambda row: layer(row)[0], in_dims=1, out_dims=1)(x)
    torch.func.jvp(lambda x: layer(x)[0], (x,), (torch.ones_like(x),))
    torch.func.grad(lambda x: layer(x)[0].sum())(x)
    with torch.autograd.forward_ad.dual_level():
        layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    assert under.calls == calls


def test_products_add_up_in_the_precision_of_the_total() -> None:
    w = torch.randn(8, 3)
    p = Products(w)
    for dtype in (F32, BF16):
        d, a = torch.randn(5, 8).to(dtype), torch.randn(5, 3).to(dtype)
        total = torch.full((8, 3), float("nan"))
        p.add_weight_gradient(d, a, total, True)
        p.add_weight_gradient(d, a, total, False)
        plain = {"total": 2 * (d.T @ a)}
        exact = {"total": 2 * (d.double().T @ a.double())}
        assert_as_accurate({"total": total}, exact, lambda _, plain=plain: plain)
