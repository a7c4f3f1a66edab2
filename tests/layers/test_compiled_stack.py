"""A deep layer and a head under ``torch.compile`` with inductor: one graph, made in seconds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from accuracy import assert_as_accurate, generic_loop, moved
from torch import Tensor, nn

from ln_zoo import LSTM, LayerNorm
from ln_zoo.ops.engines.native import build


class Tagger(nn.Module):
    """Six layers of 256 units, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = LSTM(64, 256, num_layers=6, norm=LayerNorm())
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x)
        return self.head(output)


def results(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = run(x)
    output.mul(torch.linspace(-1, 1, output.numel()).to(x).view_as(output)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found | {"output": output.detach(), "x": x.grad}


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
    start = processor_seconds()
    found = results(torch.compile(model, fullgraph=True), model, x)
    seconds = processor_seconds() - start

    def loop(run: int) -> dict[str, Tensor]:
        with generic_loop():
            return results(model, model, moved(x, run))

    with generic_loop():
        exact = results(double, double, x.double())
    assert_as_accurate(found, exact, loop)
    assert seconds < 20
