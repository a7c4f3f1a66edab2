"""Updates until a run reaches a value, as a table and as CSV."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ln_zoo.plots.comparison import Curve, LoggedRun, cell, groups, plain_name, shared
from ln_zoo.utils import tables
from ln_zoo.zoo.reported import metric_unit


def higher_is_better(metric: str) -> bool:
    """Direction of a metric, by the longest known end of its name; unknown ones are losses."""
    words = metric.split("_")
    known = (metric_unit("_".join(words[first:])) for first in range(len(words)))
    return next((unit.higher_is_better for unit in known if unit.unit), False)


def best_of(metric: str) -> Callable[..., Any]:
    """`max` if higher is better, otherwise `min`."""
    return max if higher_is_better(metric) else min


def steps_to(curve: Curve, metric: str, value: float) -> float:
    """The first update at which a metric reaches a value; infinite if it never does.

    Reached is at or below the value, or at or above it if higher is better.
    """
    sign = -1 if higher_is_better(metric) else 1
    return min(
        (step for step, now in curve.items() if sign * now <= sign * value), default=math.inf
    )


def steps_table(runs: Sequence[LoggedRun], metric: str, values: Sequence[float]) -> str:
    """Markdown table by label: median (least to greatest) of the updates to each value.

    Runs that miss the value count as later than all others. The last column is the area under the
    curve: the mean of log10 of the metric over the updates that all runs of all labels share.
    """
    sign = "≥" if higher_is_better(metric) else "≤"
    name, places, rows = plain_name(metric), shared(runs, metric), []
    for label, members in groups(runs).items():
        curves = [run.curves[metric] for run in members]
        areas = [area for curve in curves if (area := _mean_log(curve, places)) is not None]
        whole = len(areas) == len(members)
        last = cell(statistics.median(areas), min(areas), max(areas)) if whole else "—"
        steps = [_steps_cell(curves, metric, value) for value in values]
        rows.append([label, str(len(members)), *steps, last])
    heads = [f"updates to {name} {sign} {value:g}" for value in values]
    return tables.markdown_table(["", "runs", *heads, f"mean log10 {name}"], rows)


def write_steps_csv(
    by_step: Sequence[Sequence[LoggedRun]],
    asked: Sequence[tuple[str, Sequence[float]]],
    path: Path,
) -> None:
    """Write the numbers of `steps_table`: a row for each run, metric and value.

    ``steps`` is empty if a run misses the value until its ``last_step``.
    """
    rows = []
    for (metric, values), runs in zip(asked, by_step, strict=True):
        places = shared(runs, metric)
        for label, members in groups(runs).items():
            for number, run in enumerate(members):
                curve = run.curves[metric]
                area = _mean_log(curve, places)
                mean = "" if area is None else f"{area:.6g}"
                for value in values:
                    steps = steps_to(curve, metric, value)
                    reached = "" if math.isinf(steps) else int(steps)
                    rows.append([label, number, metric, f"{value:g}", reached, max(curve), mean])
    head = ["label", "run", "metric", "value", "steps", "last_step", "mean_log10"]
    tables.write_csv(path, head, rows)


def _mean_log(curve: Curve, places: Sequence[int]) -> float | None:
    """Mean of log10 at these updates; ``None`` if it is undefined."""
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
