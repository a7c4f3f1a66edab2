"""``ln-zoo analyze dynamics``: how stable hidden-to-hidden dynamics are."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_zoo.cli.checks import check_least, check_positive
from ln_zoo.cli.help import DefaultsFormatter
from ln_zoo.cli.names import layer_class, norm_class
from ln_zoo.zoo import trust

if TYPE_CHECKING:
    from ln_zoo.analysis import Dynamics

#: Options of untrained layers and of trained models, which parsers leave out unless given: so that
#: those given in vain can be told.
_UNTRAINED: dict[str, Any] = {
    "cell": ["LSTM", "GRU", "RNN"],
    "norm": ["LayerNorm", "RMSNorm", "BatchNorm", "WeightNorm", "Identity"],
    "gains": [0.1, 0.5, 1.0],
    "start": "torch",
    "recurrent_scale": 1.0,
    "hidden": 256,
    "features": 256,
    "noise": 0.1,
}
_TRAINED: dict[str, Any] = {"statistics": "kept", "root": None}


def add_parser(analyses: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to those of ``ln-zoo analyze``."""
    parser = analyses.add_parser(
        "dynamics",
        help="whether perturbations of hidden states grow or shrink, by method and gain",
        description="Measures how small perturbations of the hidden states (Lyapunov "
        "exponents) and gradients grow per step, in float64. By default it "
        "measures untrained layers that read standard normal numbers. With "
        "--weights or --ckpt it measures the layers of trained models, on test "
        "images or lines of handwriting, and of the same models before training.",
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=200, help="largest number of time steps")
    parser.add_argument("--batch", type=int, default=16, help="largest number of sequences")
    parser.add_argument(
        "--exponents", type=int, default=1, help="how many exponents to compute, the largest first"
    )
    parser.add_argument(
        "--skip",
        type=int,
        help="initial steps that the table leaves out; default: a quarter of all",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights, inputs and perturbations"
    )
    parser.add_argument("--out", default="dynamics.png", help="picture to write (.png, .svg)")
    parser.add_argument("--csv", help="table to write: layer, step, perturbation, gradient norm")
    _add_options_of_untrained(parser)
    _add_options_of_trained(parser)
    parser.set_defaults(run=_dynamics)


def _add_options_of_untrained(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("untrained layers")

    def add(name: str, text: str, **options: Any) -> None:
        default = _UNTRAINED[name]
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        text = f"{text} (default: {shown})"
        group.add_argument(f"--{name}", default=argparse.SUPPRESS, help=text, **options)

    add(
        "cell",
        "kinds of layers: LSTM, GRU, RNN, or class paths of your own",
        nargs="+",
        metavar="NAME",
    )
    add(
        "norm",
        "norms of ln_zoo.norms, or class paths of your own",
        nargs="+",
        metavar="NAME",
    )
    add(
        "gains",
        "initial gains, or lengths of weight vectors under weight norm",
        nargs="+",
        type=float,
        metavar="GAIN",
    )
    add(
        "start",
        "weights: torch's own, or orthogonal ones with these for the candidate state",
        choices=("torch", "orthogonal", "identity"),
    )
    add("recurrent_scale", "multiplies the recurrent weights", type=float)
    add("hidden", "size of the states", type=int)
    add("features", "size of each input", type=int)
    add("noise", "standard deviation of the initial states", type=float)


def _add_options_of_trained(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trained models")
    group.add_argument(
        "--weights", nargs="+", metavar="NAME", default=[], help="names of published models"
    )
    group.add_argument(
        "--ckpt", nargs="+", metavar="FILE", default=[], help="checkpoints of trained models"
    )
    trust.add_import_option(group)
    group.add_argument(
        "--statistics",
        choices=("kept", "batch"),
        default=argparse.SUPPRESS,
        help="statistics for batch norm: kept, the running averages, or batch, those of the batch, "
        f"as for untrained layers (default: {_TRAINED['statistics']})",
    )
    group.add_argument(
        "--root",
        default=argparse.SUPPRESS,
        help="folder of the data that the models read, MNIST or IAM-OnDB; default: "
        "mnist or iam_ondb in $LN_ZOO_DATA, else, for MNIST, a download from the "
        "hub",
    )


def _dynamics(arguments: argparse.Namespace) -> None:
    trained = bool(arguments.weights or arguments.ckpt)
    _refuse_foreign_options(arguments, trained)
    arguments = argparse.Namespace(**(_UNTRAINED | _TRAINED | vars(arguments)))
    check_least(arguments, hidden=1, features=1, noise=0, steps=2, batch=1, exponents=1)
    check_positive(arguments, "gains", "recurrent_scale")
    from ln_zoo.analysis import dynamics_table, write_dynamics
    from ln_zoo.plots import plot_dynamics

    if trained:
        trust.import_own(arguments)
        from ln_zoo.cli.trained_dynamics import trained_dynamics

        found, title = trained_dynamics(arguments)
        print(title)
    else:
        found, title = list(_untrained(arguments)), _described(arguments)
        print(f"{title}, {arguments.steps} steps")
    print(f"\n{dynamics_table(found)}")
    plot_dynamics(found, Path(arguments.out), title)
    if arguments.csv:
        write_dynamics(found, Path(arguments.csv))


def _refuse_foreign_options(arguments: argparse.Namespace, trained: bool) -> None:
    """Raises ValueError for options of untrained layers beside trained models, and the reverse."""
    foreign = [f"--{name}" for name in (_UNTRAINED if trained else _TRAINED) if name in arguments]
    if foreign and trained:
        raise ValueError(
            f"{', '.join(foreign)}: only for untrained layers; models given by --weights or "
            "--ckpt are measured as they are"
        )
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)}: only for trained models; give them by --weights or --ckpt"
        )


def _described(arguments: argparse.Namespace) -> str:
    scale = arguments.recurrent_scale
    return (
        f"H = {arguments.hidden}, {arguments.features} standard normal inputs per step, "
        f"{arguments.start} weights"
        + (f", recurrent ones times {scale:g}" if scale != 1 else "")
        + f", {arguments.batch} sequences"
    )


def _untrained(arguments: argparse.Namespace) -> Iterator[Dynamics]:
    import torch

    from ln_zoo.analysis import initial_dynamics

    norms = [norm_class(name) for name in arguments.norm]
    cells = [layer_class(name) for name in arguments.cell]
    generator = torch.Generator().manual_seed(arguments.seed)
    size = (arguments.steps, arguments.batch, arguments.features)
    inputs = torch.randn(size, generator=generator, dtype=torch.float64)
    for cell in cells:
        yield from initial_dynamics(
            inputs,
            cell,
            arguments.hidden,
            norms,
            arguments.gains,
            arguments.start,
            arguments.recurrent_scale,
            arguments.noise,
            arguments.exponents,
            arguments.skip,
            arguments.seed,
        )
