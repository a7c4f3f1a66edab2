"""Padded calls and single steps in one call of C++: numbers and gradients of the generic loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from accuracy import RUNS, Results, assert_as_accurate, generic_loop, moved
from engines import names_of, needs_native, note_kernels
from equations import resets_for, resetting
from layer_results import assert_threads_run_parts, randomised, results_of
from torch import Tensor, nn

from ln_zoo import ops
from ln_zoo.kernels.native import layers as native_layers
from ln_zoo.kernels.native.engine import NativeLayers
from ln_zoo.layers import GRU, LSTM, RNN, GRUCell, LSTMCell, RecurrentCell, RecurrentLayer, RNNCell
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, RMSNorm, WeightNorm
from ln_zoo.ops import Cell, registry, resets

pytestmark = needs_native

CELLS = {"LSTM": LSTMCell, "GRU": GRUCell, "RNN": RNNCell}
LAYERS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}
every_kind = pytest.mark.parametrize("name", CELLS)
#: Cells of other libraries.
OTHERS = [cell for cell in ops.CELLS.values() if not cell.in_torch]


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Cell) else str(value)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It runs alone, and what it refuses goes to the generic loop."""
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    monkeypatch.setattr(registry, "KERNELS", [NativeLayers()])
    return iter(())


def made(module: nn.Module) -> Any:
    torch.manual_seed(1)
    return randomised(module)


def initial_states(module: Any, examples: int) -> tuple[Tensor, ...]:
    lead = (len(module.sites), examples) if isinstance(module, nn.RNNBase) else (examples,)
    return tuple(torch.randn(*lead, module.hidden_size) for _ in module.cell.states)


def assert_generic(
    module: Any, x: Tensor, states: tuple[Tensor, ...], training: bool, times: int = 2
) -> None:
    """The same as by the generic loop in float64, at the first and the next call."""

    def generic(dtype: torch.dtype, k: int = 0) -> Results:
        twin = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(moved(parameter, k))
        given = tuple(moved(s, k).to(dtype) for s in states)
        with generic_loop():
            return results_of(twin.to(dtype), moved(x, k).to(dtype), given, gradients_too=training)

    exact = generic(torch.float64)
    for _ in range(times):
        found = results_of(module, x, states, gradients_too=training)
        # Of a few numbers, whose terms may cancel, some runs are exact by chance.
        runs = RUNS if min(a.numel() for a in exact.values()) > 32 else 64
        assert_as_accurate(found, exact, lambda k: generic(torch.float32, k), runs=runs)


OF_TORCH = [ops.CELLS[name] for name in ("LSTM", "GRU", "RNN_TANH")]
#: Units, examples, and whether in training.
# Any two features are normalised to +-1, so their gradients are rounding alone.
SIZES_OF_STEPS = [(1, 1, False), *itertools.product((5, 100, 33), (1, 3, 9), (False, True))]
OTHER_SIZES = [(1, 1, False), (17, 3, True), (33, 1, True), (33, 9, True)]
NORMS: list[dict[str, Any]] = [
    {"norm": LayerNorm()},
    {"norm": RMSNorm(gain=0.7), "bias": False},
    {"norm": Identity()},
    {"norm": WeightNorm()},
]
SITES: list[dict[str, Any]] = [
    {"norm": LayerNorm(gain=0.5)},
    {"norm": LayerNorm(gain=0.5, per_gate=True), "bias": False},
    {"norm": RMSNorm(gain=0.7)},
    *NORMS[2:],
    {"norm": LayerNorm(gain=0.5), "normalize": ()},  # the last place alone
]
# Products of one step change their form at whole vectors of rows, 4, 8 or 16, and at a few rows.
MANY_ROWS = (5, 6, 7, 15, 17, 31, 32, 33, 72)
WIDTHS = [(1, 1, Identity()), (3, 3, RMSNorm()), (17, 100, LayerNorm()), (129, 129, LayerNorm())]
STEPS = [
    # Any two of cell, norm and size meet.
    *(
        (cell, (7, hidden, examples), NORMS[(i + j) % 4], training, 2)
        for i, cell in enumerate(OF_TORCH)
        for j, (hidden, examples, training) in enumerate(SIZES_OF_STEPS)
    ),
    *(
        (cell, (7, hidden, examples), options, training, 2)
        for i, cell in enumerate(OTHERS)
        for j, options in enumerate(SITES)
        for hidden, examples, training in [OTHER_SIZES[(i + j) % 4]]
    ),
    # The gradient of a single unit is one number, whose terms may cancel.
    *(
        (cell, (inputs, hidden, examples), {"norm": norm}, hidden > 1, 1)
        for i, cell in enumerate(OF_TORCH)
        for j, examples in enumerate(MANY_ROWS)
        for inputs, hidden, norm in [WIDTHS[(i + j) % 4]]
    ),
]


@pytest.mark.parametrize(("cell", "sizes", "options", "training", "times"), STEPS, ids=name_of)
def test_steps_are_those_of_the_generic_loop(
    cell: Cell,
    sizes: tuple[int, int, int],
    options: dict[str, Any],
    training: bool,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, hidden, examples = sizes
    if "normalize" in options:
        options = options | {"normalize": cell.roles[-1:]}
    module = made(RecurrentCell(inputs, hidden, cell=cell, **options))
    names = note_kernels(monkeypatch)
    x, states = torch.randn(examples, inputs), initial_states(module, examples)
    before = [s.clone() for s in states]
    assert_generic(module, x, states, training, times)
    assert all(torch.equal(s, b) for s, b in zip(states, before, strict=True))  # left alone
    # The second call has a plan, where weights are parameters.
    calls = times if WeightNorm() in options.values() else 1
    assert [name for name in names_of(names) if name] == ["native"] * calls


@pytest.mark.parametrize("threads", [2, 3])
@every_kind
def test_threads_share_one_step(name: str, threads: int) -> None:
    cell = made(CELLS[name](70, 300, norm=LayerNorm()))
    x, states = torch.randn(45, 70), initial_states(cell, 45)
    alone = results_of(copy.deepcopy(cell), x, states, gradients_too=False)
    torch.set_num_threads(threads)
    together = results_of(copy.deepcopy(cell), x, states, gradients_too=False)
    assert all(torch.equal(a, together[key]) for key, a in alone.items())
    assert_generic(cell, x, states, training=True, times=1)


class Case(NamedTuple):
    """A call of a layer; ``sizes``: T, N, inputs and units.

    ``rows`` of a chunk and ``shares`` of the units: 0 for the default; ``resets``: "some" or "all"
    steps, none if empty.
    """

    cell: Cell
    sizes: tuple[int, int, int, int]
    options: dict[str, Any]
    training: bool = True
    gradients: bool = True
    rows: int = 0
    shares: int = 0
    threads: int = 1
    resets: str = ""

    def __str__(self) -> str:
        return ", ".join([self.cell.name, *map(str, self[1:])])


LAYER, RMS, NONE = LayerNorm(gain=0.5), RMSNorm(gain=0.7), Identity()
#: Sizes and options.
PLAIN: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((1, 1, 3, 5), {"norm": LayerNorm()}),
    ((1, 4, 16, 16), {"norm": RMS, "bias": False}),
    ((4, 1, 7, 33), {"norm": LayerNorm(per_gate=True)}),
    ((2, 3, 5, 20), {"norm": LAYER, "num_layers": 2, "bidirectional": True}),
    ((6, 5, 9, 40), {"norm": NONE}),
    ((6, 5, 1, 40), {"norm": LAYER}),
    ((6, 5, 9, 40), {"norm": LAYER, "batch_first": True}),
]
ALL_NOISE = {"zoneout": 0.25, "recurrent_dropout": 0.5}
OF_OTHERS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((1, 4, 16, 17), {"norm": RMS, "bias": False}),
    ((4, 1, 7, 3), {"norm": LAYER, **ALL_NOISE}),
    ((9, 5, 7, 20), {"norm": LAYER, **ALL_NOISE}),
    ((7, 30, 17, 33), {"norm": LAYER, "num_layers": 2, "bidirectional": True}),
]
NOISE: list[tuple[Cell, dict[str, Any]]] = [
    (OF_TORCH[0], {"norm": LAYER, "zoneout": (0.25, 0.5), "recurrent_dropout": 0.5}),
    (OF_TORCH[0], {"norm": NONE, "zoneout": (0.0, 0.5)}),
    (OF_TORCH[1], {"norm": RMSNorm(gain=0.5), **ALL_NOISE}),
    (OF_TORCH[2], {"norm": LAYER, "zoneout": 0.25}),
    (OF_TORCH[2], {"norm": NONE, "recurrent_dropout": 0.75}),
]
RESETS: list[tuple[tuple[int, int, int, int], int, dict[str, Any]]] = [
    ((1, 3, 5, 21), 1, {"norm": LAYER}),
    ((4, 1, 7, 33), 1, {"norm": LAYER, "num_layers": 2, "bidirectional": True}),
    ((9, 5, 7, 20), 1, {"norm": RMSNorm(gain=0.5), "num_layers": 2, "bidirectional": True}),
    ((9, 5, 1, 9), 1, {"norm": NONE, "bias": False}),
    ((9, 5, 7, 37), 3, {"norm": LAYER}),
    ((5, 40, 7, 20), 1, {"norm": LAYER}),
    ((9, 5, 3, 21), 1, {"norm": LAYER, **ALL_NOISE}),
    ((2, 2, 3, 5), 1, {"norm": NONE, **ALL_NOISE}),
]
#: Of some steps, of one where a step has more rows, and with few or single columns.
CHUNKS: list[tuple[tuple[int, int, int, int], dict[str, Any]]] = [
    ((9, 5, 7, 20), {"norm": LAYER}),
    ((9, 5, 20, 9), {"norm": RMS}),
    ((7, 30, 17, 33), {"norm": NONE, "num_layers": 2, "bidirectional": True}),
    ((8, 3, 1, 40), {"norm": LAYER, "recurrent_dropout": 0.5}),
    ((5, 40, 7, 20), {"norm": LAYER, **ALL_NOISE}),
]
CASES = [
    *(Case(c, *of, gradients=g) for c in OF_TORCH for of in PLAIN for g in (False, True)),
    *(
        Case(cell, *of, *((i + j) % 3 > 0,) * 2, 12 if (i + j) % 3 else 20)
        for i, cell in enumerate(OF_TORCH)
        for j, of in enumerate(CHUNKS)
    ),
    # In chunks, and where threads share the units, or examples where there is noise.
    *(
        Case(cell, *of, *((i + j) % 3 > 0,) * 2, 12 if (i + j) % 3 else 20, shares)
        for i, cell in enumerate(OTHERS)
        for j, of in enumerate(OF_OTHERS)
        for shares in [1 if "zoneout" in of[1] else (1, 3)[(i + j) % 2]]
    ),
    *(Case(c, (30, 29, 5, 9), {"norm": LAYER, "bias": False}, threads=3) for c in OTHERS),
    *(
        Case(c, (7, 4, 5, 37), {"norm": LAYER}, gradients=g, rows=12, shares=3, threads=n)
        for c in OF_TORCH
        for n, g in ((1, True), (2, False), (3, True))
    ),
    *(
        Case(cell, (*lead, 5, 21), {"num_layers": 2, "bidirectional": True, **own}, (i + j) % 3 > 0)
        for i, (cell, own) in enumerate(NOISE)
        for j, lead in enumerate([(1, 3), (1, 35), (3, 1), (7, 5)])
    ),
    # Of the first examples one is reset at once, and one is not.
    *(
        Case(cell, sizes, own, *((i + j) % 3 > 0,) * 2, 12, shares, resets=where)
        for i, cell in enumerate(OF_TORCH)
        for j, (sizes, shares, own) in enumerate(RESETS)
        for where in (("some",) if (i + j) % 2 else ("some", "all"))
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_are_those_of_the_generic_loop(
    case: Case, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    T, N, inputs, hidden = case.sizes
    if case.shares:
        monkeypatch.setattr(native_layers, "shares_of_units", lambda *layout: case.shares)
    torch.set_num_threads(case.threads)
    layer = made(RecurrentLayer(inputs, hidden, cell=case.cell, **case.options))
    if case.resets:
        monkeypatch.setattr(resets, "split_at_resets", lambda *_: pytest.fail("cut into pieces"))
        some = case.resets == "some"
        flags = resets_for(T, N).view(T, N) if some else torch.ones(T, N, dtype=torch.bool)
        layer = resetting(layer, flags)
    x = torch.randn(*((N, T) if case.options.get("batch_first") else (T, N)), inputs)
    states = initial_states(layer.train(case.training), N)
    if case.rows:
        whole = results_of(copy.deepcopy(layer), x, states, gradients_too=case.gradients)
        monkeypatch.setattr(native_layers, "rows_of_chunk", lambda rows, saved: case.rows)
        cut = results_of(copy.deepcopy(layer), x, states, gradients_too=case.gradients)
        assert all(torch.equal(whole[name], cut[name]) for name in ("output", "h"))
        chosen.clear()
    assert_generic(layer, x, states, case.gradients)
    # The second call follows a plan; all others are the generic loop's.
    assert names_of(chosen).count("native") == 1


@pytest.mark.parametrize("norm", [LayerNorm(gain=0.5), Identity()], ids=str)
@every_kind
def test_examples_do_not_depend_on_their_number(name: str, norm: Norm) -> None:
    """Many are multiplied by the input weight step by step, few all steps at once."""
    layer, x = made(LAYERS[name](7, 33, norm=norm)), torch.randn(5, 50, 7)
    many, few = layer(x)[0], layer(x[:, :5])[0]
    assert torch.equal(many[:, :5], few)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], many)
        assert torch.equal(layer(x[:, :5])[0], few)


@pytest.mark.parametrize("norm", [LayerNorm(gain=0.5), Identity()], ids=str)
@every_kind
def test_threads_run_parts_of_many_examples(name: str, norm: Norm) -> None:
    layer = made(LAYERS[name](7, 20, norm=norm))
    assert_threads_run_parts(layer, torch.randn(20, 41, 7), initial_states(layer, 41))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@every_kind
def test_batch_norm_does_not_depend_on_how_many_threads_there_are(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the generic loop: tests/kernels/test_batch_recurrence.py."""
    names = note_kernels(monkeypatch)
    layer = made(LAYERS[name](5, 100, norm=BatchNorm(max_steps=7))).train(training)
    x, states = torch.randn(9, 6, 5), initial_states(layer, 6)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        twin = copy.deepcopy(layer)
        found.append(
            results_of(twin, x, states, gradients_too=training) | dict(twin.named_buffers())
        )
    assert names_of(names) == ["native"] * 3
    for other in found[1:]:
        assert all(torch.equal(a, other[key]) for key, a in found[0].items())


@pytest.mark.parametrize("rows", [0, 8])
def test_given_statistics_of_no_step_or_of_too_many_are_refused(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LSTM(3, 4, norm=BatchNorm()).eval()
    wrong = torch.zeros(rows, 16)
    monkeypatch.setattr(BatchNorm, "_population_of_steps", lambda *arguments: (wrong, wrong))
    with pytest.raises(RuntimeError, match=rf"given_input size \(2, [17], 16\), got \[2, {rows}"):
        layer(torch.randn(7, 2, 3))


@pytest.mark.parametrize(
    ("kind", "examples", "norm"),
    [
        (cell, examples, (LayerNorm(), Identity())[(i + j) % 2])
        for i, cell in enumerate(ops.CELLS.values())
        for j, examples in enumerate((1, 6))  # weights as they are, and packed
    ],
    ids=name_of,
)
def test_gradients_of_gradients(kind: Cell, examples: int, norm: Norm) -> None:
    layer = made(RecurrentLayer(3, 4, cell=kind, norm=norm))
    cell = made(RecurrentCell(3, 4, cell=kind, norm=norm))

    def twice(module: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        done = module(x)
        state = done[1] if isinstance(module, nn.RNNBase) else done
        h = state[0] if isinstance(state, tuple) else state
        (first,) = torch.autograd.grad(h.sin().sum(), x, create_graph=True)
        found = torch.autograd.grad(first.square().sum(), [x, *module.parameters()],
                                    allow_unused=True)  # fmt: skip
        return [a for a in found if a is not None]

    for module, x in ((layer, torch.randn(2, examples, 3)), (cell, torch.randn(examples, 3))):
        found = twice(module, x)
        with generic_loop():
            wanted = twice(module, x)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5)


def test_some_gradients_alone() -> None:
    """Of what needs one, from some of the outputs."""
    layer = made(LSTM(3, 4, norm=LayerNorm()))
    twin = copy.deepcopy(layer)
    for module in (layer, twin):
        module.weight_hh_l0.requires_grad_(False)
        module.sites["l0"]["cell"].shift.requires_grad_(False)
    x, gradients = torch.randn(2, 3, 3), []
    for which in range(3):
        for module in (layer, twin):
            module.zero_grad()
            with generic_loop() if module is twin else torch.enable_grad():
                output, (h, c) = module(x)
            (output, h, c)[which].sum().backward()
            gradients.append([p.grad for p in module.parameters()])
        for ours, theirs in zip(*gradients[-2:], strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_a_backward_after_a_change_in_place_is_an_error() -> None:
    layer = LSTM(3, 4, norm=LayerNorm())
    output, _ = layer(torch.randn(1, 1, 3))
    with torch.no_grad():
        layer.weight_hh_l0.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    output, _ = layer(torch.randn(1, 1, 3))
    layer.weight_hh_l0.data = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match="w_hh"):
        output.sum().backward()


def test_it_stands_back_where_it_is_not_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = note_kernels(monkeypatch)

    def runs(cell: Any, x: Tensor, states: tuple[Tensor, ...]) -> bool:
        names.clear()
        cell(x, states[0], step=0)
        return names_of(names) == ["native"]

    cell = GRUCell(7, 20, norm=LayerNorm())
    x, states = torch.randn(1, 7), initial_states(cell, 1)
    assert runs(cell, x, states)
    assert runs(cell, torch.randn(300, 7), initial_states(cell, 300))
    assert not runs(GRUCell(7, 20, norm=BatchNorm()), x.repeat(2, 1), initial_states(cell, 2))
    assert not runs(copy.deepcopy(cell).double(), x.double(), tuple(s.double() for s in states))
    with torch.autocast("cpu", torch.bfloat16):
        assert not runs(cell, x, states)
    monkeypatch.setenv("LN_ZOO_KERNELS", "0")
    assert not runs(cell, x, states)
    monkeypatch.delenv("LN_ZOO_KERNELS")
    names.clear()
    LSTM(3, 4, proj_size=2, norm=LayerNorm())(torch.randn(5, 2, 3))
    LSTM(3, 4, norm=LayerNorm())(torch.randn(3, 0, 3))
    LSTM(3, 4, norm=LayerNorm())(nn.utils.rnn.pack_sequence([torch.randn(3, 3)]))
    for other in (ops.JOINT_LSTM, ops.CARRIED_LSTM, ops.PRENORM_GRU, ops.LIGHT_GRU):
        RecurrentLayer(3, 4, cell=other, norm=BatchNorm())(torch.randn(5, 2, 3))
    assert names == [None] * 7
    LSTM(3, 4, norm=LayerNorm())(torch.randn(100, 3, 3))  # of more rows than a chunk
    assert names_of(names)[7:] == ["native"]


def test_views_with_strides_are_taken_as_they_are() -> None:
    cell = made(GRUCell(7, 20, norm=LayerNorm()))
    x, h = torch.randn(7, 2).t(), torch.randn(20, 2).t()
    with torch.no_grad():
        for a, b in itertools.product((x, x.contiguous()), (h, h.contiguous())):
            torch.testing.assert_close(cell(a, b), cell(x.contiguous(), h.contiguous()))


def test_nan_and_infinity_pass() -> None:
    cell = LSTMCell(7, 20, norm=LayerNorm())
    with torch.no_grad():
        h, c = cell(torch.full((1, 7), float("nan")))
        assert h.isnan().all()
        assert c.isnan().all()
        plain = LSTMCell(7, 20)
        h, c = plain(torch.full((1, 7), float("inf")).abs())
        reference = torch.nn.LSTMCell(7, 20)
        reference.load_state_dict(plain.state_dict())
        wanted = reference(torch.full((1, 7), float("inf")))
    torch.testing.assert_close(h, wanted[0], equal_nan=True)
    torch.testing.assert_close(c, wanted[1], equal_nan=True)


def test_a_plan_draws_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that follows it has masks of its own, those that it would have without."""
    layer = made(LSTM(3, 5, 2, norm=LayerNorm(), zoneout=0.3, recurrent_dropout=0.4))
    x = torch.randn(4, 3, 3)

    def called(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return layer(x)[0]

    first, other = called(1), called(2)
    names = note_kernels(monkeypatch)
    assert torch.equal(called(1), first)
    assert torch.equal(called(2), other)
    assert not torch.equal(first, other)
    assert not names
    layer.zoneout = (0.0, 0.0)
    once = called(1)
    assert torch.equal(called(1), once)
    assert not torch.equal(once, first)
    layer.eval()
    assert torch.equal(called(1), called(2))


def test_a_plan_of_evaluation_knows_its_zoneout() -> None:
    layer = made(LSTM(3, 5, norm=LayerNorm(), zoneout=0.1)).eval()
    x = torch.randn(2, 3, 3)
    found = []
    for shares in ((0.1, 0.1), (0.5, 0.1), (0.0, 0.0), (0.1, 0.1)):
        layer.zoneout = shares
        one, two = (layer(x)[0] for _ in range(2))
        assert torch.equal(one, two)
        with generic_loop():
            torch.testing.assert_close(one, layer(x)[0], rtol=1e-4, atol=1e-5)
        found.append(one)
    assert torch.equal(found[0], found[3])
    assert not torch.isclose(found[0], found[1]).all()
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize(
    "options", [{}, {"recurrent_dropout": 0.5}, {"bidirectional": True}], ids=str
)
@pytest.mark.parametrize("shares", [1, 2])
@every_kind
def test_sequences_that_start_from_zero(
    name: str, shares: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of zeros are left out, as are those of gradients that are not needed."""
    if shares == 1 or not options.get("recurrent_dropout"):  # under noise threads share examples
        monkeypatch.setattr(native_layers, "shares_of_units", lambda *layout: shares)
    monkeypatch.setattr(native_layers, "rows_of_chunk", lambda rows, saved: 12)
    layer, x = randomised(LAYERS[name](7, 20, norm=LayerNorm(), **options)), torch.randn(9, 5, 7)
    zeros = tuple(torch.zeros_like(s) for s in initial_states(layer, 5))
    assert_generic(layer, x, zeros, training=True)
    gradients = []
    for states in (zeros, [s.clone().requires_grad_() for s in zeros]):
        torch.manual_seed(4)
        output, _ = layer(x, tuple(states) if len(states) > 1 else states[0])
        gradients.append(torch.autograd.grad(output.square().sum(), list(layer.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
