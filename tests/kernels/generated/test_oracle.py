"""The cells of ln_zoo, generated from their steps, against the hand-written kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accuracy import error
from engines import names_of
from layer_results import randomised, results_of

from ln_zoo.layers import RecurrentLayer
from ln_zoo.norms import LayerNorm, RMSNorm
from ln_zoo.ops import CELLS

NORMS = (LayerNorm(eps=1e-3), LayerNorm(per_gate=True), RMSNorm(eps=1e-3))
#: In the fast suite, with the first norm.
FAST = ("LSTM", "Dreamer's GRU with a bias inside the norm")


def case(name: str, norm: Any) -> Any:
    fast = name in FAST and norm is NORMS[0]
    return pytest.param(name, norm, marks=() if fast else pytest.mark.slow)


CASES = [case(name, norm) for name in CELLS for norm in NORMS]


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_as_the_hand_written_kernels(
    name: str, norm: Any, monkeypatch: pytest.MonkeyPatch, chosen: list[Any]
) -> None:
    torch.manual_seed(0)
    layer = randomised(RecurrentLayer(3, 20, cell=CELLS[name], norm=norm, zoneout=0.2), 0.2)
    x = torch.randn(6, 5, 3)
    found = results_of(layer, x)
    monkeypatch.setenv("LN_ZOO_KERNELS", "native")
    expected = results_of(layer, x)
    assert names_of(chosen) == ["generated", "native"]
    for key, a in expected.items():
        if a.norm() > 1e-3:  # a bias before a norm that centres has no gradient
            assert error(found[key], a) < 3e-4, key
