"""``ln-zoo compare``: learning curves of several runs in one picture and one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ln_zoo.cli.commands import Picture


def compare(
    runs: list[str],
    *,
    metric: list[str] | None = None,
    x: Literal["epoch", "step", "seconds"] = "epoch",
    steps_to: list[list[str]] = [],  # noqa: B006
    log_x: bool = False,
    out: Picture = Path("compare.png"),
    csv: Path | None = None,
    band: bool = False,
    title: str = "",
    activity: bool = False,
    weight_geometry: bool = False,
) -> None:
    """Draws learning curves of several runs.

    Each label has the median of its runs, at the epochs or updates that all of them logged, and a
    faint line for each run.

    Args:
        runs: [LABEL=]RUN, a run's folder with metrics.csv; if there are several =, the longest RUN
            that exists counts; runs with one label should differ only in their seed; default label:
            the name of the parent folder
        metric: metrics to draw, one panel each; 'A|B' (quoted) falls back to B for runs that did
            not log A, as in 'val_batch_accuracy|val_accuracy'; default: those of our models, or the
            first two of validation
        x: x axis: epoch; step for updates, as logged by StepEvaluation; seconds for training time,
            as measured by StepEvaluation
        steps_to: METRIC VALUE ...: print the number of updates until the metric is first at or
            below each value (at or above, if higher is better), among the logged evaluations; may
            be given more than once
        log_x: use a logarithmic axis, without 0
        out: picture to write (.png or .svg)
        csv: table to write: label, run, epoch or step, and one column per metric; --steps_to writes
            a second table, whose name ends in _steps_to
        band: draw the range of the runs instead of each run
        title: title of the picture
        activity: compare activity.csv of the callback ActivityByPosition, in place of curves
        weight_geometry: compare lengths and turns of weight vectors, as logged by the callback
            WeightGeometry, in place of curves; one run per label
    """
    from ln_zoo.plots.comparison import default_metrics, draw, read_run, summary, write_csv

    if activity:
        return _compare_activity(runs, out, title)
    if weight_geometry:
        return _compare_weight_geometry(runs, out, title, csv)
    metrics = metric or default_metrics(runs, x)
    asked = [_metric_and_values(given) for given in steps_to]
    read = [read_run(text, metrics, x) for text in runs]
    # --steps_to needs curves by updates, with any x axis.
    by_step = [[read_run(text, [name], "step") for text in runs] for name, _ in asked]
    draw(read, metrics, out, title, x, log_x, band)
    print(summary(read, metrics, x))
    if asked:
        from ln_zoo.sweeps.speed import steps_table, write_steps_csv

        for (name, values), members in zip(asked, by_step, strict=True):
            print(f"\n{steps_table(members, name, values)}")
    if csv:
        write_csv(read, metrics, csv, x)
        if asked:
            write_steps_csv(by_step, asked, csv.with_stem(f"{csv.stem}_steps_to"))


def _metric_and_values(given: Sequence[str]) -> tuple[str, list[float]]:
    metric, *values = given
    try:
        numbers = [float(value) for value in values]
    except ValueError as error:
        raise ValueError(f"--steps_to takes a metric and then numbers: {error}") from error
    if not numbers:
        raise ValueError(f"--steps_to {metric}: give the values to reach after the metric")
    return metric, numbers


def _compare_activity(texts: Sequence[str], picture: Path, title: str) -> None:
    from ln_zoo.plots.activity import activity_table, plot_activities, read_activity
    from ln_zoo.plots.comparison import find_run

    runs: dict[str, list[Path]] = {}
    for text in texts:
        label, file = find_run(text, "activity.csv")
        runs.setdefault(label, []).append(file)
    read = {label: read_activity(files) for label, files in runs.items()}
    plot_activities(read, picture, title)
    print(activity_table(read))


def _compare_weight_geometry(
    texts: Sequence[str], picture: Path, title: str, table: Path | None
) -> None:
    from ln_zoo.plots.comparison import find_run
    from ln_zoo.plots.weight_geometry import (
        geometry_table,
        plot_weight_geometry,
        read_geometry,
        write_geometry,
    )

    runs = {}
    for text in texts:
        label, file = find_run(text, "metrics.csv")
        if label in runs:
            raise ValueError(f"--weight_geometry takes one run per label, {label} has two")
        runs[label] = read_geometry(file)
        if not runs[label]:
            raise ValueError(f"{file} has no columns of the callback WeightGeometry")
    plot_weight_geometry(runs, picture, title)
    print(geometry_table(runs))
    if table is not None:
        write_geometry(runs, table)
