"""Errors in float32; half precision with rounded results, and products in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accuracy import error, generic_loop
from cells.indrnn import IndRNN
from engines import names_of
from layer_results import randomised, results_of
from own_cell import MGU

from benchmarks import own_cells
from benchmarks.contestants import Size
from ln_zoo.kernels.generated import binding
from ln_zoo.kernels.native import build, mixed_precision
from ln_zoo.norms import LayerNorm


@pytest.mark.parametrize(("steps", "examples"), [(100, 100), (300, 2)])
def test_sums_over_many_rows_are_as_exact_as_the_loops(steps: int, examples: int) -> None:
    size = Size(T=steps, B=examples, I=4, H=40)
    assert own_cells.error_ratio(IndRNN, LayerNorm(), size, seeds=4) < 2


@pytest.mark.slow
@pytest.mark.parametrize("cell", own_cells.OWN)
@pytest.mark.parametrize("norm", own_cells.NORMS)
def test_errors_are_at_most_twice_the_loops(cell: str, norm: str) -> None:
    layer, _ = own_cells.OWN[cell]
    ratio = own_cells.error_ratio(layer, own_cells.NORMS[norm], own_cells.ERRORS_SIZE, seeds=8)
    assert ratio < 2


@pytest.fixture(params=["float32", "bfloat16"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bfloat16":
        monkeypatch.setattr(build, "bfloat16_pays", lambda: True)
        monkeypatch.setitem(mixed_precision.MIN_MULTIPLICATIONS, "layers", 0)
    return request.param


def test_autocast(products: str, chosen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = randomised(MGU(20, 40, norm=LayerNorm()))
    x = torch.randn(6, 5, 20)
    found: list[bool] = []
    is_narrow = binding.is_narrow
    monkeypatch.setattr(
        binding, "is_narrow", lambda call: found.append(is_narrow(call)) or found[-1]
    )
    with torch.autocast("cpu", torch.bfloat16):
        made = results_of(layer, x)
        with generic_loop():
            loop = results_of(layer, x)
    exact = copy.deepcopy(layer).double()
    with generic_loop():
        expected = results_of(exact, x.double())
    assert made["output"].dtype == torch.bfloat16
    assert made["h"].dtype == torch.float32
    assert set(found) == {products == "bfloat16"}
    assert names_of(chosen)[0] == "generated"
    for name, a in expected.items():
        assert error(made[name], a) < max(2 * error(loop[name], a), 0.01), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_in_half_precision(dtype: torch.dtype, products: str, chosen: list[Any]) -> None:
    torch.manual_seed(0)
    layer = randomised(MGU(20, 40, norm=LayerNorm())).to(dtype)
    x = torch.randn(6, 5, 20, dtype=dtype)
    made = results_of(layer, x)
    assert {a.dtype for a in made.values()} == {dtype}
    with generic_loop():
        expected = results_of(copy.deepcopy(layer).double(), x.double())
    for name, a in expected.items():
        assert error(made[name], a) < 0.03, name
    assert names_of(chosen)[0] == "generated"
