"""Generated Triton kernels on a GPU: the numbers of the generic loop, launched and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import error
from engines import names_of
from kernels.generated.generated_case import packed
from kernels.generated.test_triton import LAYERS
from layer_results import randomised, results_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_numbers_of_the_generic_loop(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch, chosen: list[Any]
) -> None:
    torch.manual_seed(0)
    layer = randomised(LAYERS[name](40), 0.2).cuda()
    for _ in range(3):  # launched, captured, replayed
        x = torch.randn(85, 5, 3, device="cuda")
        given = packed(x, [85, 85, 70, 70, 3]) if layout == "packed" else x
        monkeypatch.setenv("LN_ZOO_KERNELS", "generated")
        found = results_of(layer, given)
        monkeypatch.setenv("LN_ZOO_KERNELS", "0")
        expected = results_of(layer, given)
        assert names_of(chosen)[-2:] == ["generated", None]
        for key, a in expected.items():
            if a.norm() > 1e-3:
                assert error(found[key], a) < 1e-3, key
