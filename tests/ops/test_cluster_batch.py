"""The persistent kernels for batch statistics, emulated on the CPU, against the equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops.batch_case import BATCH, GIVEN, GRU, LSTM, NONE, RNN, UNBIASED, check, with_given
from ops.emulation import Emulated, missing
from ops.test_cluster_engine import on_cpu

from ln_zoo.ops import operator
from ln_zoo.ops.engines.cluster import choice, driver, engine, persistent
from ln_zoo.ops.engines.cluster.geometry import SHARED_LIMIT, BatchLayout, Problem
from ln_zoo.ops.spec import Spec
from ln_zoo.ops.time_chunks import time_chunks, without_means

__all__ = ["on_cpu"]

emulated = pytest.mark.skipif(missing() is not None, reason=str(missing()))
slow = pytest.mark.slow
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#: Blocks, units, and warps over outputs and over what is contracted, forward and backward.
Shape = tuple[int, int, tuple[int, int], tuple[int, int]]
#: Two quads of units, four parts of the rows; three quads, two parts, idle warps; one block.
EIGHT: Shape = (2, 8, (2, 1), (1, 1))
TWELVE: Shape = (3, 12, (1, 3), (2, 2))
ALONE: Shape = (1, 32, (2, 2), (2, 2))


def use(shape: Shape, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine choose this layout, with ``tiles`` tiles in registers."""
    blocks, units, *warps = shape

    def layouts(problem: Problem, backward: bool, examples: int, *_: Any) -> list[BatchLayout]:
        eights = -(-examples // 8)
        sizes = blocks, units, 8, *warps[backward]
        return [choice.with_tiles(BatchLayout(problem, backward, *sizes, 0, 0, eights), tiles)]

    monkeypatch.setattr(persistent, "layouts", layouts)


def by_cluster(spec: Spec, hidden: int, sizes: Sequence[int], **options: Any) -> None:
    check(spec, hidden, sizes, engine="cluster", **options)


@emulated
@pytest.mark.parametrize("spec", [LSTM, GRU, RNN], ids=Spec.encode)
def test_batch_statistics(
    spec: Spec, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(EIGHT, 2, monkeypatch)
    by_cluster(spec, 13, [35] * 3)
    by_cluster(spec, 13, [2], bias=False)


@emulated
@pytest.mark.parametrize("spec", [LSTM, GRU, pytest.param(RNN, marks=slow)], ids=Spec.encode)
def test_packed_in_chunks(
    spec: Spec, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(TWELVE, 1, monkeypatch)
    monkeypatch.setattr(operator, "time_chunks", lambda sizes, *_: time_chunks(sizes, 30))
    by_cluster(spec, 29, [19, 19, 17, 8, 2])


@emulated
@pytest.mark.parametrize("spec", [LSTM, GRU, RNN], ids=Spec.encode)
def test_given_statistics(
    spec: Spec, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(EIGHT, 0, monkeypatch)
    by_cluster(with_given(spec), 13, [9, 9, 3, 1])


@emulated
@pytest.mark.parametrize(
    "spec",
    [
        Spec("LSTM", UNBIASED, UNBIASED, UNBIASED),
        Spec("LSTM", NONE, NONE, BATCH),
        Spec("LSTM", BATCH, NONE, NONE),
        pytest.param(Spec("LSTM", NONE, BATCH, NONE), marks=slow),
        pytest.param(Spec("GRU", UNBIASED, UNBIASED, NONE), marks=slow),
        pytest.param(Spec("GRU", NONE, replace(BATCH, eps=0.1), NONE), marks=slow),
        Spec("GRU", BATCH, NONE, NONE),
    ],
    ids=Spec.encode,
)
def test_some_places_and_unbiased(
    spec: Spec, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(ALONE, 2, monkeypatch)
    by_cluster(spec, 29, [11] * 2)


@emulated
@pytest.mark.parametrize(("spec", "dtype"), [(LSTM, BF16), (GRU, F16)], ids=str)
def test_half_precision(
    spec: Spec, dtype: torch.dtype, on_cpu: list[Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(EIGHT, 1, monkeypatch)
    by_cluster(spec, 13, [17] * 2, products=dtype)


@emulated
def test_the_chosen_layout(on_cpu: list[Emulated]) -> None:
    by_cluster(LSTM, 20, [40, 40])


@emulated
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_rows_less_means(dtype: torch.dtype, on_cpu: list[Emulated]) -> None:
    operands = torch.zeros(1, 1, 1), torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(1, 1)
    steps = engine.ClusterEngine().prepare(LSTM, operator.Operands(*operands), backward=False)
    for sizes in ([9, 9, 9], [11, 3, 2]):
        a = torch.randn(sum(sizes), 37).add_(3).to(dtype)
        exact, exact_means = without_means(a.double(), sizes, torch.float64)
        found, means = steps.without_means(a, sizes, F32)
        torch.testing.assert_close(means.double(), exact_means, rtol=0, atol=2e-6)
        torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
        assert steps.without_means(a, sizes, F32, out=a)[0] is a
        assert torch.equal(a, found)


def test_layouts_fit_one_cluster() -> None:
    for hidden, examples in ((100, 100), (64, 32), (400, 8), (256, 64)):
        for backward in (False, True):
            problem = persistent.problem_of(LSTM, hidden, F32)
            layout = choice.layouts(problem, backward, examples)[0]
            assert isinstance(layout, BatchLayout)
            assert layout.shared_bytes <= SHARED_LIMIT
            assert layout.blocks * layout.units >= hidden
            assert 8 * layout.eights >= examples


@pytest.mark.skipif(driver.missing_compiler() is not None, reason=str(driver.missing_compiler()))
@pytest.mark.parametrize(
    ("spec", "hidden", "examples", "dtype"),
    [
        (LSTM, 100, 100, F32),
        (LSTM, 400, 8, F32),
        (GRU, 64, 32, F32),
        pytest.param(LSTM, 100, 100, BF16, marks=slow),
        pytest.param(GRU, 100, 100, F32, marks=slow),
        pytest.param(RNN, 100, 100, F32, marks=slow),
    ],
)
def test_no_local_memory(spec: Spec, hidden: int, examples: int, dtype: torch.dtype) -> None:
    for lengths in (False, True):
        problem = replace(persistent.problem_of(spec, hidden, dtype), lengths=lengths)
        for backward in (False, True):
            layout = choice.layouts(problem, backward, examples)[0]
            found = driver.resource_usage(f"{layout.kernel}.cu", layout.macros())[layout.kernel]
            assert found.registers <= 255
            assert found[1:4] == (0, 0, 0), "stack and spills"


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_unsupported_gpu", lambda device: None)
    monkeypatch.setattr(engine, "resident_clusters", lambda device: choice.RESIDENT)
    monkeypatch.setattr(engine.ClusterEngine, "device", "cpu")
    x, found = torch.zeros(2, 3, 4), engine.ClusterEngine()

    def reason(spec: Spec, hidden: int, examples: int) -> str | None:
        w_hh = torch.zeros(spec.gates * hidden, hidden)
        return found.unsupported_reason(spec, x, w_hh, F32, examples)

    assert reason(LSTM, 100, 100) is None
    assert reason(with_given(LSTM), 100, 100) is None
    assert "128 rows" in str(reason(LSTM, 256, 128))
    assert "2000 rows" in str(reason(LSTM, 8, 2000))
    assert reason(Spec("LSTM", BATCH, GIVEN, NONE), 100, 100) is not None
    assert reason(Spec("LSTM", BATCH, UNBIASED, NONE), 100, 100) is not None
