"""What resets and noise in the recurrence cost a training step of a layer-normalised layer.

``python -m benchmarks.options`` prints a table: each option as a ratio to the same layer without,
on whatever kernel runs it and on the generic loop.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import Size, limited_to
from benchmarks.timing import interleave
from ln_zoo.layers import GRU, LSTM
from ln_zoo.norms import LayerNorm

#: What is timed: arguments of the layer, and the share of steps that are reset.
OPTIONS: dict[str, tuple[dict[str, float], float | None]] = {
    "plain": ({}, None),
    "reset, 1 step of 1000": ({}, 1e-3),
    "reset, 1 step of 50": ({}, 0.02),
    "reset, 1 step of 5": ({}, 0.2),
    "weight_dropout": ({"weight_dropout": 0.5}, None),
    "recurrent_dropout": ({"recurrent_dropout": 0.3}, None),
    "zoneout": ({"zoneout": 0.1}, None),
}


def training_step(cell: str, size: Size, option: str) -> Callable[[], object]:
    """A function that runs the layer forward and backward once."""
    arguments, share = OPTIONS[option]
    torch.manual_seed(0)
    layer: Any = {"LSTM": LSTM, "GRU": GRU}[cell](size.I, size.H, norm=LayerNorm(), **arguments)
    x = torch.randn(size.T, size.B, size.I, requires_grad=True)
    reset: Tensor | None = None if share is None else torch.rand(size.T, size.B) < share

    def step() -> None:
        output, _ = layer(x, reset=reset)
        output.sum().backward()

    return step


def measure(cell: str, size: Size, rounds: int, seconds: float) -> dict[str, tuple[float, float]]:
    """For each option the median ratio to the plain layer, on kernels and on the generic loop."""
    found: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for kernels in (None, "0"):
        with limited_to(kernels):
            calls = {name: training_step(cell, size, name) for name in OPTIONS}
            times = interleave(calls, rounds, seconds)
            plain = times["plain"].wall
            for name, ratios in found.items():
                pairs = zip(times[name].wall, plain, strict=True)
                ratios.append(statistics.median(a / b for a, b in pairs))
    return {name: (kernel, loop) for name, (kernel, loop) in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", nargs="+", choices=("LSTM", "GRU"), default=["LSTM", "GRU"])
    parser.add_argument("--size", default="64,32,256,256", help="T,B,I,H")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each option, at most")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    size = Size(*map(int, given.size.split(",")))
    print("| cell | option | to the kernel without | to the generic loop without |")
    print("|---|---|---:|---:|")
    for cell in given.cells:
        for name, ratios in measure(cell, size, given.rounds, given.seconds).items():
            print(f"| {cell} | {name} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
