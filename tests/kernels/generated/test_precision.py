"""Half precision: float32 kernels with rounded results, and products in bfloat16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accuracy import error, generic_loop
from engines import names_of
from layer_results import randomised, results_of
from own_cell import MGU

from ln_zoo.kernels.generated import binding
from ln_zoo.kernels.native import build, mixed_precision
from ln_zoo.norms import LayerNorm


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
