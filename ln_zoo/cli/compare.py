"""``ln-zoo compare``: learning curves of several runs in one picture and one table."""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = dict[int, float]

#: By the ending of a metric's name: what its axis is called, and whether it is logarithmic.
_KINDS = {"nll": ("negative log-likelihood (nats)", True), "loss": ("loss", True)}
_NAMES = {
    "epoch_train_nll": "training NLL (nats per case)",
    "epoch_train_batch_nll": "training NLL, batch statistics (nats per case)",
    "epoch_test_error": "test error",
    "epoch_test_nll": "test NLL (nats per case)",
}


@dataclass(frozen=True)
class Run:
    """One run: the label it is drawn under, its folder, its curves by metric and epoch."""

    label: str
    folder: Path
    curves: dict[str, Curve]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="ln-zoo compare",
        description="Draws learning curves of several runs: for each label the median of its "
        "runs at the epochs that all of them logged, and every run as a fainter line.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[LABEL=]RUN",
        help="a run's folder, holding metrics.csv; runs of one label differ in their seed only; "
        "default label: the name of the folder above",
    )
    parser.add_argument(
        "--metric", nargs="+", default=["epoch_train_nll", "epoch_test_error"], help="a panel each"
    )
    parser.add_argument("--out", default="compare.png", help="picture to write (.png or .svg)")
    parser.add_argument("--csv", help="table to write: label, run, epoch, and a column a metric")
    parser.add_argument("--title", default="", help="title of the picture")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(text, arguments.metric) for text in arguments.runs]
    except (OSError, ValueError) as error:
        print(f"ln-zoo compare: error: {error}", file=sys.stderr)
        return 1
    draw(runs, arguments.metric, Path(arguments.out), arguments.title)
    print(summary(runs, arguments.metric))
    if arguments.csv:
        write_csv(runs, arguments.metric, Path(arguments.csv))
    return 0


def read_run(text: str, metrics: Sequence[str]) -> Run:
    """Reads ``LABEL=RUN`` or ``RUN``, the latter a folder with a ``metrics.csv`` or such a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it does not hold one of the metrics.
    """
    label, _, path = text.rpartition("=")
    file = Path(path)
    file = file / "metrics.csv" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{path} is no run: there is no {file}")
    curves: dict[str, Curve] = {metric: {} for metric in metrics}
    with file.open(newline="") as lines:
        reader = csv.DictReader(lines)
        for row in reader:
            for metric, curve in curves.items():
                if row.get(metric):
                    # Logged with the number of the epoch it ends, counted from 0.
                    curve[int(row["epoch"]) + 1] = float(row[metric])
    for metric, curve in curves.items():
        if not curve:
            logged = sorted(set(reader.fieldnames or []) - {"epoch", "step"})
            raise ValueError(f"{file} has no {metric!r}; it has {', '.join(logged)}")
    return Run(label or file.parent.parent.name, file.parent, curves)


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by label, in the order given."""
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.label, []).append(run)
    return grouped


def spread(runs: Sequence[Run], metric: str) -> list[tuple[int, float, float, float]]:
    """Epoch, median, least and greatest value, at the epochs that all runs logged."""
    shared = sorted(set.intersection(*(set(run.curves[metric]) for run in runs)))
    rows = []
    for epoch in shared:
        values = [run.curves[metric][epoch] for run in runs]
        rows.append((epoch, statistics.median(values), min(values), max(values)))
    return rows


def summary(runs: Sequence[Run], metrics: Sequence[str]) -> str:
    """A Markdown table of the last shared epoch: median (least to greatest) for each label."""
    head = ["", "runs", "epochs", *metrics]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for label, members in groups(runs).items():
        cells = []
        last = 0
        for metric in metrics:
            last, median, least, greatest = spread(members, metric)[-1]
            cells.append(f"{median:.4g} ({least:.4g} to {greatest:.4g})")
        lines.append(f"| {label} | {len(members)} | {last} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: Sequence[Run], metrics: Sequence[str], picture: Path, title: str = "") -> None:
    """Draws a panel for each metric: the median of each label, and its runs as fainter lines."""
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    figure = Figure(figsize=(5.2 * len(metrics), 4), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        for label, members in groups(runs).items():
            epochs, medians, _, _ = zip(*spread(members, metric), strict=True)
            (line,) = axis.plot(epochs, medians, label=label, linewidth=1.8)
            for run in members if len(members) > 1 else ():
                curve = sorted(run.curves[metric].items())
                axis.plot(*zip(*curve, strict=True), color=line.get_color(), lw=0.6, alpha=0.4)
        _name_axes(axis, metric)
    axes[0].legend()
    if title:
        figure.suptitle(title)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def write_csv(runs: Sequence[Run], metrics: Sequence[str], path: Path) -> None:
    """Writes every run's curves: label, number of the run within it, epoch, the metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["label", "run", "epoch", *metrics])
        for label, members in groups(runs).items():
            for number, run in enumerate(members):
                for epoch in sorted(set().union(*run.curves.values())):
                    values = [run.curves[metric].get(epoch) for metric in metrics]
                    cells = ["" if v is None else f"{v:.6g}" for v in values]
                    writer.writerow([label, number, epoch, *cells])


def _name_axes(axis: Axes, metric: str) -> None:
    axis.set_xlabel("epoch")
    ending = metric.rsplit("_", 1)[-1]
    name, logarithmic = _KINDS.get(ending, (metric.replace("_", " "), False))
    axis.set_ylabel(_NAMES.get(metric, name))
    if logarithmic:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)
