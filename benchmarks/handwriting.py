"""A training step of handwriting synthesis against three layers of `torch.nn.LSTM`, on the CPU.

``python -m benchmarks.handwriting`` times, in turn, the forward and backward pass of the model with
layer normalisation and without, and of torch's layers with the same inputs (x, the layer below, and
a window that is given) and the same output layer, which have no window to move and no mixture. It
prints ratios by round; see ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import memory, runner
from ln_zoo.models import Handwriting
from ln_zoo.norms import Identity, LayerNorm, Norm

BASELINE = "torch.nn"
NORMS: dict[str, Norm] = {"LayerNorm": LayerNorm(), "none": Identity()}
_SENTENCE = "the quick brown fox jumps over the lazy dog"


class TorchLayers(nn.Module):
    """What the network is without its window: three LSTM layers and the output layer."""

    def __init__(self, hidden: int, letters: int, outputs: int) -> None:
        super().__init__()
        widths = [3 + letters] + [3 + hidden + letters] * 2
        self.layers = nn.ModuleList(nn.LSTM(width, hidden) for width in widths)
        self.output = nn.Linear(3 * hidden, outputs)

    def forward(self, points: Tensor, windows: Tensor) -> Tensor:
        """Outputs (T, N, O) of points (T, N, 3) and windows (T, N, E)."""
        outputs: list[Tensor] = []
        for layer in self.layers:
            parts = [points, *outputs[-1:], windows]
            outputs.append(layer(torch.cat(parts, -1))[0])
        found: Tensor = self.output(torch.cat(outputs, -1))
        return found


def contestants(steps: int, examples: int, hidden: int) -> dict[str, Callable[[], object]]:
    """A training step of each, by name: forward and backward, gradients of all parameters."""
    torch.manual_seed(0)
    offsets = torch.randn(examples, steps + 1, 3)
    offsets[..., 2] = (offsets[..., 2] > 1.75).float()
    # 22 points a character, as in IAM-OnDB.
    texts = tuple((_SENTENCE * 100)[n : n + max(1, steps // 22)] for n in range(examples))
    batch = (offsets, torch.full((examples,), steps), texts, True)
    calls: dict[str, Callable[[], object]] = {}
    for name, norm in NORMS.items():
        model = Handwriting(hidden_size=hidden, norm=norm)
        calls[name] = runner.training_step(model, functools.partial(model.loss, batch))
    letters = model.num_characters
    layers = TorchLayers(hidden, letters, model.output.out_features)
    points, windows = torch.randn(steps, examples, 3), torch.rand(steps, examples, letters)
    calls[BASELINE] = runner.training_step(layers, lambda: layers(points, windows).square().mean())
    return calls


def peak(name: str, arguments: argparse.Namespace) -> int:
    """Peak bytes of a training step, above what the process held before."""
    # What is made once per process (threads, compiled code, tables of libraries) does not count.
    contestants(20, arguments.batch, arguments.hidden)[name]()
    step = contestants(arguments.steps, arguments.batch, arguments.hidden)[name]
    return memory.of_step(step)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns its exit code."""
    parser = runner.parser("handwriting", __doc__, rounds=9, seconds=120)
    parser.add_argument("--steps", type=int, default=500, help="points T of each line")
    parser.add_argument("--batch", type=int, default=8, help="lines N")
    parser.add_argument("--hidden", type=int, default=400, help="units H of each layer")
    parser.add_argument("--peak", metavar="NAME", help="print the bytes that one takes, and end")
    arguments = runner.parse(parser, argv)
    if arguments.peak:
        print(peak(arguments.peak, arguments))
        return 0
    calls = contestants(arguments.steps, arguments.batch, arguments.hidden)
    sizes = {"T": arguments.steps, "N": arguments.batch, "H": arguments.hidden}
    found = runner.compare(calls, BASELINE, sizes, arguments)
    options = ("steps", "batch", "hidden", "threads")
    peaks = memory.of_contestants("benchmarks.handwriting", calls, options, arguments)
    for row in found:
        row["peak_ratio"] = peaks[row["contestant"]] / peaks[BASELINE] if peaks else None
    runner.report(found, sizes, arguments.csv, {"peak memory": ("peak_ratio", ".2f")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
