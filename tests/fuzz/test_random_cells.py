"""Generated kernels of random cells against float64; none may be wrong."""

from __future__ import annotations

import copy
import random
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import generic_loop
from cell_cases import random_layer
from engines import names_of
from layer_results import randomised, results_of
from torch import Tensor, nn

from ln_zoo.kernels.generated import engine
from ln_zoo.kernels.native import runtime
from ln_zoo.kernels.native.compiler import COMPILE, NATIVE, Unavailable, find_compiler

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
    layer.recompute = draw.choice((0, 0, 1, 2, 3))
    whole = lengths is not None or reset is not None or layer.bidirectional or layer.noise
    by_steps = not whole and draw.random() < 0.5

    def results(of: Any, x: Any) -> dict[str, Tensor]:
        def call(x: Any, hx: Any) -> Any:
            if not by_steps:
                return of(x, hx, reset=reset)
            outputs = []
            for row in x.split(1):
                output, hx = of(row, hx)
                outputs.append(output)
            return torch.cat(outputs), hx

        return results_of(of, x, call=call)

    results(layer, x)
    randomised(layer, 0.1)  # in place: what the layer remembers of calls must not have old values
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


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles with fewer optimisations, with the standard headers compiled once; GCC alone.

    Compiling sLSTM takes 1.2 s of processor time instead of 2.6 s.
    """
    runtime.library()  # as usual
    folder = tmp_path_factory.mktemp("headers")
    header = folder / "standard.h"
    sources = [Path(engine.__file__).parent, Path(runtime.__file__).parent]
    text = "".join(file.read_text() for source in sources for file in source.glob("*.h"))
    header.write_text(
        "\n".join(sorted(set(re.findall("^#include <[a-z_.]+>", text, re.MULTILINE))))
    )
    command, flags = find_compiler().command, (*COMPILE, *NATIVE.flags, "-fopenmp", "-O1")
    subprocess.run(
        [*command, *flags, "-x", "c++-header", header, "-o", f"{header}.gch"], check=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", shlex.join([*command, "-include", str(header)]))
        patch.setenv("LN_ZOO_CXXFLAGS", "-O1")
        patch.setenv("LN_ZOO_CACHE", str(folder))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand(hundred: int, chosen: list[Any], quick_compiler: None) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        check(seed)
    assert set(names_of(chosen)) <= {"generated", None}
    assert names_of(chosen).count("generated") >= 100
