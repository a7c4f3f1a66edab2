"""Measurements of `ln_zoo.callbacks.ActivityByPosition` as CSV, table and pictures."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ln_zoo.plots.figures import new_figure, save_figure
from ln_zoo.utils.tables import markdown_table, write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Quantities measured at each position, and their axis labels.
QUANTITIES = {
    "active": "share of units that are on",
    "variance": "variance of normalised pre-activations",
    "rare": "share of units that are rarely on",
}
#: Below this share of examples a unit (one channel at one position) counts as rarely on.
RARELY = 0.05


@dataclass(frozen=True)
class Activity:
    """Activity at each position of a layer's output; all (H, W) float64."""

    active: Tensor  #: share of examples and channels with an output above zero
    variance: Tensor  #: of the normalised pre-activations over examples, mean over channels
    #: Share of channels with an output above zero for less than `RARELY` of the examples.
    rare: Tensor

    def rings(self, quantity: str) -> list[float]:
        """Mean of a quantity over each ring of positions, from the border to the centre."""
        values = getattr(self, quantity)
        ring = rings(*values.shape)
        return [float(values[ring == number].mean()) for number in range(int(ring.max()) + 1)]


def rings(height: int, width: int) -> Tensor:
    """Distance of each position from the border, (H, W); 0 at the border."""
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    from_rows = torch.minimum(rows, height - 1 - rows)
    return torch.minimum(from_rows, torch.minimum(columns, width - 1 - columns))


def write_activity(activities: Mapping[str, Activity], path: Path) -> None:
    """Write a CSV row for each position of each layer."""
    rows = (
        [layer, row, column, number, *(getattr(a, q)[row, column].item() for q in QUANTITIES)]
        for layer, a in activities.items()
        for row, numbers in enumerate(rings(*a.active.shape).tolist())
        for column, number in enumerate(numbers)
    )
    write_csv(path, ["layer", "row", "column", "ring", *QUANTITIES], rows)


def read_activity(paths: Sequence[Path]) -> dict[str, Activity]:
    """Read files of `write_activity` and average them over runs."""
    runs = [_read(path) for path in paths]
    shapes = [{layer: a.active.shape for layer, a in run.items()} for run in runs]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"the layers of these runs differ: {', '.join(map(str, paths))}")
    return {
        layer: Activity(
            *(torch.stack([getattr(run[layer], q) for run in runs]).mean(0) for q in QUANTITIES)
        )
        for layer in runs[0]
    }


def _read(path: Path) -> dict[str, Activity]:
    values: dict[str, list[list[float]]] = {}
    heights = {}
    with path.open(newline="") as file:
        try:
            for line in csv.DictReader(file):
                # Files of 0.2.0 and before have no `rare`.
                found = {"rare": "nan", **line}
                values.setdefault(line["layer"], []).append([float(found[q]) for q in QUANTITIES])
                heights[line["layer"]] = int(line["row"]) + 1
            return {
                layer: Activity(*table.unflatten(1, (heights[layer], -1)))
                for layer, rows in values.items()
                for table in [torch.tensor(rows, dtype=torch.float64).T]
            }
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is not an activity.csv of ActivityByPosition") from error


def ratio(activity: Activity, quantity: str) -> float:
    """Border ring relative to the centre; NaN if the centre is 0."""
    of_rings = activity.rings(quantity)
    border, centre = of_rings[0], of_rings[-1]
    return border / centre if centre else float("nan")


def activity_table(runs: Mapping[str, Mapping[str, Activity]]) -> str:
    """Markdown table of border ring, centre and their ratio, by layer and label."""
    head = ["layer", ""]
    for name in QUANTITIES:
        head += [f"{name}: border", "centre", "border / centre"]
    rows = []
    for layer in _layers(runs):
        for label, activities in runs.items():
            cells = [layer, label]
            for name in QUANTITIES:
                of_rings = activities[layer].rings(name)
                numbers = (of_rings[0], of_rings[-1], ratio(activities[layer], name))
                cells += [f"{number:.4g}" for number in numbers]
            rows.append(cells)
    return markdown_table(head, rows)


def plot_activity(activities: Mapping[str, Activity], picture: Path) -> None:
    """Draw a row per layer: a map of each quantity, and its curve from border to centre."""
    figure = new_figure(13, 2.9 * len(activities))
    axes = figure.subplots(len(activities), 2 * len(QUANTITIES), squeeze=False)
    for row, (layer, activity) in zip(axes, activities.items(), strict=True):
        for number, (name, what) in enumerate(QUANTITIES.items()):
            image = _plot_map(row[number], getattr(activity, name))
            figure.colorbar(image, ax=row[number], shrink=0.8)
            row[number].set_title(f"{layer}: {what}", fontsize="small")
            curve = row[len(QUANTITIES) + number]
            curve.plot(activity.rings(name), marker=".")
            _name_ring_axes(curve, what)
            curve.set_title(f"border / centre = {ratio(activity, name):.3g}", fontsize="small")
    save_figure(figure, picture, dpi=120)


def plot_activities(
    runs: Mapping[str, Mapping[str, Activity]], picture: Path, title: str = ""
) -> None:
    """Draw several runs: for each layer, maps of active units and curves from border to centre.

    ``runs`` has results of `read_activity` by label.
    """
    layers = _layers(runs)
    columns = len(runs) + len(QUANTITIES)
    figure = new_figure(3.1 * columns, 2.9 * len(layers), title)
    axes = figure.subplots(len(layers), columns, squeeze=False)
    for row, layer in zip(axes, layers, strict=True):
        drawn = {label: activities[layer] for label, activities in runs.items()}
        shades = torch.cat([activity.active.flatten() for activity in drawn.values()])
        limits = shades.min().item(), shades.max().item()
        maps = row[: len(runs)]
        for axis, (label, activity) in zip(maps, drawn.items(), strict=True):
            image = _plot_map(axis, activity.active, *limits)
            axis.set_title(f"{layer}, {label}: units that are on", fontsize="small")
        figure.colorbar(image, ax=list(maps), shrink=0.8)
        for axis, (name, what) in zip(row[len(runs) :], QUANTITIES.items(), strict=True):
            for label, activity in drawn.items():
                found = f"{label} ({ratio(activity, name):.3g})"
                axis.plot(activity.rings(name), marker=".", label=found)
            _name_ring_axes(axis, what)
            axis.legend(title="border / centre", fontsize="x-small", title_fontsize="x-small")
    save_figure(figure, picture, dpi=120)


def _layers(runs: Mapping[str, Mapping[str, Activity]]) -> list[str]:
    named = {label: list(activities) for label, activities in runs.items()}
    first = next(iter(named.values()))
    for label, layers in named.items():
        if layers != first:
            raise ValueError(f"{label} has the layers {layers}, other runs have {first}")
    return first


def _plot_map(
    axis: Axes, values: Tensor, least: float | None = None, greatest: float | None = None
) -> Any:
    axis.set(xticks=[], yticks=[])
    return axis.imshow(values.numpy(), cmap="viridis", vmin=least, vmax=greatest)


def _name_ring_axes(axis: Axes, what: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_xlabel("distance from the border")
    axis.set_ylabel(what, fontsize="small")
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
