"""Packed sequences of uneven lengths, against the same batch padded, on the CPU.

``python -m benchmarks.packed --csv docs/figures/packed_speed.csv`` prints a table and writes a row
for each contestant; ratios are to `torch.nn`'s layer on the padded batch, without normalisation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from benchmarks import contestants, runner
from benchmarks.contestants import BASELINE, Contestant, Size, limited_to

SIZES = ("50,64,256,256", "100,8,400,400", "500,16,64,128", "1000,16,32,64", "20,8,32,32")
MODES = ("train", "infer")
#: By name: a contestant of `benchmarks.contestants`, and whether its input is packed. The plain
#: layer is measured on each kernel that may run it, and as ln_zoo chooses.
CONTESTANTS = {
    "torch, padded": (BASELINE, False),
    "torch, packed": (BASELINE, True),
    "none, packed": ("Identity", True),
    "none/native, packed": ("Identity/native", True),
    "LayerNorm, padded": ("LayerNorm/native", False),
    "LayerNorm, packed": ("LayerNorm/native", True),
}


def lengths(size: Size) -> Tensor:
    """How long each sequence is, (B,): from 1 to T, all alike likely, and one of T."""
    found = torch.randint(1, size.T + 1, (size.B,), generator=torch.Generator().manual_seed(0))
    found[0] = size.T
    return found


def call(contestant: Contestant, size: Size, mode: str, packed: bool) -> Callable[[], Tensor]:
    """A training step, or inference, on a batch of such lengths; packing it is part of it."""
    torch.manual_seed(1)
    training = mode == "train"
    x = torch.randn(size.T, size.B, size.I, requires_grad=training)
    module = contestant.module.train(training)
    parameters = [x, *module.parameters()]
    long = lengths(size)
    gradient = torch.randn(int(long.sum()) if packed else size.T * size.B, size.H)

    def run() -> Tensor:
        given: Tensor | PackedSequence = x
        if packed:
            given = pack_padded_sequence(x, long, enforce_sorted=False)
        with limited_to(contestant.kernels):
            output = module(given)[0]
        found: Tensor = output.data if packed else output.flatten(0, 1)
        return found

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        output = run()
        output.backward(gradient)
        return output

    return step if training else torch.no_grad()(run)


def measure(cell: str, size: Size, mode: str, given: argparse.Namespace) -> list[runner.Row]:
    """A row for each contestant."""
    calls = {
        name: call(contestants.layer(of, cell, size, mode == "train"), size, mode, packed)
        for name, (of, packed) in CONTESTANTS.items()
    }
    filled = round(float(lengths(size).float().mean()) / size.T, 2)
    found = runner.compare(calls, "torch, padded", vars(size), given)
    return [{"cell": cell, "mode": mode, "filled": filled} | row for row in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the file."""
    parser = runner.parser("packed", __doc__, rounds=9, seconds=2.0, threads=2)
    parser.add_argument("--cells", nargs="+", choices=("LSTM", "GRU"), default=["LSTM", "GRU"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="T,B,I,H")
    given = runner.parse(parser, arguments)
    runner.print_head(("mode", "cell", "T,B,I,H", *CONTESTANTS))
    found: list[runner.Row] = []
    for mode in given.modes:
        for cell in given.cells:
            for size in map(Size.parse, given.sizes):
                new = measure(cell, size, mode, given)
                first = f"{1000 * new[0]['seconds']:.2f} ms"
                runner.print_row((mode, cell, size, first, *map(runner.ratio, new[1:])))
                found += new
                runner.write(found, given.csv)


if __name__ == "__main__":
    main()
