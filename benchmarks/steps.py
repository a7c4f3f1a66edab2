"""Single steps of ln_zoo's cells against torch.nn's, by rows and units, on the CPU.

``python -m benchmarks.steps`` prints tables of ratios to `torch.nn.LSTMCell` and `torch.nn.GRUCell`
without normalisation, as in reinforcement learning with many environments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import runner
from benchmarks.contestants import BASELINE, Contestant, Size, cell_step, limited_to
from ln_zoo.layers import LSTMCell

ROWS = (1, 2, 4, 5, 8, 16, 32, 64, 128, 256)
UNITS = (128, 256, 512, 1024)
MODES = ("inference", "training")


def step_of(contestant: Contestant, size: Size, training: bool) -> Callable[[], Tensor]:
    """A function that runs one step from given states, and its backward in training; returns h."""
    torch.manual_seed(1)
    x = torch.randn(size.B, size.I, requires_grad=training)
    h, c = (torch.randn(size.B, size.H, requires_grad=training) for _ in range(2))
    gradient = torch.randn(size.B, size.H)
    module = contestant.module.train(training)
    lstm = isinstance(module, nn.LSTMCell | LSTMCell)
    state = (h, c) if lstm else h
    leaves = [x, h, c, *module.parameters()]

    def call() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        with limited_to(contestant.kernels), torch.set_grad_enabled(training):
            after = module(x, state)
        after = after[0] if lstm else after
        if training:
            after.backward(gradient)
        return after

    return call


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each cell and mode."""
    parser = runner.parser("steps", __doc__, rounds=15, seconds=2.0, threads=1)
    parser.add_argument("--cells", nargs="+", choices=("LSTM", "GRU"), default=["LSTM", "GRU"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--units", nargs="+", type=int, default=list(UNITS), help="I = H")
    parser.add_argument("--contestant", default="LayerNorm", help="a norm of ln_zoo")
    given = runner.parse(parser, arguments)
    table: list[runner.Row] = []
    for cell in given.cells:
        for mode in given.modes:
            print(
                f"\n{cell}Cell, {mode}, {given.contestant}: ratio of processor time (quartiles)\n"
            )
            runner.print_head(["rows", *(f"H = {units}" for units in given.units)])
            for rows in given.rows:
                found = []
                for units in given.units:
                    size = Size(1, rows, units, units)
                    calls = {
                        name: step_of(cell_step(name, cell, size), size, mode == "training")
                        for name in (BASELINE, given.contestant)
                    }
                    new = runner.compare(calls, BASELINE, vars(size), given)
                    table += [{"cell": cell, "mode": mode} | row for row in new]
                    found.append(runner.ratio(new[-1], "cpu"))
                runner.print_row([rows, *found])
    runner.write(table, given.csv)


if __name__ == "__main__":
    main()
