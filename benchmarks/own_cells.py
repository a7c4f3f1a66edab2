"""Own cells and an own norm on generated kernels, beside the loop, native kernels and torch's LSTM.

``python -m benchmarks.own_cells --threads 1`` prints a table; ratios are of processor time to the
native LSTM with `LayerNorm`. The bar is 1.15 in training and 1.3 in inference.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import runner
from benchmarks.contestants import Size, limited_to
from examples.cells.indrnn import IndRNN
from examples.cells.mgu import MinimalGatedUnit
from examples.cells.peephole_lstm import PeepholeLSTM
from examples.cells.slstm import SLSTM
from ln_zoo.layers import LSTM
from ln_zoo.norms import LayerNorm, Norm, Site

SIZES = ("50,64,256,256", "100,8,400,400", "200,1,128,128", "784,100,1,100")
MODES = ("train", "infer")
BASELINE = "native LN-LSTM"


@dataclass(frozen=True)
class MyNorm(Norm):
    """The norm of docs/how-to/own_norm.md."""

    eps: float = 1e-5

    def init_params(self, site: Site) -> None:
        site.add_affine(gain=1.0)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return site.affine(a * torch.rsqrt(site.mean(a * a) + self.eps))


#: By name: a constructor of layers from I and H.
OWN: dict[str, Callable[[int, int], nn.Module]] = {
    "peephole LSTM": lambda i, h: PeepholeLSTM(i, h, norm=LayerNorm()),
    "MGU": lambda i, h: MinimalGatedUnit(i, h, norm=LayerNorm()),
    "sLSTM": lambda i, h: SLSTM(i, h, norm=LayerNorm()),
    "IndRNN": lambda i, h: IndRNN(i, h, norm=LayerNorm()),
    "LSTM, own norm": lambda i, h: LSTM(i, h, norm=MyNorm()),
}


def call(module: nn.Module, size: Size, mode: str, kernels: str) -> Callable[[], Any]:
    """A training step, or inference, limited to these kernels."""
    torch.manual_seed(1)
    training = mode == "train"
    x = torch.randn(size.T, size.B, size.I, requires_grad=training)
    gradient = torch.randn(size.T, size.B, size.H)
    parameters = [x, *module.parameters()]

    def run() -> Tensor:
        with limited_to(kernels):
            output: Tensor = module(x)[0]
        return output

    def step() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        output = run()
        output.backward(gradient)
        return output

    return step if training else torch.no_grad()(run)


def calls(cell: str, size: Size, mode: str, loop: bool) -> dict[str, Callable[[], Any]]:
    """The contestants for one cell, by name."""
    torch.manual_seed(0)
    own = OWN[cell](size.I, size.H)
    baseline = LSTM(size.I, size.H, norm=LayerNorm())
    found = {
        BASELINE: call(baseline, size, mode, "native"),
        "generated": call(own, size, mode, "generated"),
        "torch LSTM": call(nn.LSTM(size.I, size.H), size, mode, "0"),
    }
    return found | ({"loop": call(own, size, mode, "0")} if loop else {})


def measure(cell: str, size: Size, mode: str, given: argparse.Namespace) -> list[runner.Row]:
    """A row for each contestant."""
    found = runner.compare(calls(cell, size, mode, not given.no_loop), BASELINE, vars(size), given)
    return [{"cell": cell, "mode": mode} | row for row in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the file."""
    parser = runner.parser("own_cells", __doc__, rounds=9, seconds=2.0, threads=1)
    parser.add_argument("--cells", nargs="+", choices=list(OWN), default=list(OWN))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="T,B,I,H")
    parser.add_argument("--no-loop", action="store_true", help="leave out the generic loop")
    given = runner.parse(parser, arguments)
    columns = [BASELINE, "generated", "torch LSTM", *([] if given.no_loop else ["loop"])]
    runner.print_head(("mode", "cell", "T,B,I,H", *columns))
    found: list[runner.Row] = []
    for mode in given.modes:
        for cell in given.cells:
            for size in map(Size.parse, given.sizes):
                new = measure(cell, size, mode, given)
                first = f"{1000 * new[0]['seconds']:.2f} ms"
                ratios = [runner.ratio(row, "cpu") for row in new[1:]]
                runner.print_row((mode, cell, size, first, *ratios))
                found += new
                runner.write(found, given.csv)


if __name__ == "__main__":
    main()
