"""A deep layer and a head under ``torch.compile`` with inductor: one graph, made in seconds."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from accuracy import assert_as_accurate, generic_loop, moved
from layer_results import results_of
from torch import Tensor, nn

from ln_zoo import LSTM, LayerNorm
from ln_zoo.kernels.native import build


class Tagger(nn.Module):
    """Six layers of 256 units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = LSTM(64, 256, num_layers=6, norm=LayerNorm())
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.head(output)


def processor_seconds() -> float:
    """Of this process and of compilers that have ended, so that other work does not count."""
    return sum(os.times()[:4])


@pytest.mark.slow
@pytest.mark.skipif(not build.status().available, reason="needs the native kernels")
def test_six_layers_with_a_head_compile_in_twenty_seconds() -> None:
    build.status(build=True)  # compiling the kernels is not measured
    torch.manual_seed(0)
    model, x = Tagger(), torch.randn(30, 4, 64)
    double = copy.deepcopy(model).double()
    # With empty caches, inductor first compiles its headers and starts processes.
    torch.compile(nn.Linear(64, 10), fullgraph=True)(x).sum().backward()
    whole = torch.compile(model, fullgraph=True)
    start = processor_seconds()
    found = results_of(model, x, call=lambda x, _: whole(x))
    seconds = processor_seconds() - start

    def loop(run: int) -> dict[str, Tensor]:
        with generic_loop():
            return results_of(model, moved(x, run), call=lambda x, _: model(x))

    with generic_loop():
        exact = results_of(double, x.double(), call=lambda x, _: double(x))
    assert_as_accurate(found, exact, loop)
    assert seconds < 20
