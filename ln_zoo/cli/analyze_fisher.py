"""``ln-zoo analyze fisher``: the geometry of learning, claim by claim."""

from __future__ import annotations

import argparse
from pathlib import Path

from ln_zoo.cli.help import DefaultsFormatter


def add_parser(analyses: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to those of ``ln-zoo analyze``."""
    parser = analyses.add_parser(
        "fisher",
        help="the Fisher information of normalised GLMs, compared with the paper's formulas",
        description="Tests what section 5.2 of the layer normalization paper says about the "
        "geometry of learning, on random generalised linear models in float64. It "
        "compares the formulas, as printed and corrected, with automatic "
        "differentiation, and measures the effect of the scale of weights and "
        "data.",
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--units", type=int, default=4, help="number of units, H")
    parser.add_argument("--features", type=int, default=5, help="size of the inputs, D")
    parser.add_argument("--examples", type=int, default=200, help="number of inputs, N")
    parser.add_argument(
        "--draws",
        type=int,
        default=500_000,
        help="number of sampled outputs over all examples; a tenth and a hundredth are "
        "used as well",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of models, data and sampled outputs"
    )
    parser.add_argument(
        "--format",
        choices=("rich", "markdown", "csv"),
        default="rich",
        help="format of the table on standard output; rich is for a terminal",
    )
    parser.add_argument("--out", default="fisher.png", help="picture to write (.png, .svg)")
    parser.add_argument("--csv", help="table to write, with the numbers of the picture")
    parser.set_defaults(run=_fisher)


def _fisher(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from ln_zoo.analysis import study_fisher, write_fisher_curves
    from ln_zoo.plots import plot_fisher

    sizes = (arguments.units, arguments.features, arguments.examples)
    study = study_fisher(*sizes, arguments.draws, arguments.seed)
    if arguments.format == "rich":
        Console(highlight=False).print(study)
    else:
        print(getattr(study, arguments.format)())
    models = "GLMs of {} units, {} inputs, {} examples".format(*sizes)
    plot_fisher(study, Path(arguments.out), f"Fisher information of normalised {models}")
    if arguments.csv:
        write_fisher_curves(study, Path(arguments.csv))
