"""What resets and noise in the recurrence cost a training step, or inference.

``python -m benchmarks.options`` prints a table: each option as a ratio to the same layer without,
on the fastest kernel and on the generic loop. ``--memory`` adds the ratio of peak memory, each
option in a process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import memory, runner
from benchmarks.contestants import Size, limited_to
from ln_zoo.layers import GRU, LSTM, SLSTM, DreamerV3GRU
from ln_zoo.norms import Identity, LayerNorm

#: What is timed: arguments of the layer, and the share of steps that are reset.
OPTIONS: dict[str, tuple[dict[str, float], float | None]] = {
    "plain": ({}, None),
    "reset, 1 step of 1000": ({}, 1e-3),
    "reset, 1 step of 50": ({}, 0.02),
    "reset, 1 step of 5": ({}, 0.2),
    "weight_dropout": ({"weight_dropout": 0.5}, None),
    "recurrent_dropout": ({"recurrent_dropout": 0.3}, None),
    "zoneout": ({"zoneout": 0.1}, None),
    **{f"recompute={k}": ({"recompute": k}, None) for k in (16, 64, 256)},
}


CELLS = {"LSTM": LSTM, "GRU": GRU, "SLSTM": SLSTM, "DreamerV3GRU": DreamerV3GRU}
#: What the values of ``LN_ZOO_KERNELS`` are called in the table.
NAMES = {"1": "the fastest kernel", "0": "the generic loop"}


@dataclass(frozen=True)
class Setting:
    """What every option is timed with.

    Args:
        cell: a key of `CELLS`.
        size: steps, examples, inputs, hidden units.
        norm: ``"layer"`` or ``"none"``.
        training: whether a call is a training step, or inference.
        input: ``"features"``, which get a gradient, or ``"data"``.
    """

    cell: str
    size: Size
    norm: str = "layer"
    training: bool = True
    input: str = "features"


def call_of(setting: Setting, option: str) -> Callable[[], object]:
    """A function that runs the layer once: forward and backward, or forward in evaluation."""
    size, training = setting.size, setting.training
    arguments, share = OPTIONS[option]
    torch.manual_seed(0)
    # With gains of 1, gradients of an LSTM are infinite after 2,000 steps.
    norm = {"layer": LayerNorm(gain=0.5), "none": Identity()}[setting.norm]
    layer: Any = CELLS[setting.cell](size.I, size.H, norm=norm, **arguments)
    layer.train(training)
    x = torch.randn(size.T, size.B, size.I, requires_grad=training and setting.input != "data")
    reset: Tensor | None = None if share is None else torch.rand(size.T, size.B) < share

    def call() -> None:
        with torch.set_grad_enabled(training):
            output, _ = layer(x, reset=reset)
        if training:
            output.sum().backward()

    return call


def measure(
    setting: Setting, options: Sequence[str], kernels: str, given: argparse.Namespace
) -> list[runner.Row]:
    """A row for each option with its ratio to the layer without, on one choice of kernels."""
    with limited_to(kernels):
        calls = {name: call_of(setting, name) for name in ("plain", *options)}
        _, *found = runner.compare(calls, "plain", vars(setting.size), given)
    return [{"cell": setting.cell, "kernels": kernels} | row for row in found]


def peak(option: str, given: argparse.Namespace) -> int:
    """Peak bytes of a training step on the fastest kernel, above what the process held before."""
    (cell,) = given.cells
    setting = Setting(cell, given.size, given.norm, input=given.input)
    # What is made once per process (threads, tables of libraries) does not count.
    call_of(replace(setting, size=replace(given.size, T=20)), option)()
    return memory.of_step(call_of(setting, option))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = runner.parser("options", __doc__, rounds=15, seconds=20.0, threads=1)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["LSTM", "GRU"])
    parser.add_argument("--options", nargs="+", choices=list(OPTIONS)[1:], metavar="OPTION")
    parser.add_argument("--size", type=Size.parse, default="64,32,256,256", metavar="T,B,I,H")
    parser.add_argument("--norm", choices=("layer", "none"), default="layer")
    parser.add_argument("--input", choices=("features", "data"), default="features",
                        help="features, the default, get a gradient")  # fmt: skip
    parser.add_argument("--memory", action="store_true", help="peak memory of a training step too")
    parser.add_argument("--peak", metavar="OPTION", help="print the bytes that one takes, and end")
    parser.add_argument("--inference", action="store_true", help="in place of training steps")
    parser.add_argument(
        "--kernels", nargs="+", default=["1", "0"], help="values of LN_ZOO_KERNELS, a column each"
    )
    given = runner.parse(parser, arguments)
    if given.peak:
        print(peak(given.peak, given))
        return
    columns = [f"to {NAMES.get(value, value)} without" for value in given.kernels]
    runner.print_head(["cell", "option", *columns, *["peak memory"] * given.memory])
    table: list[runner.Row] = []
    for cell in given.cells:
        setting = Setting(cell, given.size, given.norm, not given.inference, given.input)
        options = given.options or list(OPTIONS)[1:]
        found = [measure(setting, options, value, given) for value in given.kernels]
        peaks: dict[str, int] = {}
        if given.memory:
            names, passed = ("plain", *options), argparse.Namespace(**vars(given) | {"cells": cell})
            shared = ("cells", "size", "norm", "input", "threads")
            peaks = memory.of_contestants("benchmarks.options", names, shared, passed)
        for each in zip(*found, strict=True):
            name = str(each[0]["contestant"])
            of_memory = [f"{peaks[name] / peaks['plain']:.3f}"] if peaks else []
            runner.print_row([cell, name, *map(runner.ratio, each), *of_memory])
        table += (row for rows in found for row in rows)
    runner.write(table, given.csv)


if __name__ == "__main__":
    main()
