"""Generated kernels of random cells against float64; none may be wrong."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from accuracy import generic_loop
from cell_cases import random_layer
from engines import names_of
from layer_results import randomised, results_of
from torch import Tensor, nn

from ln_zoo.kernels.generated import engine
from ln_zoo.kernels.native.compiler import Unavailable, find_compiler

#: The error allowed, as a part of the largest element, and as a multiple of the loop's.
LEAST, FACTOR = 1e-4, 30.0


@pytest.fixture(autouse=True)
def only_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(error.reason)
    monkeypatch.setenv("LN_ZOO_KERNELS", "generated")
    monkeypatch.setattr(engine, "LEAST_STEPS", 1)


def check(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layer: Any = randomised(random_layer(seed), 0.3)
    x: Any = torch.randn(5, 4, 3)
    lengths = None
    if draw.random() < 0.3:
        lengths = torch.tensor(sorted((draw.randint(1, 5) for _ in range(4)), reverse=True))
        x = nn.utils.rnn.pack_padded_sequence(x, lengths)
    reset = torch.rand(5, 4) < 0.3 if draw.random() < 0.2 and lengths is None else None

    def results(of: Any, x: Any) -> dict[str, Tensor]:
        return results_of(of, x, call=lambda x, hx: of(x, hx, reset=reset))

    found = results(layer, x)
    with generic_loop():
        loop = results(layer, x)
        exact = copy.deepcopy(layer).double()
        wide = x.double() if lengths is None else x._replace(data=x.data.double())
        expected = results(exact, wide)
    for name, a in expected.items():
        scale = float(a.abs().max())
        error = float((found[name].double() - a).abs().max())
        own = float((loop[name].double() - a).abs().max())
        assert error <= max(LEAST * max(scale, 1e-3), FACTOR * own), (seed, name, error, own, scale)


@pytest.mark.parametrize("seed", range(4))
def test_a_few(seed: int, chosen: list[Any]) -> None:
    check(seed)
    assert "generated" in names_of(chosen)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand(hundred: int, chosen: list[Any]) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(seed)
    assert set(names_of(chosen)) <= {"generated", None}
    assert names_of(chosen).count("generated") >= 100
