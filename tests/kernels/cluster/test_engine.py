"""The persistent kernels of the cluster engine, emulated on the CPU, against the equations.

The emulation delivers messages and copies early or late at random, so a wait that is missing shows
up. References are in float64; tolerances come from the generic loop in float32.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from equations import label, masks_for
from kernels.cluster.emulation import Emulated, emulate, missing
from kernels.engine_case import (
    BATCH,
    BATCH_GRU,
    BATCH_LSTM,
    BATCH_RNN,
    BF16,
    BOTH,
    CARRIED,
    EACH_GATE,
    F16,
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
    as_float32,
    by_engine,
    check,
    noisy,
    operands,
    rows,
    with_given,
    with_gradients,
)

from ln_zoo.kernels.cluster import choice, driver, engine, geometry, persistent
from ln_zoo.kernels.cluster.geometry import CELLS, SHARED_LIMIT, BatchLayout, Layout, Problem
from ln_zoo.ops import chunks
from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.spec import Operands, Spec
from ln_zoo.ops.time_chunks import time_chunks, without_means

emulated = pytest.mark.skipif(missing() is not None, reason=str(missing()))
needs_nvrtc = pytest.mark.skipif(
    driver.missing_compiler() is not None, reason=str(driver.missing_compiler())
)
slow = pytest.mark.slow
#: Blocks, units, rows, and warps over outputs and over what is contracted, forward and backward.
Shape = tuple[int, int, int, tuple[int, int], tuple[int, int]]
FOUR: Shape = (2, 16, 4, (2, 2), (2, 1))
EIGHT: Shape = (3, 12, 8, (3, 1), (2, 2))
ALONE: Shape = (1, 32, 8, (2, 2), (2, 1))
#: The same over batches: two quads of units, four parts of the rows; three quads, two parts, idle
#: warps; one block.
BATCH_EIGHT: Shape = (2, 8, 8, (2, 1), (1, 1))
BATCH_TWELVE: Shape = (3, 12, 8, (1, 3), (2, 2))
BATCH_ALONE: Shape = (1, 32, 8, (2, 2), (2, 2))

PLAIN = {cell: Spec(cell, NONE, NONE, NONE) for cell in CELLS}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Emulated]:
    """The engine launches emulated kernels; those that it made are listed."""
    made: list[Emulated] = []

    def load(*arguments: Any) -> Emulated:
        made.append(emulate(*arguments))
        return made[-1]

    monkeypatch.setattr(persistent, "load_kernel", load)
    monkeypatch.setattr(persistent, "stream_of", lambda device: 0)
    monkeypatch.setattr(persistent, "on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(persistent, "resident_clusters", lambda device: choice.RESIDENT)
    persistent.compiled.cache_clear()
    persistent.kernel_of.cache_clear()
    return made


def use(shape: Shape, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine choose this layout, with ``tiles`` tiles in registers."""
    *sizes, forward, backward = shape

    def layouts(problem: Problem, is_backward: bool, examples: int, *_: Any) -> list[Layout]:
        fixed = (problem, is_backward, *sizes, *(backward if is_backward else forward), 0, 0)
        layout = BatchLayout(*fixed, -(-examples // 8)) if problem.batch else Layout(*fixed)
        return [choice.with_tiles(layout, tiles)]

    monkeypatch.setattr(persistent, "layouts", layouts)


def by_cluster(spec: Spec, hidden: int, sizes: Sequence[int], **options: Any) -> None:
    check(spec, hidden, sizes, engine="cluster", **options)


def all_masks(spec: Spec, hidden: int, sizes: Sequence[int]) -> Masks:
    """Recurrent dropout, zoneout of all states, and resets."""
    _, dropout = masks_for(spec, "recurrent dropout", (sum(sizes),), sizes[0], hidden)
    _, masks = noisy(spec, "zoneout", hidden, sizes, reset=True)
    return masks._replace(dropout=dropout.dropout)


def case(
    spec: Spec,
    shape: Shape,
    tiles: int,
    *calls: list[int],
    hidden: int = 29,
    masked: bool = False,
    slowly: bool = False,
    chunk: int = 0,
    **options: Any,
) -> Any:
    """Calls of one layout, given as the examples of each step; options are those of `check`.

    ``chunk``: rows of a chunk.
    """

    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        use(shape, tiles, monkeypatch)
        if chunk:
            monkeypatch.setattr(chunks, "time_chunks", lambda of, *_: time_chunks(of, chunk))
        for sizes in calls:
            masks = all_masks(spec, hidden, sizes) if masked else NO_MASKS
            by_cluster(spec, hidden, sizes, masks=masks, **options)

    name = f"{label(spec)}, {shape}, {tiles}, {options}"
    return pytest.param(run, marks=slow if slowly else (), id=name)


PACKED = [5, 5, 4, 2, 1]
CASES = [
    *(case(spec, FOUR, 3, [6, *PACKED], [5, 5, 5, 4], masked=True) for spec in (LSTM, GRU, RNN)),
    *(case(spec, EIGHT, 2, [9] * 4, [1], slowly=spec is RNN) for spec in (LSTM, GRU, RNN)),
    *(case(spec, FOUR, 99, [6] * 4, slowly=spec.cell != "RNN_TANH") for spec in PLAIN.values()),
    # Rows of an odd number of values are copied one by one.
    case(LSTM, ALONE, 1, [9] * 4, products=BF16, masked=True),
    case(GRU, ALONE, 1, [9] * 4, products=F16, masked=True, hidden=32),
    # Some places, and expected zoneout.
    case(Spec("LSTM", rows(4, center=False), NONE, NONE), EIGHT, 4, [5] * 4),
    case(Spec("LSTM", NONE, rows(4), rows(1, center=False)), EIGHT, 4, [5] * 4),
    case(Spec("LSTM", NONE, NONE, rows(1), (0.2, 0.1)), EIGHT, 4, [5] * 4),
    case(Spec("GRU", NONE, rows(2, 1, center=False), NONE), EIGHT, 4, [5] * 4, slowly=True),
    # Both terms at once, and cell states that are carried normalised.
    case(CARRIED, FOUR, 3, [5] * 4),
    case(replace(BOTH, recurrent=EACH_GATE), FOUR, 3, PACKED, masked=True),
    case(JOINT_GRU, FOUR, 3, PACKED, masked=True),
    case(BOTH, ALONE, 3, [5] * 4, products=BF16, slowly=True),
    case(BOTH, ALONE, 3, PACKED, products=F16, masked=True, slowly=True),
    case(replace(JOINT_GRU, recurrent=NONE), FOUR, 3, PACKED, masked=True, slowly=True),
    case(replace(JOINT, recurrent=NONE, out=NONE), FOUR, 3, PACKED, masked=True, slowly=True),
    case(replace(CARRIED, out=rows(1, center=False)), FOUR, 3, PACKED, masked=True, slowly=True),
    # Other groups of gates than the paper's.
    case(Spec("LSTM", EACH_GATE, EACH_GATE, rows(1)), FOUR, 3, PACKED, masked=True),
    case(Spec("GRU", rows(3), rows(3), NONE), FOUR, 3, [5] * 4, slowly=True),
    case(Spec("GRU", *(rows(1, 1, 1),) * 2, NONE), FOUR, 3, PACKED, masked=True, slowly=True),
    # Statistics over the batch.
    *(case(spec, BATCH_EIGHT, 2, [35] * 3, hidden=13) for spec in OVER_BATCH.values()),
    *(
        case(spec, BATCH_EIGHT, 2, [2], hidden=13, without=("bias", "bias_hn"))
        for spec in OVER_BATCH.values()
    ),
    *(
        case(with_given(spec), BATCH_EIGHT, 0, [9, 9, 3, 1], hidden=13)
        for spec in OVER_BATCH.values()
    ),
    case(Spec("LSTM", UNBIASED, UNBIASED, UNBIASED), BATCH_ALONE, 2, [11] * 2),
    case(Spec("LSTM", NONE, NONE, BATCH), BATCH_ALONE, 2, [11] * 2),
    case(Spec("LSTM", BATCH, NONE, NONE), BATCH_ALONE, 2, [11] * 2),
    case(Spec("LSTM", NONE, BATCH, NONE), BATCH_ALONE, 2, [11] * 2, slowly=True),
    case(Spec("GRU", UNBIASED, UNBIASED, NONE), BATCH_ALONE, 2, [11] * 2, slowly=True),
    case(Spec("GRU", NONE, replace(BATCH, eps=0.1), NONE), BATCH_ALONE, 2, [11] * 2, slowly=True),
    case(Spec("GRU", BATCH, NONE, NONE), BATCH_ALONE, 2, [11] * 2),
    *(
        case(spec, BATCH_TWELVE, 1, [19, 19, 17, 8, 2], chunk=30, slowly=spec is BATCH_RNN)
        for spec in OVER_BATCH.values()
    ),
    case(BATCH_LSTM, BATCH_EIGHT, 1, [17] * 2, products=BF16, hidden=13),
    case(BATCH_GRU, BATCH_EIGHT, 1, [17] * 2, products=F16, hidden=13),
]


@emulated
@pytest.mark.parametrize("run", CASES)
def test_against_the_equations(
    run: Callable[[pytest.MonkeyPatch], None],
    on_cpu: list[Emulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(monkeypatch)


@emulated
def test_long_sequences_are_cut(on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch) -> None:
    use(FOUR, 3, monkeypatch)
    monkeypatch.setattr(persistent, "CHUNK_BYTES", 2 * 6 * 4 * 29 * 4)
    by_cluster(LSTM, 29, [6] * 5)
    sizes = [6, *PACKED]
    by_cluster(LSTM, 29, sizes, masks=all_masks(LSTM, 29, sizes))


@emulated
def test_the_chosen_layout(on_cpu: list[Emulated]) -> None:
    by_cluster(LSTM, 100, [3] * 2)
    by_cluster(BATCH_LSTM, 20, [40] * 2)


@emulated
def test_zero_gradients_leave_scales_alone(
    on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest gradient of a row may be -0, whose bits are those of a huge unsigned number."""
    use(EIGHT, 2, monkeypatch)
    held = torch.ones(3 * 8, 29, dtype=torch.bool)
    held[:, ::7] = False
    by_cluster(PLAIN["GRU"], 29, [8] * 3, masks=Masks(None, held))


@emulated
def test_results_repeat_whenever_messages_arrive(
    on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is kept for the backward."""
    use(FOUR, 3, monkeypatch)
    o, sizes = as_float32(operands(LSTM, 29, [6] * 4)), [6] * 4
    run = functools.partial(by_engine, engine="cluster")
    first = with_gradients(run, LSTM, o, sizes)
    for kernel in on_cpu:
        kernel.seed = 7
    for name, a in with_gradients(run, LSTM, o, sizes).items():
        assert torch.equal(a, first[name]), name
    for name, a in zip(("out", "h", "c"), run(LSTM, o, sizes, save=False), strict=True):
        assert torch.equal(a, first[name]), name


@emulated
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_rows_less_means(dtype: torch.dtype, on_cpu: list[Emulated]) -> None:
    operands = torch.zeros(1, 1, 1), torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(1, 1)
    steps = engine.ClusterEngine().prepare(BATCH_LSTM, Operands(*operands), backward=False)
    for sizes in ([9, 9, 9], [11, 3, 2]):
        a = torch.randn(sum(sizes), 37).add_(3).to(dtype)
        exact, exact_means = without_means(a.double(), sizes, F64)
        found, means = steps.without_means(a, sizes, F32)
        torch.testing.assert_close(means.double(), exact_means, rtol=0, atol=2e-6)
        torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
        assert steps.without_means(a, sizes, F32, out=a)[0] is a
        assert torch.equal(a, found)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("hidden", [1, 29, 100, 256])
def test_fragments_hold_each_weight_once(cell: str, backward: bool, hidden: int) -> None:
    problem = Problem(CELLS[cell], hidden, 0, 2, True, True)
    for layout in choice.layouts(problem, backward, 8)[:4]:
        index = layout.fragments()
        there = index[index >= 0].sort().values
        assert torch.equal(there, torch.arange(problem.gates * hidden**2, dtype=torch.int32))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("spec", "hidden", "examples"),
    [
        *((LSTM, *size) for size in ((100, 100), (256, 128), (400, 8), (512, 64))),
        *((BATCH_LSTM, *size) for size in ((100, 100), (64, 32), (400, 8), (256, 64))),
    ],
)
def test_layouts_fit_and_fill_the_gpu(
    spec: Spec, hidden: int, examples: int, backward: bool
) -> None:
    """With batch norm, one cluster has all examples."""
    for dtype in (F32,) if spec.examples else (F32, BF16):
        problem = geometry.problem_of(spec, hidden, dtype)
        layout = choice.layouts(problem, backward, examples)[0]
        assert layout.shared_bytes <= SHARED_LIMIT
        assert layout.blocks * layout.units >= hidden
        if isinstance(layout, BatchLayout):
            assert 8 * layout.eights >= examples
        else:
            waves = -(-examples // layout.rows) / choice.RESIDENT[layout.blocks]
            assert waves <= (1 if hidden < 512 else 2)
        assert isinstance(layout, BatchLayout) == bool(spec.examples)


@needs_nvrtc
@pytest.mark.parametrize(
    ("spec", "hidden", "examples", "dtype"),
    [
        (LSTM, 400, 8, F32),
        (LSTM, 256, 128, BF16),
        (GRU, 256, 128, F32),
        pytest.param(RNN, 100, 100, F32, marks=slow),
        (replace(BOTH, recurrent=EACH_GATE), 400, 8, F32),
        pytest.param(JOINT_GRU, 256, 128, F32, marks=slow),
        (BATCH_LSTM, 100, 100, F32),
        (BATCH_LSTM, 400, 8, F32),
        (BATCH_GRU, 64, 32, F32),
        pytest.param(BATCH_LSTM, 100, 100, BF16, marks=slow),
        pytest.param(BATCH_GRU, 100, 100, F32, marks=slow),
        pytest.param(BATCH_RNN, 100, 100, F32, marks=slow),
    ],
    ids=label,
)
def test_no_local_memory(spec: Spec, hidden: int, examples: int, dtype: torch.dtype) -> None:
    problem = geometry.problem_of(spec, hidden, dtype)
    for lengths, backward in itertools.product({False, problem.batch}, (False, True)):
        kind = replace(problem, lengths=lengths)
        layout = choice.layouts(kind, backward, examples)[0]
        found = driver.resource_usage(f"{layout.kernel}.cu", layout.macros())[layout.kernel]
        assert found.registers <= 255
        assert found[1:4] == (0, 0, 0), "stack and spills"
    if not problem.batch:
        for found in driver.resource_usage("rows.cu", problem.rows_macros()).values():
            assert found[1:4] == (0, 0, 0), "stack and spills"


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_unsupported_gpu", lambda device: None)
    monkeypatch.setattr(persistent, "resident_clusters", lambda device: choice.RESIDENT)
    monkeypatch.setattr(engine.ClusterEngine, "device", "cpu")
    x, found = torch.zeros(2, 3, 4), engine.ClusterEngine()

    def reason(
        spec: Spec, hidden: int = 100, dtype: torch.dtype = F32, examples: int | None = None
    ) -> str | None:
        given = () if examples is None else (examples,)
        w_hh = torch.zeros(spec.gates * hidden, hidden)
        return found.unsupported_reason(spec, x, w_hh, dtype, *given)

    # Sizes are the largest that the page of kernels names.
    assert reason(LSTM, 512) is None
    assert reason(LSTM, 768, BF16) is None
    each_gate = replace(LSTM, recurrent=NONE, input=EACH_GATE)
    for spec in (LSTM, JOINT, CARRIED, JOINT_GRU, each_gate):
        assert reason(spec) is None
    for spec in (BATCH_LSTM, with_given(BATCH_LSTM)):
        assert reason(spec, examples=100) is None
    assert "2400" in str(reason(LSTM, 2400))
    assert "float64" in str(reason(LSTM, 100, F64))
    for cell in ("RNN_RELU", "light GRU"):
        assert cell in str(reason(replace(PLAIN["LSTM"], cell=cell)))
    differ = str(reason(Spec("LSTM", EACH_GATE, rows(4), NONE)))
    assert "(1, 1, 1, 1)" in differ
    assert "(4,)" in differ
    assert "128 rows" in str(reason(BATCH_LSTM, 256, examples=128))
    assert "2000 rows" in str(reason(BATCH_LSTM, 8, examples=2000))
    for other in (GIVEN, UNBIASED):
        assert reason(Spec("LSTM", BATCH, other, NONE), examples=100) is not None


def test_no_gpu_is_a_reason() -> None:
    if not torch.cuda.is_available():
        assert engine.ClusterEngine().missing() is not None
