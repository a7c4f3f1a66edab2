"""The persistent kernels of the cluster engine, emulated on the CPU, against the equations.

The emulation delivers messages and copies early or late at random, so a wait that is missing shows
up. References are in float64; tolerances come from the generic loop in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate, moved
from equations import equations, random_operands, without_input_bias
from ops.emulation import Emulated, emulate, missing
from torch import Tensor

from ln_zoo.ops import operator
from ln_zoo.ops.engines.base import NO_MASKS, Masks
from ln_zoo.ops.engines.cluster import choice, driver, engine, persistent
from ln_zoo.ops.engines.cluster.geometry import CELLS, SHARED_LIMIT, Layout, Problem
from ln_zoo.ops.spec import Operands, Rows, Spec

emulated = pytest.mark.skipif(missing() is not None, reason=str(missing()))

slow = pytest.mark.slow
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Blocks, units, rows, and warps over outputs and over what is contracted, forward and backward.
Shape = tuple[int, int, int, tuple[int, int], tuple[int, int]]
FOUR: Shape = (2, 16, 4, (2, 2), (2, 1))
EIGHT: Shape = (3, 12, 8, (3, 1), (2, 2))
ALONE: Shape = (1, 32, 8, (2, 2), (2, 1))


def rows(*groups: int, center: bool = True) -> Rows:
    return Rows(True, center, 1e-5, groups)


NORM = {
    "LSTM": Spec("LSTM", rows(4), rows(4), rows(1)),
    "GRU": Spec("GRU", rows(2, 1), rows(2, 1), Rows()),
    "RNN_TANH": Spec("RNN_TANH", Rows(), Rows(), rows(1)),
}
PLAIN = {cell: Spec(cell, Rows(), Rows(), Rows()) for cell in CELLS}


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
    blocks, units, rows, *warps = shape

    def layouts(problem: Problem, backward: bool, *_: Any) -> list[Layout]:
        layout = Layout(problem, backward, blocks, units, rows, *warps[backward], 0, 0)
        return [choice.with_tiles(layout, tiles)]

    monkeypatch.setattr(persistent, "layouts", layouts)


def operands(spec: Spec, hidden: int, lead: Sequence[int], examples: int) -> Operands:
    """Without the bias that a joint GRU's candidate does not have."""
    o = random_operands(spec, lead, examples, 6, hidden, gain=1.0, offset=0.1, seed=hidden)
    return without_input_bias(spec, o)


def all_masks(spec: Spec, hidden: int, lead: Sequence[int], examples: int) -> Masks:
    generator = torch.Generator().manual_seed(1)

    def share(p: float, *size: int) -> Tensor:
        return torch.rand(*size, generator=generator) < p

    return Masks(
        share(0.7, examples, hidden).double() / 0.7,
        share(0.3, *lead, hidden),
        share(0.3, *lead, hidden) if spec.cell == "LSTM" else None,
        share(0.3, *lead).flatten(),
    )


def differentiated(spec: Spec, outputs: Sequence[Tensor], leaves: Operands) -> dict[str, Tensor]:
    """Outputs, and gradients of a fixed function of them."""
    generator = torch.Generator().manual_seed(2)
    weights = [
        torch.randn(a.shape, generator=generator, dtype=torch.float64).to(a.dtype) for a in outputs
    ]
    there = {name: a for name, a in leaves._asdict().items() if a is not None}
    grads = torch.autograd.grad(outputs, list(there.values()), weights)
    names = ("out", "h", "c")[: len(outputs)]
    found = {**dict(zip(names, outputs, strict=True)), **dict(zip(there, grads, strict=True))}
    if spec.joint and spec.cell == "GRU":
        found["bias"] = found["bias"][: 2 * len(leaves.w_hh) // 3]
    return {name: a.detach() for name, a in found.items()}


def in_precision(o: Operands, dtype: torch.dtype, wide: torch.dtype) -> Operands:
    """Operands of products in one precision and all others in another, to be differentiated."""
    return Operands(
        *(
            None if a is None else a.to(dtype if i < 3 else wide).detach().requires_grad_()
            for i, a in enumerate(o)
        )
    )


def by_engine(
    spec: Spec, o: Operands, sizes: Sequence[int] | None = None, masks: Masks = NO_MASKS
) -> dict[str, Tensor]:
    batch_sizes = None if sizes is None else torch.tensor(sizes)
    single = (a.float() if a is not None and a.is_floating_point() else a for a in masks)
    outputs = torch.ops.ln_zoo.recurrence(
        *o, None, None, None, *single, batch_sizes, spec.encode(), "cluster", True
    )
    return differentiated(spec, outputs[: 3 if spec.cell == "LSTM" else 2], o)


def check(
    spec: Spec,
    hidden: int,
    examples: int,
    steps: int = 4,
    dtype: torch.dtype = F32,
    sizes: Sequence[int] | None = None,
    masked: bool = False,
) -> None:
    """Compares outputs, states and all gradients with float64."""
    lead = (steps, examples) if sizes is None else (sum(sizes),)
    exact = operands(spec, hidden, lead, examples)
    # What the engine gets is exact in its precision.
    exact = Operands(*(None if a is None else a.to(dtype).double() for a in exact))
    masks = all_masks(spec, hidden, lead, examples) if masked else NO_MASKS
    batch_sizes = None if sizes is None else torch.tensor(sizes)

    def reference(o: Operands) -> dict[str, Tensor]:
        return differentiated(spec, equations(spec, o, masks, sizes), o)

    def loop(run: int) -> dict[str, Tensor]:
        o = in_precision(Operands(*(moved(a, run) for a in exact)), dtype, F32)
        single = Masks(
            *(a.float() if a is not None and a.dtype != torch.bool else a for a in masks)
        )
        return differentiated(spec, operator.replay(spec, o, batch_sizes, masks=single), o)

    found = by_engine(spec, in_precision(exact, dtype, F32), sizes, masks)
    expected = reference(in_precision(exact, torch.float64, torch.float64))
    assert_as_accurate(found, expected, loop)


@emulated
@pytest.mark.parametrize("cell", CELLS)
def test_layer_norm_with_noise_resets_and_lengths(
    cell: str, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FOUR, 3, monkeypatch)
    check(NORM[cell], 29, 6, sizes=[6, 6, 5, 2, 1], masked=True)
    check(NORM[cell], 29, 5, sizes=[5, 5, 5, 4], masked=True)


@emulated
@pytest.mark.parametrize("cell", ["LSTM", "GRU", pytest.param("RNN_TANH", marks=slow)])
def test_layer_norm(cell: str, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch) -> None:
    use(EIGHT, 2, monkeypatch)
    check(NORM[cell], 29, 9)
    check(NORM[cell], 29, 1, steps=1)


@emulated
@pytest.mark.parametrize(
    "cell", [pytest.param("LSTM", marks=slow), pytest.param("GRU", marks=slow), "RNN_TANH"]
)
def test_no_norm(cell: str, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch) -> None:
    use(FOUR, 99, monkeypatch)
    check(PLAIN[cell], 29, 6)


@emulated
@pytest.mark.parametrize(
    ("cell", "dtype"),
    [("LSTM", BF16), ("GRU", F16)],
)
def test_half_precision(
    cell: str, dtype: torch.dtype, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(ALONE, 1, monkeypatch)
    # Rows of an odd number of values are copied one by one.
    check(NORM[cell], 29 if cell == "LSTM" else 32, 9, dtype=dtype, masked=True)


@emulated
@pytest.mark.parametrize(
    "spec",
    [
        Spec("LSTM", rows(4, center=False), Rows(), Rows()),
        Spec("LSTM", Rows(), rows(4), rows(1, center=False)),
        Spec("LSTM", Rows(), Rows(), rows(1), (0.2, 0.1)),
        pytest.param(Spec("GRU", Rows(), rows(2, 1, center=False), Rows()), marks=slow),
    ],
    ids=Spec.encode,
)
def test_some_sites(spec: Spec, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch) -> None:
    use(EIGHT, 4, monkeypatch)
    check(spec, 29, 5)


JOINT = Spec("LSTM", Rows(), rows(4), rows(1), joint=True)
CARRIED = replace(NORM["LSTM"], carried=True)
BOTH = replace(JOINT, carried=True)
JOINT_GRU = Spec("GRU", Rows(), rows(3), Rows(), joint=True)
EACH_GATE = rows(1, 1, 1, 1)


@emulated
@pytest.mark.parametrize(
    ("spec", "dtype", "masked"),
    [
        (CARRIED, F32, False),
        (replace(BOTH, recurrent=EACH_GATE), F32, True),
        (JOINT_GRU, F32, True),
        pytest.param(BOTH, BF16, False, marks=slow),
        pytest.param(BOTH, F16, True, marks=slow),
        pytest.param(replace(JOINT_GRU, recurrent=Rows()), F32, True, marks=slow),
        pytest.param(replace(JOINT, recurrent=Rows(), out=Rows()), F32, True, marks=slow),
        pytest.param(replace(CARRIED, out=rows(1, center=False)), F32, True, marks=slow),
        # Other groups than the paper's, of the paper's cells.
        (Spec("LSTM", EACH_GATE, EACH_GATE, rows(1)), F32, True),
        pytest.param(Spec("GRU", rows(3), rows(3), Rows()), F32, False, marks=slow),
        pytest.param(Spec("GRU", rows(1, 1, 1), rows(1, 1, 1), Rows()), F32, True, marks=slow),
    ],
    ids=lambda a: a.encode() if isinstance(a, Spec) else str(a),
)
def test_joint_and_carried_norms_and_other_groups(
    spec: Spec,
    dtype: torch.dtype,
    masked: bool,
    on_cpu: list[Emulated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(FOUR if dtype == F32 else ALONE, 3, monkeypatch)
    check(spec, 29, 5, dtype=dtype, sizes=[5, 5, 4, 2, 1] if masked else None, masked=masked)


@emulated
def test_the_chosen_layout(on_cpu: list[Emulated]) -> None:
    check(NORM["LSTM"], 100, 3, steps=2)


@emulated
def test_zero_gradients_leave_scales_alone(
    on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest gradient of a row may be -0, whose bits are those of a huge unsigned number."""
    use(EIGHT, 2, monkeypatch)
    spec, o = PLAIN["GRU"], operands(PLAIN["GRU"], 29, (3, 8), 8)
    held = torch.ones(3, 8, 29, dtype=torch.bool)
    held[:, :, ::7] = False
    masks = Masks(None, held)
    found = by_engine(spec, in_precision(o, F32, F32), masks=masks)
    double = in_precision(o, torch.float64, torch.float64)
    expected = differentiated(spec, equations(spec, double, masks), double)
    for name, a in expected.items():
        assert (found[name] - a).norm() < 1e-5 * a.norm(), name


@emulated
def test_results_repeat_whenever_messages_arrive(
    on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FOUR, 3, monkeypatch)
    o = in_precision(operands(NORM["LSTM"], 29, (4, 6), 6), F32, F32)
    first = by_engine(NORM["LSTM"], o)
    for kernel in on_cpu:
        kernel.seed = 7
    for name, a in by_engine(NORM["LSTM"], o).items():
        assert torch.equal(a, first[name]), name


@emulated
def test_inference_gives_the_same_numbers(
    on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FOUR, 3, monkeypatch)
    spec, o = NORM["LSTM"], in_precision(operands(NORM["LSTM"], 29, (4, 6), 6), F32, F32)
    arguments = (*o, *(None,) * (3 + len(Masks._fields)), None, spec.encode(), "cluster")
    with torch.no_grad():
        kept, bare = (torch.ops.ln_zoo.recurrence(*arguments, save) for save in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(kept[:3], bare[:3], strict=True))


@emulated
def test_long_sequences_are_cut(on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch) -> None:
    use(FOUR, 3, monkeypatch)
    monkeypatch.setattr(persistent, "CHUNK_BYTES", 2 * 6 * 4 * 29 * 4)
    check(NORM["LSTM"], 29, 6, steps=5)
    check(NORM["LSTM"], 29, 6, sizes=[6, 6, 5, 2, 1], masked=True)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("hidden", [1, 29, 100, 256])
def test_fragments_hold_each_weight_once(cell: str, backward: bool, hidden: int) -> None:
    problem = Problem(CELLS[cell], hidden, 0, 2, True, True)
    for layout in choice.layouts(problem, backward, 8)[:4]:
        index = layout.fragments()
        there = index[index >= 0].sort().values
        assert torch.equal(there, torch.arange(problem.gates * hidden**2, dtype=torch.int32))


def test_layouts_fit_and_fill_the_gpu() -> None:
    for hidden, examples in ((100, 100), (256, 128), (400, 8), (512, 64)):
        for storage, pieces in ((0, 2), (1, 1)):
            for backward in (False, True):
                problem = Problem(0, hidden, storage, pieces, True, True, 2)
                layout = choice.layouts(problem, backward, examples)[0]
                assert layout.shared_bytes <= SHARED_LIMIT
                assert layout.blocks * layout.units >= hidden
                waves = -(-examples // layout.rows) / choice.RESIDENT[layout.blocks]
                assert waves <= (1 if hidden < 512 else 2)


@pytest.mark.skipif(driver.missing_compiler() is not None, reason=str(driver.missing_compiler()))
@pytest.mark.parametrize(
    ("spec", "hidden", "examples", "dtype"),
    [
        (NORM["LSTM"], 400, 8, F32),
        (NORM["LSTM"], 256, 128, BF16),
        (NORM["GRU"], 256, 128, F32),
        pytest.param(NORM["RNN_TANH"], 100, 100, F32, marks=slow),
        (replace(BOTH, recurrent=EACH_GATE), 400, 8, F32),
        pytest.param(JOINT_GRU, 256, 128, F32, marks=slow),
    ],
    ids=lambda a: a.encode() if isinstance(a, Spec) else str(a),
)
def test_no_local_memory(spec: Spec, hidden: int, examples: int, dtype: torch.dtype) -> None:
    problem = persistent.problem_of(spec, hidden, dtype)
    for backward, name in ((False, "forward"), (True, "backward")):
        layout = choice.layouts(problem, backward, examples)[0]
        found = driver.resource_usage(f"{name}.cu", layout.macros())[name]
        assert found.registers <= 255
        assert found[1:4] == (0, 0, 0), "stack and spills"
    for found in driver.resource_usage("rows.cu", problem.rows_macros()).values():
        assert found[1:4] == (0, 0, 0), "stack and spills"


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_unsupported_gpu", lambda device: None)
    monkeypatch.setattr(engine, "resident_clusters", lambda device: choice.RESIDENT)
    monkeypatch.setattr(engine.ClusterEngine, "device", "cpu")
    x, found = torch.zeros(2, 3, 4), engine.ClusterEngine()

    def reason(spec: Spec, hidden: int, dtype: torch.dtype = F32) -> str | None:
        return found.unsupported_reason(spec, x, torch.zeros(spec.gates * hidden, hidden), dtype)

    assert reason(NORM["LSTM"], 100) is None
    # The largest sizes that the page of kernels names.
    assert reason(NORM["LSTM"], 512) is None
    assert reason(NORM["LSTM"], 768, BF16) is None
    assert "2400" in str(reason(NORM["LSTM"], 2400))
    assert "float64" in str(reason(NORM["LSTM"], 100, torch.float64))
    for cell in ("RNN_RELU", "light GRU"):
        assert cell in str(reason(replace(PLAIN["LSTM"], cell=cell), 100))
    differ = str(reason(Spec("LSTM", EACH_GATE, rows(4), Rows()), 100))
    assert "(1, 1, 1, 1)" in differ
    assert "(4,)" in differ
    each_gate = replace(NORM["LSTM"], recurrent=Rows(), input=EACH_GATE)
    for spec in (JOINT, CARRIED, JOINT_GRU, each_gate):
        assert reason(spec, 100) is None


def test_no_gpu_is_a_reason() -> None:
    if not torch.cuda.is_available():
        assert engine.ClusterEngine().missing() is not None
