"""``ln-zoo analyze``: what normalisation does to networks, measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.cli import analyze_dynamics, analyze_fisher, analyze_invariance
from ln_zoo.cli.checks import check_file, check_least, check_picture, check_positive
from ln_zoo.cli.help import DefaultsFormatter
from ln_zoo.cli.names import layer_class, norm_class

if TYPE_CHECKING:
    from torch import Tensor


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="ln-zoo analyze",
        description="Analyses of normalised networks; each draws a picture and prints a table.",
        allow_abbrev=False,
    )
    analyses = parser.add_subparsers(dest="analysis", metavar="ANALYSIS", required=True)
    _add_gradient_flow(analyses)
    analyze_invariance.add_parser(analyses)
    analyze_fisher.add_parser(analyses)
    analyze_dynamics.add_parser(analyses)
    arguments = parser.parse_args(argv)
    # Of all analyses: now, not after minutes of measurement.
    check_picture("--out", Path(arguments.out))
    if arguments.csv:
        check_file(Path(arguments.csv))
    arguments.run(arguments)
    return 0


def _add_gradient_flow(analyses: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = analyses.add_parser(
        "gradient_flow",
        help="how far gradients reach back in time, by method and gain",
        description="Measures the gradients with respect to the states of untrained recurrent "
        "layers, from a softmax on the last state back to the first (Cooijmans et "
        "al. 2017, section 4), in float64. The table holds decimal logarithms of "
        "their norms.",
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cell",
        metavar="NAME",
        default="RNN",
        help="RNN (tanh), GRU, LSTM, or the class path of your own layer",
    )
    parser.add_argument(
        "--norm",
        nargs="+",
        metavar="NAME",
        default=["BatchNorm", "LayerNorm", "Identity"],
        help="classes of ln_zoo.norms, or class paths of your own",
    )
    parser.add_argument(
        "--gains",
        nargs="+",
        type=float,
        metavar="GAIN",
        default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0],
        help="initial gains; a norm that has a gain is measured with each of them",
    )
    parser.add_argument(
        "--steps", type=int, default=784, help="number of time steps, one pixel each"
    )
    parser.add_argument("--hidden", type=int, default=100, help="hidden size")
    parser.add_argument("--batch", type=int, default=100, help="number of sequences")
    parser.add_argument(
        "--candidate",
        choices=("identity", "orthogonal"),
        default="identity",
        help="initial recurrent weights of the candidate state",
    )
    parser.add_argument(
        "--noise", type=float, default=0.1, help="standard deviation of the initial states"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and states")
    parser.add_argument(
        "--data",
        choices=("pixels", "permuted", "random"),
        help="input: pixels of MNIST row by row, the same pixels in a fixed random "
        "order, or random numbers; default: pixels if $LN_ZOO_DATA has MNIST, else "
        "random",
    )
    parser.add_argument(
        "--root", help="folder of MNIST; default: $LN_ZOO_DATA/mnist, else a download from the hub"
    )
    parser.add_argument("--out", default="gradient_flow.png", help="picture to write (.png, .svg)")
    parser.add_argument("--csv", help="table to write: t and a column for each layer")
    parser.set_defaults(run=_gradient_flow)


def _gradient_flow(arguments: argparse.Namespace) -> None:
    check_least(arguments, steps=1, hidden=1, batch=1, noise=0)
    check_positive(arguments, "gains")
    from ln_zoo.analysis import (
        gradient_flow,
        gradient_flow_table,
        write_gradient_flow,
    )
    from ln_zoo.plots import plot_gradient_flow

    norms = [norm_class(name) for name in arguments.norm]
    cell = layer_class(arguments.cell)
    inputs, described = _sequences(arguments)
    flows = gradient_flow(
        inputs,
        cell,
        arguments.hidden,
        norms,
        arguments.gains,
        arguments.candidate,
        arguments.noise,
        arguments.seed,
    )
    layer = f"{cell.__name__}, H = {arguments.hidden}, {arguments.candidate} recurrent weights"
    title = f"{layer}; {described}, {arguments.batch} sequences"
    print(f"{title}\n\n{gradient_flow_table(flows)}")
    plot_gradient_flow(flows, Path(arguments.out), title)
    if arguments.csv:
        write_gradient_flow(flows, Path(arguments.csv), described)


def _sequences(arguments: argparse.Namespace) -> tuple[Tensor, str]:
    """Inputs (T, N, 1), float64, and what they are."""
    from ln_zoo.analysis import random_sequences

    kind, steps = arguments.data, arguments.steps
    if kind != "random":
        from ln_zoo.data.mnist import MNIST, local_folder

        kind = kind or ("pixels" if local_folder(arguments.root, "mnist") else "random")
    if kind == "random":
        return random_sequences(steps, arguments.batch, seed=arguments.seed), "random numbers"
    if steps > 784:
        raise ValueError(f"images of MNIST have 784 pixels, got --steps {steps}")
    most = MNIST.source_size - 1  # one at least is held out for validation
    if arguments.batch > most:
        raise ValueError(
            f"--batch may be {most} at most, by the training images of MNIST, got {arguments.batch}"
        )
    data = MNIST(arguments.root, train_size=arguments.batch, val_size=1)
    data.prepare_data()
    data.setup()
    images, _ = next(iter(data.train_eval_dataloader(arguments.batch)))
    pixels = images.flatten(1).T.unsqueeze(-1).double()
    if kind == "pixels":
        return pixels[:steps], "MNIST, pixels in order"
    from ln_zoo.models import SequenceClassifier

    return pixels[SequenceClassifier.random_permutation()[:steps]], "MNIST, permuted pixels"
