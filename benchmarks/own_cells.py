"""Own cells and an own norm on generated kernels, beside the loop, native kernels and torch's LSTM.

``python -m benchmarks.own_cells --threads 1`` prints a table; ratios are of processor time to the
native LSTM with `LayerNorm`. The bar is 1.15 in training and 1.3 in inference. ``--cells LSTM GRU
RNN`` compares generated kernels of these cells with the hand-written ones of the same cell.

The block GRU has RMS norm and 8 blocks, 4 of 100 units. It is compared with our native GRU with
`LayerNorm` and torch's plain one, both with full recurrent weights, and with a loop over steps by
einsums over blocks.

``--errors 8`` prints, for each cell and norm, how many times the generic loop's error that of the
generated kernel is, both in float32 against the loop in float64: of output and gradients the
largest geometric mean over 8 seeds. An error is the length of the difference; of one seed it is
mostly luck, since the state space may multiply a rounding, and so may be 3 times the loop's or a
third.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import runner
from benchmarks.contestants import Size, limited_to
from benchmarks.naive import BlockGRUCell, Loop
from examples.cells.indrnn import IndRNN
from examples.cells.mgu import MinimalGatedUnit
from examples.cells.peephole_lstm import PeepholeLSTM
from ln_zoo.layers import GRU, LSTM, RNN, SLSTM, RecurrentLayer
from ln_zoo.norms import LayerNorm, Norm, RMSNorm, Site

BLOCKS = 8
SIZES = ("50,64,256,256", "100,8,400,400", "200,1,128,128", "784,100,1,100")
MODES = ("train", "infer")
BASELINE = "native"


@dataclass(frozen=True)
class MyNorm(Norm):
    """The norm of docs/how-to/own_norm.md."""

    eps: float = 1e-5

    def init_params(self, site: Site) -> None:
        site.add_affine(gain=1.0)

    def normalize(self, site: Site, a: Tensor, step: int | None = None) -> Tensor:
        return site.affine(a * torch.rsqrt(site.mean(a * a) + self.eps))


class BlockGRU(GRU):
    """A GRU with `BLOCKS` blocks, or as many as divide its units."""

    def __init__(self, input_size: int, hidden_size: int, **options: Any) -> None:
        super().__init__(input_size, hidden_size, blocks=math.gcd(BLOCKS, hidden_size), **options)


#: Layer and norm by name.
OWN: dict[str, tuple[type[RecurrentLayer], Norm]] = {
    "peephole LSTM": (PeepholeLSTM, LayerNorm()),
    "MGU": (MinimalGatedUnit, LayerNorm()),
    "sLSTM": (SLSTM, LayerNorm()),
    "IndRNN": (IndRNN, LayerNorm()),
    "block GRU": (BlockGRU, RMSNorm()),
    "LSTM, own norm": (LSTM, MyNorm()),
}
#: Cells that have hand-written kernels.
KNOWN: dict[str, tuple[type[RecurrentLayer], Norm]] = {
    layer.__name__: (layer, LayerNorm()) for layer in (LSTM, GRU, RNN)
}
#: Norms of the table of errors.
NORMS: dict[str, Norm] = {
    "LayerNorm": LayerNorm(),
    "per gate": LayerNorm(per_gate=True),
    "RMSNorm": RMSNorm(),
    "own norm": MyNorm(),
}
#: Size of the table of errors: many rows, over which gradients of parameters are sums.
ERRORS_SIZE = Size(T=100, B=100, I=4, H=40)


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
    layer, norm = (OWN | KNOWN)[cell]
    own = layer(size.I, size.H, norm=norm)
    in_blocks = isinstance(own, BlockGRU)
    known, norm = KNOWN["GRU"] if in_blocks else KNOWN.get(cell, KNOWN["LSTM"])
    baseline = known(size.I, size.H, norm=norm)
    plain = (nn.GRU if in_blocks else nn.LSTM)(size.I, size.H)
    found = {
        BASELINE: call(baseline, size, mode, "native"),
        "generated": call(own, size, mode, "generated"),
        f"torch {type(plain).__name__}": call(plain, size, mode, "0"),
    }
    if loop and in_blocks:
        found["einsum loop"] = call(einsum_loop(own), size, mode, "0")
    elif loop:
        found["loop"] = call(own, size, mode, "0")
    return found


def einsum_loop(layer: RecurrentLayer) -> Loop:
    """A loop over time with the weights of a new layer with RMS norm."""
    cell = BlockGRUCell(layer.input_size, layer.hidden_size, layer.blocks)
    cell.load(layer.to_cell().state_dict())
    return Loop(cell)


def results(layer: nn.Module, x: Tensor, kernels: str) -> list[Tensor]:
    """Output, and gradients of the input and of parameters."""
    x = x.clone().requires_grad_()
    with limited_to(kernels):
        output = layer(x)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    loss, sources = (output * weights).sum(), [x, *layer.parameters()]
    found = torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)
    return [output.detach(), *found]


def error_ratio(layer: type[RecurrentLayer], norm: Norm, size: Size, seeds: int) -> float:
    """Error of the generated kernel as a multiple of the loop's; see ``--errors``."""
    logarithms: list[list[float]] = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        made = layer(size.I, size.H, norm=norm)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        x = torch.randn(size.T, size.B, size.I)
        exact = results(copy.deepcopy(made).double(), x.double(), "0")
        both = [results(made, x, kernels) for kernels in ("generated", "0")]
        logarithms.append([])
        for wanted, *found in zip(exact, *both, strict=True):
            if wanted.norm() > 1e-6:  # a bias before a norm that centres has no gradient
                own, loop = (float((a.double() - wanted).norm()) for a in found)
                logarithms[-1].append(math.log(max(own, 1e-12) / max(loop, 1e-12)))
    return math.exp(max(sum(of_seeds) / seeds for of_seeds in zip(*logarithms, strict=True)))


def print_errors(cells: Sequence[str], seeds: int) -> None:
    """Print the table of errors."""
    runner.print_head(("error, times the loop's", *NORMS))
    for layer, _ in map((OWN | KNOWN).__getitem__, cells):
        found = [error_ratio(layer, norm, ERRORS_SIZE, seeds) for norm in NORMS.values()]
        runner.print_row((layer.__name__, *(f"{ratio:.2f}" for ratio in found)))


def measure(cell: str, size: Size, mode: str, given: argparse.Namespace) -> list[runner.Row]:
    """A row for each contestant."""
    found = runner.compare(calls(cell, size, mode, not given.no_loop), BASELINE, vars(size), given)
    return [{"cell": cell, "mode": mode} | row for row in found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the file."""
    parser = runner.parser("own_cells", __doc__, rounds=9, seconds=2.0, threads=1)
    parser.add_argument("--cells", nargs="+", choices=[*OWN, *KNOWN], default=list(OWN))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="T,B,I,H")
    parser.add_argument("--no-loop", action="store_true", help="leave out the generic loop")
    parser.add_argument(
        "--errors", type=int, metavar="SEEDS", help="print the table of errors instead"
    )
    given = runner.parse(parser, arguments)
    if given.errors:
        print_errors(given.cells, given.errors)
        return
    columns = [BASELINE, "generated", "torch", *([] if given.no_loop else ["loop"])]
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
