"""Every cell with every norm, in every situation, precision and engine."""

from __future__ import annotations

import functools

import pytest
import torch
from engines import names_of, note_kernels
from outcomes import (
    CELLS,
    NORMS,
    OTHER_CELLS,
    OTHER_NORMS,
    PRECISIONS,
    Cut,
    Problem,
    assert_right,
    check_all,
    gpu,
    outcome,
    situations,
    slow,
    ways,
)

every_cell = pytest.mark.parametrize("cell", CELLS)
every_norm = pytest.mark.parametrize("norm", NORMS)
#: Situations of engines that are asked for by name.
FEW = ("padded", "packed", "resets", "zoneout", "recurrent dropout", "all of it", "hx strided")
BY_ROWS = ("none", "layer", "rms", "weight", *OTHER_NORMS)


def must_take(device: str, kernels: str, problem: Problem) -> bool:
    """Whether a refusal is a fault."""
    noise = {"zoneout", "recurrent_dropout"} & problem.options.keys()
    projected = "proj_size" in problem.options
    if kernels == "1":
        over_batch = problem.norm == "batch" and noise
        return not (over_batch or (projected and problem.norm not in ("none", "weight")))
    if kernels == "torch":
        return problem.norm in ("none", "weight") and not (noise or problem.reset)
    if projected or problem.cell == "light GRU":
        return False
    if problem.norm not in BY_ROWS and (problem.norm != "batch" or noise or problem.reset):
        return False
    if kernels == "cluster":  # a state that grows without bound does not fit into halves
        return problem.precision != "float64" and problem.cell != "RNN_RELU"
    if kernels == "triton":
        return problem.precision in ("float32", "bfloat16", "bf16-mixed")
    return kernels == "aten"


def check(device: str, kernels: str, problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        picked = note_kernels(patch)
        try:
            assert_right(problem, device, kernels)
        except Cut:
            assert kernels != "cluster" or problem.norm == "batch", "cut at resets"
            return
    # The first call is the layer under test; the others are references.
    first = names_of(picked)[0]
    if must_take(device, kernels, problem):
        assert first is not None, f"{kernels} refused"
    if first is not None and kernels != "1":
        assert first == kernels


def check_problems(device: str, kernels: str, problems: dict[str, Problem]) -> None:
    check_all({name: functools.partial(check, device, kernels, p) for name, p in problems.items()})


@ways(["1"], ["1"])
@every_norm
@every_cell
def test_every_situation(device: str, kernels: str, cell: str, norm: str) -> None:
    problems = {name: Problem(cell, norm, **some) for name, some in situations(cell).items()}
    check_problems(device, kernels, problems)


@ways(["1"], ["1"])
@pytest.mark.parametrize("precision", [p for p in PRECISIONS if p != "float32"])
@every_norm
@every_cell
def test_every_precision(device: str, kernels: str, cell: str, norm: str, precision: str) -> None:
    if device == "cpu" and precision in ("float16", "16-mixed"):
        pytest.skip("float16 is for GPUs")
    names = ("padded", "resets", "hx strided")
    problems = {
        name: Problem(cell, norm, precision, **some)
        for name, some in situations(cell, names).items()
    }
    check_problems(device, kernels, problems)


#: Engines, precisions, and norms that matter to an engine.
ENGINES = [
    ("cpu", "aten", "float32", ("layer", "batch")),
    ("cpu", "torch", "float32", ("none", "weight")),
    ("cuda", "cluster", "float32", ("none", "layer", "rms", "batch")),
    ("cuda", "cluster", "bfloat16", ("none", "layer", "rms", "batch")),
    ("cuda", "cluster", "float16", ("layer",)),
    ("cuda", "triton", "float32", ("none", "layer", "rms", "batch")),
    ("cuda", "triton", "bfloat16", ("none", "layer")),
    # cuDNN's functions in float32 are ten times less exact than the loop's.
    ("cuda", "torch", "float64", ("none", "weight")),
    ("cuda", "aten", "float32", ("layer", "batch")),
]


@pytest.mark.parametrize(
    ("device", "kernels", "precision", "norm"),
    [
        pytest.param(device, *rest, norm, marks=slow if device == "cpu" else gpu)
        for device, *rest, wanted in ENGINES
        for norm in wanted
    ],
)
@every_cell
def test_engines_asked_for(device: str, kernels: str, cell: str, norm: str, precision: str) -> None:
    """The engine itself where it takes a call, and what runs in its place where it does not."""
    problems = {
        name: Problem(cell, norm, precision, **some) for name, some in situations(cell, FEW).items()
    }
    check_problems(device, kernels, problems)


@ways(["1"], ["cluster", "triton"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", *OTHER_CELLS])
def test_other_cells_and_groups_of_statistics(
    device: str, kernels: str, cell: str, precision: str
) -> None:
    norms = ["layer, each gate"] if cell in CELLS else ["none", "layer", "rms", "layer, each gate"]
    problems = {
        f"{norm}, {name}": Problem(cell, norm, precision, **some)
        for norm in norms
        for name, some in situations(cell, FEW).items()
    }
    check_problems(device, kernels, problems)


@ways(["1"], ["cluster", "triton"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [(40, 9, 20, 100), (33, 130, 40, 256), (24, 8, 64, 400), (5, 3, 30, 600)]
)
def test_larger_sizes(
    device: str, kernels: str, sizes: tuple[int, int, int, int], precision: str
) -> None:
    problems = {
        f"{cell} {norm} {'packed' if packed else 'padded'}": Problem(
            cell, norm, precision, packed=packed, sizes=sizes, hx="strided"
        )
        for cell in ("LSTM", "GRU")
        for norm in (("layer", "none", "batch") if precision == "float32" else ("layer", "none"))
        for packed in (False, True)
    }
    if precision == "bfloat16":
        # Beyond some steps the loop's own errors are as large as the numbers.
        problems = {name: p for name, p in problems.items() if p.norm == "none" or p.sizes[0] <= 40}
    checks = {
        name: functools.partial(assert_right, p, device, kernels) for name, p in problems.items()
    }
    check_all(checks)


@ways(["1"], ["1"])
@pytest.mark.parametrize("norm", ["layer", "rms", "batch"])
@every_cell
def test_twice_the_same_bits(device: str, kernels: str, cell: str, norm: str) -> None:
    for some in situations(cell, ("padded", "packed")).values():
        problem = Problem(cell, norm, **some)
        first, second = (outcome(problem, device, kernels) for _ in range(2))
        differ = [name for name in first if not torch.equal(first[name], second[name])]
        assert not differ
