"""Steps on GPUs that normalise over examples, in triton's interpreter.

Run by `test_gpu_engine.py`, as `gpu_in_interpreter.py` is. Numbers are held against the equations
(`equations.py`) in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate
from gpu_in_interpreter import BF16, ENGINE, F32, F64, guarded, patched_once
from ops.batch_case import (
    BATCH,
    GIVEN,
    GRU,
    LSTM,
    NONE,
    RNN,
    UNBIASED,
    by_engine,
    check,
    given_for,
    with_given,
)
from ops.engine_case import as_float32, between_nans, operands, with_gradients
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from triton.runtime.interpreter import ReduceOps

from ln_zoo.layers import GRU as GRULayer
from ln_zoo.layers import LSTM as LSTMLayer
from ln_zoo.norms import BatchNorm
from ln_zoo.ops import operator, registry
from ln_zoo.ops.engines.triton import TritonEngine, batch, graphs, steps
from ln_zoo.ops.recurrent_kernel import Recurrence
from ln_zoo.ops.spec import Operands, Spec
from ln_zoo.ops.time_chunks import time_chunks, without_means

__all__ = ["guarded", "patched_once"]

CELLS = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}
every_cell = pytest.mark.parametrize("spec", CELLS.values(), ids=CELLS)


@pytest.fixture(autouse=True)
def reduced_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter reduces tuples number by number; these functions take whole rows, too."""

    def reduce(self: ReduceOps, tiles: Sequence[Any]) -> tuple[Any, ...]:
        data = [tile.handle.data for tile in tiles]
        while (rows := data[0].shape[0]) > 1:
            halves = [self.to_tensor(a[: rows // 2], t.dtype) for a, t in zip(data, tiles)]  # noqa: B905
            halves += [self.to_tensor(a[rows // 2 :], t.dtype) for a, t in zip(data, tiles)]  # noqa: B905
            data = [a.handle.data for a in self.combine_fn.fn(*halves)]
        assert self.axis == 0
        assert self.keep_dims
        return tuple(self.to_tensor(a, t.dtype) for a, t in zip(data, tiles, strict=True))

    monkeypatch.setattr(ReduceOps, "generic_reduce", reduce)


@pytest.mark.parametrize(
    ("cell", "hidden", "examples"),
    [
        *(("LSTM", 5, 2), ("LSTM", 1, 17)),
        pytest.param("LSTM", 100, 3, marks=pytest.mark.slow),
        *(("GRU", 5, 17), ("RNN", 1, 130), ("RNN", 70, 2)),
    ],
)
def test_batch_statistics(cell: str, hidden: int, examples: int) -> None:
    check(CELLS[cell], hidden, [examples] * 2)


@every_cell
def test_given_statistics(spec: Spec) -> None:
    check(with_given(spec), 5, [3] * 3)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("LSTM", UNBIASED, UNBIASED, UNBIASED),
        Spec("GRU", UNBIASED, UNBIASED, NONE),
        Spec("RNN_RELU", NONE, NONE, UNBIASED),
        Spec("LSTM", BATCH, NONE, NONE),
        Spec("LSTM", NONE, BATCH, NONE),
        Spec("LSTM", NONE, NONE, BATCH),
        Spec("GRU", NONE, BATCH, NONE),
        Spec("GRU", BATCH, NONE, NONE),
    ],
    ids=Spec.encode,
)
def test_some_places_and_unbiased(spec: Spec) -> None:
    check(spec, 5, [4] * 2)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("LSTM", BATCH, GIVEN, replace(UNBIASED, correction=0, eps=0.1)),
        Spec("LSTM", GIVEN, UNBIASED, GIVEN),
        Spec("GRU", replace(GIVEN, eps=0.1), BATCH, NONE),
        Spec("GRU", NONE, GIVEN, NONE),
        Spec("RNN_RELU", NONE, NONE, GIVEN),
    ],
    ids=Spec.encode,
)
def test_places_that_differ(spec: Spec) -> None:
    check(spec, 5, [4] * 2)


@every_cell
def test_no_bias(spec: Spec) -> None:
    check(spec, 4, [3] * 2, bias=False)


@pytest.mark.parametrize(("spec", "few"), [(LSTM, False), (GRU, True), (RNN, False)])
def test_packed(spec: Spec, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, with programs for more than the rows of a step, or for as many."""
    monkeypatch.setattr(graphs, "SHORTEST", 100 if few else 2)
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    monkeypatch.setattr(operator, "time_chunks", lambda sizes, *_: time_chunks(sizes, 8))
    check(spec, 5, [4, 4, 3, 2])


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_packed_with_given_statistics(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    check(with_given(CELLS[cell]), 5, [3, 2, 1])


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        (LSTM, [11, 6]),
        (GRU, [6] * 2),
        (RNN, [11, 7, 3]),
        pytest.param(Spec("LSTM", BATCH, GIVEN, NONE), [11] * 2, marks=pytest.mark.slow),
        pytest.param(Spec("LSTM", GIVEN, BATCH, GIVEN), [11] * 2, marks=pytest.mark.slow),
    ],
)
def test_more_rows_than_registers_hold(
    spec: Spec, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 4 rows, the last of which is not full."""
    monkeypatch.setattr(batch, "MAX_ROWS", 4)
    monkeypatch.setattr(batch, "MANY", batch.Tile(4, 4, True, 1))
    assert batch.tile(sizes[0]).many
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    check(spec, 5, sizes)


@every_cell
def test_rows_shared_among_programs(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SHARED_ROWS", 4)
    check(with_given(spec), 5, [11] * 2)


def test_bfloat16() -> None:
    check(LSTM, 20, [17] * 2, products=BF16)


def test_inference_gives_the_same_numbers() -> None:
    sizes = [3, 3, 2]
    for spec in CELLS.values():
        o = as_float32(operands(spec, 5, sizes))
        kept, not_kept = ({}, {})  # type: tuple[dict[str, Tensor], dict[str, Tensor]]
        a = by_engine(spec, o, sizes, found=kept)
        b = by_engine(spec, o, sizes, save=False, found=not_kept)
        assert all(map(torch.equal, a, b))
        assert all(torch.equal(kept[name], not_kept[name]) for name in kept)


def test_gradients_that_nobody_wants() -> None:
    """What is not asked for does not change the others; sums over rows have memory of their own."""
    sizes = [3]
    for spec in (LSTM, GRU):
        o = as_float32(operands(spec, 5, sizes))
        all_of_them = with_gradients(by_engine, spec, o, sizes, seed=1)
        names = [name for name in Operands._fields if getattr(o, name) is not None]
        for name in names[::3]:
            alone = Operands(*(None if b is None else b.detach() for b in o))
            alone = alone._replace(**{name: getattr(o, name)})
            results = by_engine(spec, alone, sizes)
            generator = torch.Generator().manual_seed(1)
            grads = [torch.randn(r.shape, dtype=F64, generator=generator).float() for r in results]
            (found,) = torch.autograd.grad(results, [getattr(o, name)], grads)
            assert torch.equal(found, all_of_them[f"d {name}"])


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        pytest.param(GRU, [4, 3, 3, 2, 2], marks=pytest.mark.slow),
        (Spec("RNN_TANH", NONE, NONE, GIVEN), [2] * 5),
    ],
    ids=["packed", "given"],
)
def test_graphs_give_the_same_numbers(
    spec: Spec, sizes: list[int], recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other tensors at other places, and for statistics of later steps."""
    monkeypatch.setattr(graphs, "LENGTHS", (2, 1))
    monkeypatch.setattr(graphs, "SHORTEST", 2)
    given = given_for(spec, 4, rows=len(sizes))

    def everything(o: Operands) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        run = functools.partial(by_engine, given=given, found=found)
        return with_gradients(run, spec, o, sizes, seed=1) | found

    inputs = [as_float32(operands(spec, 4, sizes, seed=seed)) for seed in range(2)]
    wanted = [everything(o) for o in inputs]
    assert recorded.replays == 0
    monkeypatch.setattr(steps, "may_replay", lambda a: True)
    everything(inputs[0])
    for o, numbers in zip(inputs, wanted, strict=True):
        found = everything(o)
        assert all(torch.equal(found[name], numbers[name]) for name in numbers)
    assert recorded.replays > 0


@pytest.mark.parametrize("layer", [LSTMLayer, GRULayer])
def test_layers(layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(TritonEngine, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(registry, "KERNELS", [Recurrence(ENGINE)])
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
