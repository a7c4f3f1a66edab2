"""Records in the terms of kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ln_zoo.ops import CELLS, RowNorm, Weights
from ln_zoo.ops.cells import Cell
from ln_zoo.ops.engines.base import centred
from ln_zoo.ops.lowering import kernel_terms, make_spec, unsupported_reason
from ln_zoo.ops.precision import product_dtype
from ln_zoo.ops.spec import Examples, Rows, Spec

F64 = torch.float64
H = 3
GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
every_cell = pytest.mark.parametrize("cell", GATES)


def weights(cell: str, **options: Any) -> Weights:
    G = GATES[cell] * H
    rand = torch.Generator().manual_seed(1)
    shapes = ((G, 2), (G, H), (G,), (G,))
    ih, hh, bias_ih, bias_hh = (torch.randn(s, generator=rand, dtype=F64) for s in shapes)
    return Weights(ih, hh, bias_ih, bias_hh)._replace(**options)


def record(groups: tuple[int, ...], seed: int = 2, **options: Any) -> RowNorm:
    generator = torch.Generator().manual_seed(seed)
    features = sum(groups)
    gain, shift = torch.randn(2, features, generator=generator, dtype=F64)
    return replace(RowNorm(groups, True, True, 1e-5, gain, shift), **options)


def records(cell: str, **options: Any) -> dict[str, RowNorm]:
    places = CELLS[cell].places
    return {
        place.role: record(tuple(n * H for n in place.groups), seed, **options)
        if place.sums
        else RowNorm(tuple(n * H for n in place.groups))
        for seed, place in enumerate(places)
    }


def states(cell: str) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(4, H, dtype=F64) for _ in CELLS[cell].states)


@pytest.mark.parametrize("eps", [0.0, 1e-5, math.pi * 1e-7, 0.1 + 0.2])
def test_specs_survive_as_numbers(eps: float) -> None:
    spec = Spec("GRU", Rows(True, False, eps, (2, 1)), Rows(), Rows(True, True, 1.0, (1,)))
    assert Spec.of_numbers(*spec.numbers()) == spec


def test_zoneout_survives_as_numbers() -> None:
    spec = Spec("LSTM", Rows(), Rows(), Rows(True, True, 1.0, (1,)), (0.1 + 0.2, 1e-7))
    assert Spec.of_numbers(*spec.numbers()) == spec


NONE, CENTRED, BATCH = Rows(), Rows(True, True, 1e-5, (4,)), Examples(True, 1e-5)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        *(
            (Spec(cell, NONE, NONE, NONE, shares), "zoneout")
            for cell, shares in (
                *(("LSTM", (1.5, 0.0)), ("LSTM", (0.0, -0.1)), ("LSTM", (math.nan, 0.0))),
                ("GRU", (0.1, 0.1)),
            )
        ),
        (Spec("light GRU", NONE, NONE, NONE, joint=True), "light GRU.*joint"),
        (Spec("RNN_TANH", NONE, NONE, NONE, joint=True), "RNN_TANH.*joint"),
        (Spec("LSTM", CENTRED, CENTRED, NONE, joint=True), "joint"),
        (Spec("GRU", NONE, NONE, NONE, carried=True), "GRU.*carried"),
        (Spec("LSTM", NONE, NONE, NONE, carried=True), "carried"),
        (Spec("light GRU", BATCH, NONE, NONE), "light GRU.*examples"),
        (Spec("LSTM", NONE, BATCH, NONE, joint=True), "examples"),
        (Spec("LSTM", BATCH, CENTRED, NONE), "rows.*examples"),
        (Spec("GRU", CENTRED, NONE, NONE), r"\(4,\).*3 gates"),
    ],
)
def test_specifications_that_no_engine_computes(spec: Spec, named: str) -> None:
    """Zoneout that is no probability, and forms that a cell lacks."""
    with pytest.raises(ValueError, match=named):
        Spec.of_numbers(*spec.numbers())


def test_numbers_that_are_no_specification() -> None:
    integers, floats = Spec("LSTM", CENTRED, NONE, NONE).numbers()
    for wrong in ((integers[1:], floats), (integers, floats[1:]), ((-1, *integers[1:]), floats)):
        with pytest.raises(ValueError, match="numbers"):
            Spec.of_numbers(*wrong)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN_TANH"])
def test_biases_and_shifts_become_one_vector(cell: str) -> None:
    given, w = records(cell), weights(cell)
    x = torch.ones(5, 4, 2, dtype=F64)
    spec, operands = kernel_terms(CELLS[cell], given, w, x, states(cell))
    one = Rows(True, True, 1e-5, (1,))
    if cell == "RNN_TANH":
        assert spec == Spec(cell, Rows(), Rows(), one)
        wanted = w.bias_ih + w.bias_hh + given["sum"].shift, None, given["sum"].gain, None
    else:
        first, second = w.bias_ih + given["input"].shift, w.bias_hh + given["recurrent"].shift
        assert torch.equal(operands.gain_input, given["input"].gain)
        if cell == "LSTM":
            assert spec == Spec(cell, *(Rows(True, True, 1e-5, (4,)),) * 2, one)
            wanted = first + second, None, given["cell"].gain, given["cell"].shift
        else:
            assert spec.input == Rows(True, True, 1e-5, (2, 1))
            both = torch.cat([(first + second)[: 2 * H], first[2 * H :]])
            wanted = both, second[2 * H :], None, None
    found = operands.bias, operands.bias_hn, operands.gain_out, operands.shift_out
    for one, two in zip(found, wanted, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)


@every_cell
def test_identity_has_no_vectors_and_bare_norms_have_ones(cell: str) -> None:
    w = weights(cell, bias_ih=None, bias_hh=None)
    x = torch.ones(5, 4, 2, dtype=F64)
    plain = {role: RowNorm(r.groups, gain=r.gain) for role, r in records(cell).items()}
    spec, operands = kernel_terms(CELLS[cell], plain, w, x, states(cell))
    assert spec == Spec(cell, Rows(), Rows(), Rows())
    assert all(a is None for a in operands[5:])

    bare = {
        role: r if r.identity else replace(r, gain=None, shift=None)
        for role, r in records(cell).items()
    }
    spec, operands = kernel_terms(CELLS[cell], bare, w, x, states(cell))
    for rows, gain in (
        (spec.input, operands.gain_input),
        (spec.recurrent, operands.gain_recurrent),
        (spec.out, operands.gain_out),
    ):
        assert (gain is not None) == rows.scale
        assert gain is None or (gain == 1).all()
    if cell == "LSTM":
        assert not operands.shift_out.any()


@every_cell
def test_precisions(cell: str) -> None:
    def dtypes(dtype: torch.dtype) -> set[tuple[torch.dtype, torch.dtype]]:
        w = Weights(*(a.to(dtype) for a in weights(cell)[:4]))
        x = torch.ones(5, 4, 2, dtype=dtype)
        start = tuple(s.to(dtype) for s in states(cell))
        _, operands = kernel_terms(CELLS[cell], records(cell), w, x, start)
        narrow = {a.dtype for a in operands[:3]}
        wide = {a.dtype for a in operands[3:] if a is not None}
        return set(zip(narrow, wide, strict=True))

    bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    assert dtypes(f32) == {(f32, f32)}
    assert dtypes(F64) == {(F64, F64)}
    assert dtypes(bf16) == {(bf16, f32)}
    with torch.autocast("cpu", bf16):
        assert dtypes(f32) == {(bf16, f32)}
        assert dtypes(f16) == {(bf16, f32)}
        assert dtypes(F64) == {(F64, F64)}
        assert product_dtype(torch.ones(1, dtype=F64)) == F64


def test_refusals_have_reasons() -> None:
    def why(cell: str, change: dict[str, Any], **options: Any) -> str:
        given = records(cell) | change
        return str(
            unsupported_reason(CELLS[cell], [records(cell), given], [weights(cell, **options)] * 2)
        )

    assert why("LSTM", {}) == "None"
    hr = torch.zeros(2, H)
    assert "projected" in why("LSTM", {}, hr=hr)
    assert "input site" in why("GRU", {"input": None})
    assert "recurrent site" in why("GRU", {"recurrent": record((2 * H + 1, H - 1))})
    assert "do not fit" in why("GRU", {"input": record((3 * H, H))})
    assert "term of the sum" in why("RNN_RELU", {"input": record((H,))})
    other = Cell("MUT1", CELLS["GRU"].step, CELLS["GRU"].places)
    assert "MUT1" in str(unsupported_reason(other, [records("GRU")], [weights("GRU")]))


def test_groups_may_be_any_unions_of_gates() -> None:
    given = records("LSTM") | {"input": record((H, 3 * H)), "recurrent": record((H,) * 4)}
    assert unsupported_reason(CELLS["LSTM"], [given], [weights("LSTM")]) is None
    spec = make_spec(CELLS["LSTM"], given, weights("LSTM"))
    assert (spec.input.groups, spec.recurrent.groups) == ((1, 3), (1, 1, 1, 1))


@pytest.mark.parametrize("groups", [(4,), (2, 2), (1, 2, 1)])
def test_centring_is_a_projection_and_its_own_adjoint(groups: tuple[int, ...]) -> None:
    rows = Rows(True, True, 1e-5, groups)
    w, d = torch.randn(2, 12, 5, dtype=F64)
    once = centred(w, rows)
    for part in once.split([3 * n for n in groups]):
        assert part.mean(0).abs().max() < 1e-15
    torch.testing.assert_close(centred(once, rows), once)
    torch.testing.assert_close((centred(w, rows) * d).sum(), (w * centred(d, rows)).sum())
    for other in (Rows(), Rows(True, False, 1e-5, groups)):
        assert centred(w, other) is w


def test_means_of_half_precision_are_taken_in_float32() -> None:
    w = (torch.randn(4096, 3) + 40).bfloat16()
    mean = centred(w, Rows(True, True, 1e-5, (1,))).float().mean(0)
    assert mean.abs().max() < 2e-3
