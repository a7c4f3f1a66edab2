"""The engine for GPUs on the CPU, in triton's interpreter: run by `test_gpu_engine.py`.

The interpreter has to be chosen before triton is imported, and then holds for the whole process, so
these tests have one of their own. They are held against the equations (`equations.py`) in float64.
What the interpreter cannot show: launch options, races, and reads out of bounds as errors; memory
is therefore filled with NaN and lies between guards.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from accuracy import assert_as_accurate
from equations import equations, masks_for
from ops.engine_case import GUARD, as_float32, between_nans, operands, shifted, with_gradients
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from ln_zoo.ops import operator
from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.engines.triton import graphs, kernels, steps
from ln_zoo.ops.registry import engine_named
from ln_zoo.ops.spec import Operands, Rows, Spec
from ln_zoo.ops.time_chunks import time_chunks

assert os.environ.get("TRITON_INTERPRET") == "1", "is run by test_gpu_engine.py"

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
ENGINE = engine_named("triton")
#: Means and variances over examples: none.
NO_STATISTICS = (None, None, None)
MARK = 12345.0
#: Modules in which the interpreter has its own functions of triton.
PATCHED: set[str] = set()

Allocations = list[tuple[Tensor, int]]


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocations]:
    """All memory is NaN before it is written to, and what lies around it must not be touched."""
    made: Allocations = []

    def empty(size: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or like.dtype
        count = torch.Size(size).numel()
        memory = torch.full((count + 2 * GUARD,), MARK).to(dtype)
        inner = memory[GUARD : GUARD + count]
        inner.fill_(-1 if dtype == torch.int64 else float("nan"))
        made.append((memory, count))
        return inner.view(size)

    monkeypatch.setattr(steps, "empty", empty)
    torch.use_deterministic_algorithms(True)  # fills what torch allocates with NaN
    yield made
    torch.use_deterministic_algorithms(False)
    for memory, count in made:
        around = torch.cat([memory[:GUARD], memory[GUARD + count :]])
        assert torch.equal(around, torch.full_like(around, torch.tensor(MARK).to(memory.dtype)))


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


def rows(*groups: int, center: bool = True) -> Rows:
    return Rows(True, center, 1e-3, groups)


NONE = Rows()
LSTM = Spec("LSTM", rows(4), rows(4), rows(1))
GRU = Spec("GRU", rows(2, 1), rows(2, 1), NONE)
RNN = Spec("RNN_TANH", NONE, NONE, rows(1))


def by_equations(
    spec: Spec, o: Operands, sizes: Sequence[int], masks: Masks = NO_MASKS
) -> tuple[Tensor, ...]:
    return equations(spec, o, masks, sizes)


def by_loop(
    spec: Spec, o: Operands, sizes: Sequence[int], masks: Masks = NO_MASKS
) -> tuple[Tensor, ...]:
    return operator.replay(spec, o, torch.tensor(sizes), masks=masks)


def by_engine(
    spec: Spec,
    o: Operands,
    sizes: Sequence[int],
    save: bool = True,
    masks: Masks = NO_MASKS,
) -> tuple[Tensor, ...]:
    results = torch.ops.ln_zoo.recurrence(
        *o, *NO_STATISTICS, *masks, torch.tensor(sizes), spec.encode(), ENGINE.name, save
    )
    return results[:3] if spec.cell == "LSTM" else results[:2]


def check(
    spec: Spec,
    hidden: int,
    sizes: Sequence[int],
    products: torch.dtype = F32,
    bias: bool = True,
    masks: Masks = NO_MASKS,
) -> None:
    exact = operands(spec, hidden, sizes)
    if not bias:
        exact = exact._replace(bias=None, bias_hn=None)
    narrow = as_float32(exact, products)
    if products != F32:  # what is compared is the engine, not the rounding of what it is given
        exact = Operands(*(None if a is None else a.detach().double() for a in narrow))
    wide = Operands(*(None if a is None else a.clone().requires_grad_() for a in exact))
    by_definition = functools.partial(by_equations, masks=masks)
    wanted = with_gradients(by_definition, spec, wide, sizes, seed=1)
    given = Masks(*(None if a is None else between_nans(a) for a in masks))
    by_it = functools.partial(by_engine, masks=given)
    found = with_gradients(by_it, spec, narrow, sizes, seed=1)

    def loop(k: int) -> dict[str, Tensor]:
        run = functools.partial(by_loop, masks=masks)
        with torch.autocast("cpu", products, enabled=products != F32):
            return with_gradients(run, spec, as_float32(shifted(exact, k)), sizes, seed=1)

    assert_as_accurate(found, wanted, loop)


@pytest.mark.parametrize(
    ("spec", "hidden", "examples", "length"),
    [(LSTM, 5, 2, 3), (GRU, 5, 2, 3), (RNN, 5, 1, 17), (GRU, 100, 2, 1), (LSTM, 257, 2, 1)],
)
def test_layer_norm(spec: Spec, hidden: int, examples: int, length: int) -> None:
    check(spec, hidden, [examples] * length)


RMS = {"input": rows(4, center=False), "recurrent": rows(4, center=False)}


@pytest.mark.parametrize(
    "spec",
    [
        replace(LSTM, **RMS, out=rows(1, center=False)),
        replace(LSTM, input=NONE, recurrent=NONE),
        replace(LSTM, input=NONE, out=NONE),
        replace(LSTM, recurrent=NONE, out=NONE),
        Spec("LSTM", NONE, NONE, NONE),
        replace(GRU, input=rows(2, 1, center=False), recurrent=rows(2, 1, center=False)),
        replace(GRU, input=NONE),
        replace(GRU, recurrent=NONE),
        RNN,
        Spec("RNN_RELU", NONE, NONE, rows(1, center=False)),
        Spec("RNN_TANH", NONE, NONE, NONE),
    ],
    ids=Spec.encode,
)
def test_other_normalisations(spec: Spec) -> None:
    check(spec, 6, [2] * 2)


@pytest.mark.parametrize("spec", [LSTM, GRU, RNN], ids=["LSTM", "GRU", "RNN"])
def test_no_bias(spec: Spec) -> None:
    check(spec, 4, [1] * 2, bias=False)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("LSTM", rows(1, 1, 1, 1), rows(2, 2, center=False), rows(1)),
        Spec("LSTM", rows(1, 3), rows(3, 1), NONE),
        Spec("LSTM", rows(1, 2, 1), rows(2, 1, 1), NONE),
        Spec("GRU", rows(3), rows(1, 2), NONE),
        Spec("GRU", rows(1, 1, 1), rows(2, 1, center=False), NONE),
    ],
    ids=Spec.encode,
)
def test_other_groups_of_statistics(spec: Spec) -> None:
    check(spec, 16, [1] * 2)


JOINT = Spec("LSTM", NONE, rows(4), rows(1), joint=True)
CARRIED = replace(LSTM, carried=True)
BOTH = replace(JOINT, carried=True)
JOINT_GRU = Spec("GRU", NONE, rows(3), NONE, joint=True)


@pytest.mark.parametrize(
    "spec",
    [
        JOINT,
        CARRIED,
        JOINT_GRU,
        replace(BOTH, recurrent=rows(1, 1, 1, 1), out=rows(1, center=False)),
        replace(CARRIED, input=NONE, recurrent=NONE),
        replace(JOINT_GRU, recurrent=rows(2, 1, center=False)),
        replace(JOINT, recurrent=NONE, out=NONE),
        replace(JOINT_GRU, recurrent=NONE),
    ],
    ids=Spec.encode,
)
def test_joint_and_carried_norms(spec: Spec) -> None:
    check(spec, 6, [1] * 3)


@pytest.mark.parametrize(
    ("spec", "early"),
    [(CARRIED, True), (CARRIED, False), (BOTH, False), (JOINT_GRU, True)],
    ids=lambda a: a.encode() if isinstance(a, Spec) else str(a),
)
def test_noise_and_resets_of_joint_and_carried_norms(
    spec: Spec, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packed sequences, in several chunks; with early and with late reads."""
    monkeypatch.setattr(steps, "EARLY_HIDDEN", 100 if early else 1)
    monkeypatch.setattr(operator, "time_chunks", lambda sizes, *_: time_chunks(sizes, 3))
    sizes = [2, 2, 1]
    noise = "all" if early else "zoneout"
    spec, masks = noisy(spec, noise, 5, sizes, reset=True)
    check(spec, 5, sizes, masks=masks)


def test_joint_and_carried_norms_in_bfloat16() -> None:
    check(BOTH, 100, [3] * 2, products=BF16)


#: Cells, and whether steps are so few that programs are as many as the rows of a step.
FEW_OR_NOT = [(LSTM, False), (LSTM, True), (GRU, True), (RNN, False)]


@pytest.mark.parametrize(("spec", "few"), FEW_OR_NOT)
def test_sequences_of_different_lengths(
    spec: Spec, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs for more than the rows of a step, and, where steps are few, with as many."""
    monkeypatch.setattr(graphs, "SHORTEST", 100 if few else 2)
    check(spec, 5, [2, 2, 1])


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


def noisy(
    spec: Spec, noise: str, hidden: int, sizes: Sequence[int], reset: bool
) -> tuple[Spec, Masks]:
    """Masks of packed rows; of 3 rows 1 is reset, among them 2 in turn."""
    masks = NO_MASKS
    if noise:
        spec, masks = masks_for(spec, noise, (sum(sizes),), sizes[0], hidden)
    if reset:
        flags = torch.arange(sum(sizes)) % 3 == 1
        flags[sizes[0] + 1] = flags[2 * sizes[0]] = True
        masks = masks._replace(reset=flags)
    return spec, masks


@pytest.mark.parametrize(
    ("spec", "noise", "reset"),
    [
        *((LSTM, "zoneout", True), (LSTM, "expected zoneout", False), (GRU, "all", True)),
        *((GRU, "zoneout", True), (RNN, "all", True), (RNN, "", True)),
    ],
)
def test_noise_and_resets(spec: Spec, noise: str, reset: bool) -> None:
    sizes = [2] * 3
    spec, masks = noisy(spec, noise, 5, sizes, reset)
    check(spec, 5, sizes, masks=masks)


@pytest.mark.parametrize(
    ("spec", "noise", "hidden"),
    [
        (Spec("LSTM", NONE, NONE, NONE), "zoneout", 5),
        (Spec("LSTM", NONE, NONE, rows(1, center=False)), "all", 4),
        (Spec("GRU", NONE, NONE, NONE), "all", 6),
        (Spec("RNN_RELU", NONE, NONE, NONE), "all", 5),
    ],
    ids=lambda a: a.encode() if isinstance(a, Spec) else str(a),
)
def test_noise_without_norms_and_in_other_sizes(spec: Spec, noise: str, hidden: int) -> None:
    sizes = [2] * 3
    spec, masks = noisy(spec, noise, hidden, sizes, reset=True)
    check(spec, hidden, sizes, masks=masks)


def test_late_reads_of_gates_under_zoneout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where H is so large that registers are scarce."""
    monkeypatch.setattr(steps, "EARLY_HIDDEN", 1)
    sizes = [1] * 3
    for noise in ("zoneout", "expected zoneout"):
        spec, masks = noisy(LSTM, noise, 5, sizes, reset=True)
        check(spec, 5, sizes, masks=masks)


@pytest.mark.parametrize(("spec", "few"), FEW_OR_NOT)
def test_noise_and_resets_of_packed_sequences(
    spec: Spec, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several chunks, each of which begins with states that were reset or not."""
    monkeypatch.setattr(graphs, "SHORTEST", 100 if few else 2)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    monkeypatch.setattr(operator, "time_chunks", lambda sizes, *_: time_chunks(sizes, 4))
    sizes = [2, 2, 2, 1, 1]
    spec, masks = noisy(spec, "all", 5, sizes, reset=True)
    check(spec, 5, sizes, masks=masks)


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


def test_bfloat16() -> None:
    check(LSTM, 100, [3] * 2, products=BF16)


def test_many_rows_are_summed_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """By several programs, each several times over, with rows and columns left over."""
    monkeypatch.setattr(steps, "SHARES", 2)
    monkeypatch.setattr(steps, "TILE_ROWS", 2)
    monkeypatch.setattr(steps, "TILE_COLS", 4)
    check(LSTM, 5, [5])
    check(GRU, 5, [5])


@pytest.mark.parametrize("name", ["bias", "bias_hn"])
def test_biases_of_one_term_only(name: str) -> None:
    """A GRU may have a shift at one place and no bias at all."""
    exact = operands(GRU, 4, [2, 2])._replace(**{name: None})
    wide = Operands(*(None if a is None else a.clone().requires_grad_() for a in exact))
    wanted = with_gradients(by_equations, GRU, wide, [2, 2], seed=1)
    found = with_gradients(by_engine, GRU, as_float32(exact), [2, 2], seed=1)

    def loop(k: int) -> dict[str, Tensor]:
        return with_gradients(by_loop, GRU, as_float32(shifted(exact, k)), [2, 2], seed=1)

    assert_as_accurate(found, wanted, loop)


def test_inference_gives_the_same_numbers() -> None:
    sizes = [2, 1]
    for spec in (LSTM, GRU, RNN):
        o = as_float32(operands(spec, 5, sizes))
        kept, not_kept = (by_engine(spec, o, sizes, save=save) for save in (True, False))
        assert all(torch.equal(a, b) for a, b in zip(kept, not_kept, strict=True))


def test_the_engines_memory_is_guarded(guarded: Allocations) -> None:
    with_gradients(by_engine, GRU, as_float32(operands(GRU, 3, [1])), [1], seed=1)
    assert len(guarded) > 10


def test_one_unit() -> None:
    """Layer norm of one number is 0, up to rounding, and never a division by zero."""
    for spec in (LSTM, GRU, CARRIED):
        sizes = [1, 1]
        found = with_gradients(by_engine, spec, as_float32(operands(spec, 1, sizes)), sizes, seed=1)
        assert all(value.isfinite().all() for value in found.values())


def test_gradients_that_nobody_wants() -> None:
    sizes = [1]
    o = as_float32(operands(LSTM, 5, sizes))
    all_of_them = with_gradients(by_engine, LSTM, o, sizes, seed=1)
    for name, a in zip(Operands._fields, o, strict=True):
        if a is None:
            continue
        alone = Operands(*(None if b is None else b.detach() for b in o))
        alone = alone._replace(**{name: a})
        results = by_engine(LSTM, alone, sizes)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(r.shape, dtype=F64, generator=generator).to(r.dtype) for r in results]
        (found,) = torch.autograd.grad(results, [a], grads)
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


# Recorded graphs (`conftest.py`)


@pytest.mark.parametrize(
    ("spec", "sizes", "noise"),
    [
        (GRU, [2, 1, 1], False),
        pytest.param(LSTM, [3, 3, 2, 1], True, marks=pytest.mark.slow),
    ],
    ids=["packed", "noise"],
)
def test_graphs_give_the_same_numbers(
    spec: Spec, sizes: list[int], noise: bool, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other tensors at other places, and with two forwards before a backward."""
    spec, masks = noisy(spec, "all" if noise else "", 4, sizes, reset=noise)
    run = functools.partial(by_engine, masks=masks)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    inputs = [as_float32(operands(spec, 4, sizes, seed=seed)) for seed in range(2)]
    wanted = [with_gradients(run, spec, o, sizes, seed=1) for o in inputs]
    assert recorded.replays == 0
    monkeypatch.setattr(steps, "may_replay", lambda a: True)
    with_gradients(run, spec, inputs[0], sizes, seed=1)
    assert recorded.replays == 0  # nothing is recorded for what comes but once
    for o, numbers in zip(inputs, wanted, strict=True):
        found = with_gradients(run, spec, o, sizes, seed=1)
        assert all(torch.equal(found[name], numbers[name]) for name in numbers)
    assert recorded.replays > 0

    results = [run(spec, o, sizes) for o in inputs]
    for o, outputs, numbers in reversed(list(zip(inputs, results, wanted, strict=True))):
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(r.shape, dtype=F64, generator=generator).to(r.dtype) for r in outputs]
        (found,) = torch.autograd.grad(outputs, [o.w_hh], grads)
        assert torch.equal(found, numbers["d w_hh"])


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
