"""``ln-zoo analyze invariance``: the paper's Table 1, computed."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from ln_zoo.cli.help import DefaultsFormatter
from ln_zoo.cli.names import norm_class


def add_parser(analyses: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to those of ``ln-zoo analyze``."""
    parser = analyses.add_parser(
        "invariance",
        help="what a layer's output is invariant to, by method",
        description="Computes Table 1 of the layer normalization paper: transforms the weights "
        "and data of a random layer in float64, compares its outputs, and checks "
        "them against what each norm declares. The picture shows how much eps "
        "affects the invariance to rescaled weights.",
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--norm",
        nargs="+",
        metavar="NAME",
        default=["BatchNorm", "WeightNorm", "LayerNorm", "RMSNorm", "Identity"],
        help="classes of ln_zoo.norms, or class paths of your own, such as my_norm.MyNorm",
    )
    parser.add_argument(
        "--eps",
        type=_eps,
        default="0",
        help="eps of all norms; 'shipped' keeps the default of each",
    )
    parser.add_argument(
        "--format",
        choices=("rich", "markdown", "latex", "csv"),
        default="rich",
        help="format of the table on standard output; rich is for a terminal",
    )
    parser.add_argument("--examples", type=int, default=16, help="number of inputs, N")
    parser.add_argument("--inputs", type=int, default=8, help="size of each input, I")
    parser.add_argument("--features", type=int, default=6, help="number of units, F")
    parser.add_argument(
        "--factors",
        nargs="+",
        type=float,
        metavar="FACTOR",
        default=[0.25, 3.0],
        help="factors for weights and data; the table has the greatest deviation",
    )
    parser.add_argument(
        "--weight_scale",
        type=float,
        default=1.0,
        help="factor for the weights before measuring: at 1e-3 the usual eps matters",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and data")
    parser.add_argument("--out", default="invariance.png", help="picture to write (.png, .svg)")
    parser.add_argument("--csv", help="table to write, with the numbers of the picture")
    parser.set_defaults(run=_invariance)


def _eps(text: str) -> float | None:
    if text == "shipped":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number >= 0, or 'shipped'; got {text!r}")
    return value


def _invariance(arguments: argparse.Namespace) -> None:
    for name, least in {"examples": 2, "inputs": 1, "features": 2}.items():
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    if not 0 < arguments.weight_scale < math.inf:
        raise ValueError(f"--weight_scale must be positive, got {arguments.weight_scale:g}")
    from rich.console import Console

    from ln_zoo.analysis import (
        eps_effect,
        invariance_table,
        random_inputs,
        write_eps_effect,
    )
    from ln_zoo.plots import plot_eps_effect

    norms = [norm_class(name)() for name in arguments.norm]
    inputs = random_inputs(arguments.examples, arguments.inputs, arguments.seed)
    features, factors, seed = arguments.features, arguments.factors, arguments.seed
    table = invariance_table(
        norms, arguments.eps, inputs, features, factors, arguments.weight_scale, seed
    )
    if arguments.format == "rich":
        Console(highlight=False).print(table)
    else:
        print(getattr(table, arguments.format)())
    effects, refused = [], []
    for norm in norms:
        try:  # without eps there is nothing to draw: they are drawn as shipped then
            shown = arguments.eps or None
            effects += eps_effect(norm, shown, factors, inputs=inputs, features=features, seed=seed)
        except ValueError as error:
            refused.append(str(error))
    if not effects:
        print("\n".join([f"no {arguments.out} written", *refused]), file=sys.stderr)
        return
    title = "How far eps spoils the invariance to rescaled weights"
    plot_eps_effect(effects, Path(arguments.out), title)
    if arguments.csv:
        write_eps_effect(effects, Path(arguments.csv))
