"""How many updates runs take to reach a value, as a table and as CSV."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from ln_zoo.plots.comparison import Curve, Run, cell, groups, plain_name, shared, table_head
from ln_zoo.zoo.reported import metric_unit


def higher_is_better(metric: str) -> bool:
    """Whether it is, by the end of the metric's name; unknown ones are taken for losses."""
    words = metric.split("_")
    known = (metric_unit("_".join(words[first:])) for first in range(len(words)))
    return next((unit.higher_is_better for unit in known if unit is not None), False)


def steps_to(curve: Curve, metric: str, value: float) -> float:
    """The first update at whose evaluation the metric is at or below the value; infinity: none.

    At or above it, where higher is better.
    """
    sign = -1 if higher_is_better(metric) else 1
    return min(
        (step for step, now in curve.items() if sign * now <= sign * value), default=math.inf
    )


def steps_table(runs: Sequence[Run], metric: str, values: Sequence[float]) -> str:
    """A Markdown table for each label: median (least to greatest) of the updates to each value.

    Runs that never reach the value count as later than all others.
    The last column is the area under the curve: the mean of log10 of the metric over the updates
    that all runs of all labels share.
    """
    sign = "≥" if higher_is_better(metric) else "≤"
    name = plain_name(metric)
    head = ["", "runs", *(f"updates to {name} {sign} {value:g}" for value in values)]
    lines = table_head([*head, f"mean log10 {name}"])
    places = shared(runs, metric)
    for label, members in groups(runs).items():
        cells = [_steps_cell([run.curves[metric] for run in members], metric, v) for v in values]
        found = [_mean_log(run.curves[metric], places) for run in members]
        areas = [area for area in found if area is not None]
        whole = len(areas) == len(members)
        cells.append(cell(statistics.median(areas), min(areas), max(areas)) if whole else "—")
        lines.append(f"| {label} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_steps_csv(
    by_step: Sequence[Sequence[Run]],
    asked: Sequence[tuple[str, Sequence[float]]],
    path: Path,
) -> None:
    """Writes what `steps_table` is made of: a row for each run, metric and value.

    ``steps`` is empty where a run never gets there by its ``last_step``.
    """
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ("label", "run", "metric", "value", "steps", "last_step", "mean_log10")
        writer.writerow(names)
        for (metric, values), runs in zip(asked, by_step, strict=True):
            places = shared(runs, metric)
            for label, members in groups(runs).items():
                for number, run in enumerate(members):
                    curve = run.curves[metric]
                    area = _mean_log(curve, places)
                    for value in values:
                        steps = steps_to(curve, metric, value)
                        reached = "" if math.isinf(steps) else int(steps)
                        mean = "" if area is None else f"{area:.6g}"
                        writer.writerow(
                            [label, number, metric, f"{value:g}", reached, max(curve), mean]
                        )


def _mean_log(curve: Curve, places: Sequence[int]) -> float | None:
    """Mean of log10 over these places; ``None`` if it is undefined."""
    values = [curve[place] for place in places]
    if not values or not all(value > 0 for value in values):
        return None
    return statistics.fmean(map(math.log10, values))


def _steps_cell(curves: Sequence[Curve], metric: str, value: float) -> str:
    steps = [steps_to(curve, metric, value) for curve in curves]
    ends = [max(c) for c, step in zip(curves, steps, strict=True) if math.isinf(step)]

    def text(number: float) -> str:
        return f"{number:g}" if math.isfinite(number) else f"> {min(ends)}"

    median = text(statistics.median(steps))
    reached = f"{len(steps) - len(ends)} of {len(steps)} runs"
    if len(ends) == len(steps):
        return f"{median} ({reached})"
    cell = f"{median} ({text(min(steps))} to {text(max(steps))})"
    return f"{cell}, {reached}" if ends else cell
