"""Metrics of `ln_zoo.callbacks.WeightGeometry`: reader, tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ln_zoo.plots.csv_log import read_curves
from ln_zoo.plots.figures import new_figure, save_figure
from ln_zoo.utils.tables import markdown_table, write_csv

#: Quantities logged for each weight, and their labels.
QUANTITIES = {
    "norm": "length of weight vectors",
    "turn": "turn per update (degrees)",
    "effective_lr": "effective learning rate",
}
#: Statistics over the vectors of a weight.
STATISTICS = ("mean", "q10", "q50", "q90")
#: Prefix of all logged names.
PREFIX = "weights/"

#: Updates and values by weight, quantity and statistic.
Geometry = dict[str, dict[str, dict[str, tuple[list[int], list[float]]]]]


def parse_name(name: str) -> tuple[str, str, str] | None:
    """Weight, quantity and statistic of a logged name; None for names of other callbacks."""
    weight, _, kind = name.removeprefix(PREFIX).rpartition("/")
    quantity, _, statistic = kind.rpartition("_")
    known = quantity in QUANTITIES and statistic in STATISTICS
    return (weight, quantity, statistic) if name.startswith(PREFIX) and weight and known else None


def read_geometry(metrics: Path) -> Geometry:
    """Read the metrics of `WeightGeometry` from a ``metrics.csv``; empty if there are none."""
    geometry: Geometry = {}
    for name, curve in read_curves(metrics).items():
        parsed = parse_name(name)
        if parsed is not None:
            weight, quantity, statistic = parsed
            geometry.setdefault(weight, {}).setdefault(quantity, {})[statistic] = curve
    # Incomplete sets of metrics belong to another callback.
    return {
        weight: quantities
        for weight, quantities in geometry.items()
        if all(len(quantities.get(each, ())) == len(STATISTICS) for each in QUANTITIES)
    }


def geometry_table(runs: Mapping[str, Geometry]) -> str:
    """Markdown table of medians over units at the first and last measurement, by label."""
    head = ["weight", "", "updates"]
    for what in QUANTITIES.values():
        head += [f"{what}: first", "last", "last / first"]
    rows = []
    for weight in _weights(runs):
        for label, geometry in runs.items():
            if weight not in geometry:
                continue
            steps, _ = geometry[weight]["norm"]["q50"]
            cells = [weight, label, f"{steps[0]} to {steps[-1]}"]
            for quantity in QUANTITIES:
                _, values = geometry[weight][quantity]["q50"]
                ratio = values[-1] / values[0] if values[0] else float("nan")
                cells += [f"{values[0]:.3g}", f"{values[-1]:.3g}", f"{ratio:.3g}"]
            rows.append(cells)
    return markdown_table(head, rows, numeric=len(head) - 2)


def write_geometry(runs: Mapping[str, Geometry], path: Path) -> None:
    """Write a CSV file: label, weight, update, and a column per quantity and statistic."""
    names = [(quantity, statistic) for quantity in QUANTITIES for statistic in STATISTICS]
    rows = []
    for label, geometry in runs.items():
        for weight, quantities in geometry.items():
            curves = [quantities[quantity][statistic] for quantity, statistic in names]
            for number, step in enumerate(curves[0][0]):
                values = [f"{curve[1][number]:.5g}" for curve in curves]
                rows.append([label, weight, step, *values])
    write_csv(path, ["label", "weight", "step", *map("_".join, names)], rows)


def plot_weight_geometry(runs: Mapping[str, Geometry], picture: Path, title: str = "") -> None:
    """Draw the quantities of each weight by update, a row per weight.

    Lines are medians over units, bands the middle 80 %.
    """
    weights = _weights(runs)
    figure = new_figure(4 * len(QUANTITIES), 2.6 * len(weights), title)
    axes = figure.subplots(len(weights), len(QUANTITIES), squeeze=False, sharex=True)
    for row, weight in zip(axes, weights, strict=True):
        for axis, (quantity, what) in zip(row, QUANTITIES.items(), strict=True):
            for number, (label, geometry) in enumerate(runs.items()):
                if weight not in geometry:
                    continue
                curves = geometry[weight][quantity]
                steps, median = curves["q50"]
                colour = f"C{number}"
                axis.plot(steps, median, label=label, color=colour, linewidth=1.5)
                band = curves["q10"][1], curves["q90"][1]
                axis.fill_between(steps, *band, color=colour, alpha=0.15, linewidth=0)
            axis.set_title(f"{weight}: {what}", fontsize="small")
            axis.grid(alpha=0.3)
            if quantity != "norm" and _positive(runs, weight, quantity):
                axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("update")
    if any(runs):
        axes[0][0].legend(fontsize="small")
    save_figure(figure, picture, dpi=90)


def _weights(runs: Mapping[str, Geometry]) -> Sequence[str]:
    return list(dict.fromkeys(weight for geometry in runs.values() for weight in geometry))


def _positive(runs: Mapping[str, Geometry], weight: str, quantity: str) -> bool:
    return all(
        value > 0
        for geometry in runs.values()
        if weight in geometry
        for statistic in ("q10", "q50", "q90")
        for value in geometry[weight][quantity][statistic][1]
    )
