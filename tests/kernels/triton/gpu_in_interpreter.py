"""The engine for GPUs on the CPU, in triton's interpreter: run by `test_gpu_engine.py`.

The interpreter has to be chosen before triton is imported, and then holds for the whole process, so
these tests have one of their own. They are held against the equations (`equations.py`) in float64.
What the interpreter cannot show: launch options, races, and reads out of bounds as errors; memory
is therefore filled with NaN and lies between guards.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from accuracy import assert_as_accurate
from engines import names_of, note_kernels
from equations import label
from kernels.engine_case import (
    BATCH,
    BATCH_GRU,
    BATCH_LSTM,
    BATCH_RNN,
    BF16,
    BOTH,
    CARRIED,
    EACH_GATE,
    F32,
    F64,
    GIVEN,
    GRU,
    JOINT,
    JOINT_GRU,
    LSTM,
    NONE,
    OVER_BATCH,
    RNN,
    UNBIASED,
    Marked,
    as_float32,
    between_nans,
    by_engine,
    check,
    cotangents_of,
    given_for,
    noisy,
    operands,
    rows,
    with_given,
    with_gradients,
)
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, ReduceOps

from ln_zoo.kernels.cuda_graphs import graphs
from ln_zoo.kernels.triton import batch, kernels, steps
from ln_zoo.kernels.triton.engine import TritonEngine
from ln_zoo.layers import GRU as GRULayer
from ln_zoo.layers import LSTM as LSTMLayer
from ln_zoo.norms import BatchNorm
from ln_zoo.ops import chunks, registry
from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.recurrent_kernel import Recurrence
from ln_zoo.ops.registry import engine_named
from ln_zoo.ops.spec import Operands, Spec
from ln_zoo.ops.time_chunks import time_chunks, without_means

assert os.environ.get("TRITON_INTERPRET") == "1", "is run by test_gpu_engine.py"

ENGINE = engine_named("triton")
#: Modules in which the interpreter has its own functions of triton.
PATCHED: set[str] = set()
#: Values of the engine's constants, by module and name.
Limits = dict[str, Any]
#: Steps so few that programs are as many as the rows of a step, or not.
FEW: Limits = {"cuda_graphs.graphs.SHORTEST": 100}
PACKED: Limits = {"cuda_graphs.graphs.SHORTEST": 2}
#: Graphs of one and two steps; late reads, as where H is so large that registers are scarce.
SHORT: Limits = {"cuda_graphs.graphs.LENGTHS": (2, 1)}
LATE: Limits = {"triton.steps.EARLY_HIDDEN": 1}
#: Sums over rows by several programs, each several times over, with rows and columns left over.
SHARES: Limits = {
    "triton.steps.SHARES": 2,
    "triton.steps.TILE_ROWS": 2,
    "triton.steps.TILE_COLS": 4,
}
#: More rows of a batch than registers hold: tiles of 4, the last of which is not full.
MANY_ROWS: Limits = {
    "triton.batch.MAX_ROWS": 4,
    "triton.batch.MANY": batch.Tile(4, 4, True, 1),
} | PACKED


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Marked]:
    """All memory is NaN before it is written to, and what lies around it must not be touched."""
    memory = Marked()
    monkeypatch.setattr(steps, "empty", memory.empty)
    torch.use_deterministic_algorithms(True)  # fills what torch allocates with NaN
    yield memory
    torch.use_deterministic_algorithms(False)
    memory.check()


@pytest.fixture(autouse=True)
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter swaps triton's functions for a kernel, and again for each call within it.

    A second time in one module is half of all time, and changes nothing.
    """

    def call(self: InterpretedFunction, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module not in PATCHED:
            interpreter._patch_lang(self.fn)
            PATCHED.add(module)
        return self.rewrite()(*arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "__call__", call)


@pytest.fixture(autouse=True)
def reduced_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reduces tuples number by number; over a batch, whole rows can be taken."""
    by_number = ReduceOps.generic_reduce

    def reduce(self: ReduceOps, tiles: Sequence[Any]) -> Any:
        if self.axis != 0 or not self.keep_dims:
            return by_number(self, tiles)
        data = [tile.handle.data for tile in tiles]
        while (rows := data[0].shape[0]) > 1:
            halves = [self.to_tensor(a[: rows // 2], t.dtype) for a, t in zip(data, tiles)]  # noqa: B905
            halves += [self.to_tensor(a[rows // 2 :], t.dtype) for a, t in zip(data, tiles)]  # noqa: B905
            data = [a.handle.data for a in self.combine_fn.fn(*halves)]
        return tuple(self.to_tensor(a, t.dtype) for a, t in zip(data, tiles, strict=True))

    monkeypatch.setattr(ReduceOps, "generic_reduce", reduce)


def case(
    spec: Spec,
    hidden: int,
    sizes: list[int],
    noise: str | None = None,
    *,
    slowly: bool = False,
    reset: bool = True,
    chunk: int = 0,
    limits: Limits | None = None,
    **options: Any,
) -> Any:
    """A call of `check`, in chunks of ``chunk`` rows; noise comes with resets."""

    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (limits or {}).items():
            monkeypatch.setattr(f"ln_zoo.kernels.{name}", value)
        assert sizes[0] <= batch.MAX_ROWS or batch.tile(sizes[0]).many
        if chunk:
            monkeypatch.setattr(chunks, "time_chunks", lambda of, *_: time_chunks(of, chunk))
        with_noise, masks = spec, NO_MASKS
        if noise is not None:
            with_noise, masks = noisy(spec, noise, hidden, sizes, reset)
        check(with_noise, hidden, sizes, masks=masks, **options)

    name = f"{label(spec)}, {hidden}, {sizes}, {noise}, {[*(limits or ())]}, {options}"
    return pytest.param(run, marks=pytest.mark.slow if slowly else (), id=name)


RMS = {"input": rows(4, center=False), "recurrent": rows(4, center=False)}
#: Some places only, and RMS norm.
OTHERS = [
    replace(LSTM, **RMS, out=rows(1, center=False)),
    replace(LSTM, input=NONE, recurrent=NONE),
    replace(LSTM, input=NONE, out=NONE),
    replace(LSTM, recurrent=NONE, out=NONE),
    Spec("LSTM", NONE, NONE, NONE),
    replace(GRU, input=rows(2, 1, center=False), recurrent=rows(2, 1, center=False)),
    replace(GRU, input=NONE),
    replace(GRU, recurrent=NONE),
    Spec("RNN_RELU", NONE, NONE, rows(1, center=False)),
    Spec("RNN_TANH", NONE, NONE, NONE),
    # Other groups of gates than the paper's.
    Spec("LSTM", EACH_GATE, rows(2, 2, center=False), rows(1)),
    Spec("LSTM", rows(1, 3), rows(3, 1), NONE),
    Spec("LSTM", rows(1, 2, 1), rows(2, 1, 1), NONE),
    Spec("GRU", rows(3), rows(1, 2), NONE),
    Spec("GRU", rows(1, 1, 1), rows(2, 1, center=False), NONE),
    # Both terms at once, and cell states that are carried normalised.
    *(JOINT, CARRIED, JOINT_GRU),
    replace(BOTH, recurrent=EACH_GATE, out=rows(1, center=False)),
    replace(CARRIED, input=NONE, recurrent=NONE),
    replace(JOINT_GRU, recurrent=rows(2, 1, center=False)),
    replace(JOINT, recurrent=NONE, out=NONE),
    replace(JOINT_GRU, recurrent=NONE),
]
#: Unbiased and given statistics of batches, and some places only.
OTHERS_OVER_BATCH = [
    Spec("LSTM", UNBIASED, UNBIASED, UNBIASED),
    Spec("GRU", UNBIASED, UNBIASED, NONE),
    Spec("RNN_RELU", NONE, NONE, UNBIASED),
    Spec("LSTM", BATCH, NONE, NONE),
    Spec("LSTM", NONE, BATCH, NONE),
    Spec("LSTM", NONE, NONE, BATCH),
    Spec("GRU", NONE, BATCH, NONE),
    Spec("GRU", BATCH, NONE, NONE),
    *map(with_given, OVER_BATCH.values()),
    Spec("LSTM", BATCH, GIVEN, replace(BATCH, eps=0.1)),
    Spec("LSTM", GIVEN, UNBIASED, GIVEN),
    Spec("GRU", replace(GIVEN, eps=0.1), BATCH, NONE),
    Spec("GRU", NONE, GIVEN, NONE),
    Spec("RNN_RELU", NONE, NONE, GIVEN),
]
CASES = [
    *(case(spec, 5, [2] * 3) for spec in (LSTM, GRU)),
    *(case(RNN, 5, [1] * 17), case(GRU, 100, [2]), case(LSTM, 257, [2])),
    *(case(spec, 6, [1] * 2) for spec in OTHERS),
    *(case(spec, 100, [3] * 2, products=BF16) for spec in (LSTM, BOTH)),
    case(BATCH_LSTM, 20, [17] * 2, products=BF16),
    *(case(spec, 4, [1] * 2, without=("bias", "bias_hn")) for spec in (LSTM, GRU, RNN)),
    *(case(spec, 4, [3] * 2, without=("bias", "bias_hn")) for spec in OVER_BATCH.values()),
    # A GRU may have a shift at one place and no bias at all.
    *(case(GRU, 4, [1] * 2, without=(name,)) for name in ("bias", "bias_hn")),
    *(case(LSTM, 5, [2] * 3, "zoneout"), case(LSTM, 5, [2] * 3, "expected zoneout", reset=False)),
    *(case(GRU, 5, [2] * 3, noise) for noise in ("zoneout", "all")),
    *(case(RNN, 5, [2] * 3, noise) for noise in ("all", "")),
    case(Spec("LSTM", NONE, NONE, NONE), 5, [2] * 3, "zoneout"),
    case(Spec("LSTM", NONE, NONE, rows(1, center=False)), 4, [2] * 3, "all"),
    case(Spec("GRU", NONE, NONE, NONE), 6, [2] * 3, "all"),
    case(Spec("RNN_RELU", NONE, NONE, NONE), 5, [2] * 3, "all"),
    *(case(BATCH_LSTM, 5, [2] * 2), case(BATCH_LSTM, 1, [17] * 2)),
    case(BATCH_LSTM, 100, [3] * 2, slowly=True),
    *(case(BATCH_GRU, 5, [17] * 2), case(BATCH_RNN, 1, [130] * 2), case(BATCH_RNN, 70, [2] * 2)),
    *(case(spec, 5, [4] * 2) for spec in OTHERS_OVER_BATCH),
]


#: Cells, and whether steps are few.
FEW_OR_NOT = [(LSTM, PACKED), (LSTM, FEW), (GRU, FEW), (RNN, PACKED)]
WAYS = [
    # Joint and carried norms of packed sequences, in several chunks.
    *(case(spec, 5, [2, 2, 1], "all", chunk=3) for spec in (CARRIED, JOINT_GRU)),
    *(case(spec, 5, [2, 2, 1], "zoneout", chunk=3, limits=LATE) for spec in (CARRIED, BOTH)),
    *(case(LSTM, 5, [1] * 3, noise, limits=LATE) for noise in ("zoneout", "expected zoneout")),
    *(case(spec, 5, [2, 2, 1], limits=way) for spec, way in FEW_OR_NOT),
    # In several chunks, each of which begins with states that were reset or not.
    *(
        case(spec, 5, [2, 2, 2, 1, 1], "all", chunk=4, limits=way | SHORT)
        for spec, way in FEW_OR_NOT
    ),
    *(case(spec, 5, [5], limits=SHARES) for spec in (LSTM, GRU)),
    # Statistics over the batch, and given ones.
    *(
        case(spec, 5, [4, 4, 3, 2], chunk=8, limits=way | SHORT)
        for spec, way in ((BATCH_LSTM, PACKED), (BATCH_GRU, FEW), (BATCH_RNN, PACKED))
    ),
    *(case(with_given(spec), 5, [3, 2, 1], limits=PACKED) for spec in (BATCH_LSTM, BATCH_GRU)),
    case(BATCH_LSTM, 5, [11, 6], limits=MANY_ROWS),
    case(BATCH_GRU, 5, [6] * 2, limits=MANY_ROWS),
    case(BATCH_RNN, 5, [11, 7, 3], limits=MANY_ROWS),
    *(
        case(Spec("LSTM", *places), 5, [11] * 2, slowly=True, limits=MANY_ROWS)
        for places in ((BATCH, GIVEN, NONE), (GIVEN, BATCH, GIVEN))
    ),
    *(
        case(with_given(spec), 5, [11] * 2, limits={"triton.batch.SHARED_ROWS": 4})
        for spec in OVER_BATCH.values()
    ),
]


@pytest.mark.parametrize("run", [*CASES, *WAYS])
def test_against_the_equations(
    run: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch)


def test_programs_of_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as many as rows, rounded up, for the largest step of a piece."""
    launched = []
    launch = steps.Steps._launch

    def counted(self: steps.Steps, buffers: Any, run: Sequence[tuple[int, int]]) -> None:
        launched.append(list(run))
        launch(self, buffers, run)

    monkeypatch.setattr(steps.Steps, "_launch", counted)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    check(RNN, 2, [9, 8, 8, 2, 1])
    forward = [[(0, 16), (1, 16)], [(0, 8), (1, 8)], [(0, 8)]]
    assert launched[:3] == forward
    assert launched[3:6] == [list(reversed(piece)) for piece in reversed(forward)]


def test_a_state_that_is_reset_or_stays_is_exact() -> None:
    """No NaN of the states before passes a reset, and zoneout keeps each bit."""
    sizes = [2, 2]
    o = as_float32(operands(LSTM, 5, sizes))
    with torch.no_grad():
        o.h0.fill_(float("nan"))
        o.c0.fill_(float("inf"))  # type: ignore[union-attr]
    reset = torch.tensor([True, True, False, False])
    out, h, c = by_engine(LSTM, o, sizes, masks=NO_MASKS._replace(reset=reset))
    assert all(a.isfinite().all() for a in (out, h, c))
    stays = torch.ones(4, 5, dtype=torch.bool)
    held = operands(LSTM, 5, sizes)
    _, h, c = by_engine(LSTM, as_float32(held), sizes, masks=Masks(None, stays, stays))
    assert torch.equal(h, held.h0.float())
    assert torch.equal(c, held.c0.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("spec", [LSTM, GRU, RNN, *OVER_BATCH.values()], ids=label)
def test_inference_gives_the_same_numbers(spec: Spec) -> None:
    sizes = [3, 3, 2] if spec.examples else [2, 1]
    o = as_float32(operands(spec, 5, sizes))
    statistics: tuple[dict[str, Tensor], ...] = ({}, {})
    kept, not_kept = (
        by_engine(spec, o, sizes, save=save, found=found)
        for save, found in zip((True, False), statistics, strict=True)
    )
    assert all(map(torch.equal, kept, not_kept))
    assert all(map(torch.equal, *(found.values() for found in statistics)))


def test_the_engines_memory_is_guarded(guarded: Marked) -> None:
    with_gradients(by_engine, GRU, as_float32(operands(GRU, 3, [1])), [1])
    assert len(guarded.made) > 10


def test_one_unit() -> None:
    """Layer norm of one number is 0, up to rounding, and never a division by zero."""
    for spec in (LSTM, GRU, CARRIED):
        sizes = [1, 1]
        found = with_gradients(by_engine, spec, as_float32(operands(spec, 1, sizes)), sizes)
        assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("spec", [LSTM, BATCH_LSTM, BATCH_GRU], ids=label)
def test_gradients_that_nobody_wants(spec: Spec) -> None:
    """What is not asked for does not change the others; sums over rows have memory of their own."""
    sizes = [3] if spec.examples else [1]
    o = as_float32(operands(spec, 5, sizes))
    all_of_them = with_gradients(by_engine, spec, o, sizes)
    there = [name for name in Operands._fields if getattr(o, name) is not None]
    for name in there[:: 3 if spec.examples else 1]:
        alone = Operands(*(None if b is None else b.detach() for b in o))
        results = by_engine(spec, alone._replace(**{name: getattr(o, name)}), sizes)
        (found,) = torch.autograd.grad(results, [getattr(o, name)], cotangents_of(results))
        assert torch.equal(found, all_of_them[f"d {name}"])


def test_the_output_alone_may_have_no_gradient() -> None:
    """Only the final states are used: there is no gradient of the outputs at all."""
    for spec in (LSTM, GRU, RNN):
        o = as_float32(operands(spec, 5, [1, 1]))
        results = by_engine(spec, o, [1, 1])
        *others, last = (torch.randn_like(r) for r in results)
        grads = [*map(torch.zeros_like, others), last]
        inputs = [o.x, o.w_hh, o.h0]
        wanted = torch.autograd.grad(results, inputs, grads, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(results[-1], inputs, last), wanted)


@pytest.mark.parametrize("layer", [LSTMLayer, GRULayer])
def test_layers(layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(TritonEngine, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(TritonEngine, "device", "cpu")
    monkeypatch.setattr(registry, "KERNELS", [Recurrence(ENGINE)])
    ran = note_kernels(monkeypatch)
    made = layer(3, 5, norm=BatchNorm(eps=0.1, max_steps=3), dtype=F64)
    sequences = [torch.randn(n, 3, dtype=F64) for n in (5, 3, 3)]

    def everything(kernels: str, dtype: torch.dtype) -> dict[str, Tensor]:
        monkeypatch.setenv("LN_ZOO_KERNELS", kernels)
        twin = layer(3, 5, norm=BatchNorm(eps=0.1, max_steps=3), dtype=dtype)
        twin.load_state_dict(made.state_dict())
        found = {}
        for mode in (True, False):
            out, _ = twin.train(mode)(pack_sequence([a.to(dtype) for a in sequences]))
            out.data.square().sum().backward()
            found[f"out {mode}"] = out.data
        found |= {f"d {name}": p.grad for name, p in twin.named_parameters()}
        return found | {n: b for n, b in twin.named_buffers() if b.is_floating_point()}

    found = everything("triton", F32)
    assert names_of(ran) == ["triton"] * 2
    assert_as_accurate(found, everything("0", F64), lambda k: everything("0", F32))


@pytest.mark.parametrize("sizes", [[4, 4], [40, 17, 2, 2]])
@pytest.mark.parametrize("width", [1, 70])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_less_means(sizes: list[int], width: int, dtype: torch.dtype) -> None:
    spec = Spec("GRU", NONE, BATCH, NONE)
    p = ENGINE.prepare(spec, as_float32(operands(spec, 2, [2])), backward=False)
    a = torch.randn(sum(sizes), width, dtype=F64).to(dtype)
    exact, exact_means = without_means(a.double(), sizes, F64)
    rows, means = p.without_means(between_nans(a), sizes, F32)
    assert (rows.dtype, means.dtype) == (dtype, F32)
    torch.testing.assert_close(means.double(), exact_means, rtol=0, atol=1e-6)
    # Rounded once.
    tolerance = torch.finfo(dtype).eps * 4
    torch.testing.assert_close(rows.double(), exact, rtol=tolerance / 4, atol=4e-7)
    same = between_nans(a)
    assert p.without_means(same, sizes, F32, out=same)[0] is same
    assert torch.equal(same, rows)


# Recorded graphs (`conftest.py`)


@pytest.mark.parametrize(
    ("spec", "sizes", "noise"),
    [
        (GRU, [2, 1, 1], False),
        pytest.param(LSTM, [3, 3, 2, 1], True, marks=pytest.mark.slow),
        pytest.param(BATCH_GRU, [4, 3, 3, 2, 2], False, marks=pytest.mark.slow),
        (Spec("RNN_TANH", NONE, NONE, GIVEN), [2] * 5, False),
    ],
    ids=["packed", "noise", "over batches", "given statistics"],
)
def test_graphs_give_the_same_numbers(
    spec: Spec, sizes: list[int], noise: bool, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other tensors at other places, for statistics of later steps, and with two forwards
    before a backward."""
    spec, masks = noisy(spec, "all" if noise else "", 4, sizes, reset=noise)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    given = given_for(spec, 4, rows=len(sizes))
    run = functools.partial(by_engine, masks=masks, given=given)

    def everything(o: Operands) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        return with_gradients(functools.partial(run, found=found), spec, o, sizes) | found

    inputs = [as_float32(operands(spec, 4, sizes, seed=seed)) for seed in range(2)]
    wanted = [everything(o) for o in inputs]
    assert recorded.replays == 0
    monkeypatch.setattr(steps, "may_replay", lambda a: True)
    everything(inputs[0])
    assert recorded.replays == 0  # nothing is recorded for what comes but once
    for o, numbers in zip(inputs, wanted, strict=True):
        found = everything(o)
        assert all(torch.equal(found[name], numbers[name]) for name in numbers)
    assert recorded.replays > 0

    results = [run(spec, o, sizes) for o in inputs]
    for o, outputs, numbers in reversed(list(zip(inputs, results, wanted, strict=True))):
        (d,) = torch.autograd.grad(outputs, [o.w_hh], cotangents_of(outputs))
        assert torch.equal(d, numbers["d w_hh"])


@triton.jit
def apply(x, tanh, sigmoid, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    a = tl.load(x + at, mask=mask)
    tl.store(tanh + at, kernels._tanh(a), mask=mask)
    tl.store(sigmoid + at, kernels._sigmoid(a), mask=mask)


def test_small_and_large_numbers_keep_their_digits() -> None:
    magnitudes = torch.logspace(-30, 1.9, 2000, dtype=F64).to(F32)
    x = torch.cat([-magnitudes, torch.zeros(1), magnitudes, torch.tensor([float("inf")])])
    x = torch.cat([x, -x[-1:]])
    tanh, sigmoid = steps.empty(x.shape, x), steps.empty(x.shape, x)
    apply[(triton.cdiv(len(x), 256),)](x, tanh, sigmoid, len(x), BLOCK=256)
    for found, function in ((tanh, torch.tanh), (sigmoid, torch.sigmoid)):
        wanted = function(x.double())
        error = (found.double() - wanted).abs() / wanted.abs().clamp_min(1e-35)
        assert error.max() <= 1e-6
    assert tanh[-2:].tolist() == [1.0, -1.0]
    x = torch.tensor([float("nan")])
    apply[(1,)](x, tanh, sigmoid, 1, BLOCK=16)
    assert tanh[0].isnan()
    assert sigmoid[0].isnan()
