"""Learning curves of several runs in one picture and one table."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_zoo.plots.figures import new_figure, save_figure, set_log_scale
from ln_zoo.utils import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Curve = dict[int, float]

#: Default metrics by x axis.
METRICS = {
    "epoch": ["epoch_train_nll", "epoch_test_error"],
    "step": ["step_train_nll", "step_train_error"],
    "seconds": ["step_train_nll", "step_train_error"],
}
_AXES = {"epoch": "epoch", "step": "update", "seconds": "seconds of training"}
#: Panels per row.
_PANELS = 4

#: Smallest ratio of values on a logarithmic axis; below, its ticks are unreadable.
_LOG_RANGE = 2.0
#: Label of an axis, and whether it is logarithmic, by the suffix of a metric's name.
_KINDS = {"nll": ("negative log-likelihood (nats)", True), "loss": ("loss", True)}
#: A logged metric: when, its set, and the quantity.
_LOGGED = re.compile(r"(?:epoch_|step_)?(?:(train|val|test)_)?(\w+)")
_SETS = {"train": "training ", "val": "validation ", "test": "test ", None: ""}
_QUANTITIES = {
    "nll": "NLL (nats per example)",
    "batch_nll": "NLL, batch statistics (nats per example)",
    "sequence_nll": "NLL (nats per line)",
    "token_nll": "NLL (nats per token)",
    "error": "error",
    "bound": "bound (nats per image)",
    "kl": "divergence (nats per image)",
    **{f"image_r{k}": f"image retrieval R@{k} (%)" for k in (1, 5, 10)},
    **{f"caption_r{k}": f"caption retrieval R@{k} (%)" for k in (1, 5, 10)},
    **{task: f"{task.upper()} (%)" for task in ("mr", "cr", "subj", "mpqa")},
    "sick_pearson": "SICK, Pearson's r",
    "sick_spearman": "SICK, Spearman's rho",
    "sick_mse": "SICK, mean squared error",
}

#: Labels of a legend within a panel; longer legends are placed below.
_IN_PANEL = 4


@dataclass(frozen=True)
class LoggedRun:
    """A run."""

    label: str  # of its group
    folder: Path  # of its logs
    curves: dict[str, Curve]  # values by metric, and by epoch or update
    seconds: Curve = field(default_factory=dict)  # of training by update; empty unless requested

    def seconds_at(self, update: int) -> float:
        """Seconds of training up to an update, interpolated linearly."""
        import numpy as np

        return float(np.interp(update, list(self.seconds), list(self.seconds.values())))


def read_run(text: str, metrics: Sequence[str], x: str = "epoch") -> LoggedRun:
    """Read a run.

    Args:
        text: ``LABEL=RUN`` or ``RUN``, a folder with a ``metrics.csv`` or such a file; see
            `find_run`.
        metrics: metrics to read; ``A|B`` is A, or B in rows without A.
        x: x axis, ``"epoch"``, ``"step"`` or ``"seconds"``. Under seconds, curves are by update.
    """
    label, file = find_run(text, "metrics.csv")
    return LoggedRun(label, file.parent, read_curves(file, metrics, x), read_seconds(file, x))


def default_metrics(texts: Sequence[str], x: str) -> list[str]:
    """`METRICS`, or the first two of validation if not all runs logged them."""
    logged = set.intersection(*(_columns(find_run(text, "metrics.csv")[1]) for text in texts))
    validation = sorted(name for name in logged if name.startswith(("val_", "val/")))
    return METRICS[x] if logged >= {*METRICS[x]} else validation[:2] or METRICS[x]


def _columns(file: Path) -> set[str]:
    with file.open(newline="", encoding="utf-8") as lines:
        return {*next(csv.reader(lines), ())}


def read_seconds(file: Path, x: str = "seconds") -> Curve:
    """Seconds of training by update, logged by `StepEvaluation`; empty for another ``x``."""
    name = "step_seconds"
    return dict(sorted(read_curves(file, [name], "step")[name].items())) if x == "seconds" else {}


def read_curves(file: Path, metrics: Sequence[str], x: str = "epoch") -> dict[str, Curve]:
    """Curves of a ``metrics.csv`` by metric; arguments and errors as `read_run`."""
    x = "epoch" if x == "epoch" else "step"
    curves: dict[str, Curve] = {metric: {} for metric in metrics}
    with file.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        try:
            logged = sorted(set(reader.fieldnames or []) - {"epoch", "step"})
            for row in reader:
                for metric, curve in curves.items():
                    value = next(filter(None, map(row.get, metric.split("|"))), None)
                    if value:
                        # Lightning logs the index of the epoch or update from 0, `StepEvaluation`
                        # the number of updates done.
                        done = x == "step" and metric.startswith("step_")
                        curve[int(row[x]) + (0 if done else 1)] = float(value)
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise ValueError(
                f"{file} is not a table of curves: give a run's folder, or its metrics.csv"
            ) from error
    for metric, curve in curves.items():
        if not curve:
            there = ", ".join(logged) or "no metrics at all"
            raise ValueError(f"{file} has no {metric!r}: it has {there}")
    return curves


def find_run(text: str, name: str) -> tuple[str, Path]:
    """Split ``LABEL=RUN`` or ``RUN`` into label and file; RUN is the file, or a folder with it.

    Both may contain ``=``: the longest RUN that exists counts.
    """
    parts = text.split("=")
    for i in range(len(parts)):
        path = "=".join(parts[i:])
        file = Path(path)
        file = file / name if file.is_dir() else file
        if file.is_file():
            return "=".join(parts[:i]) or file.parent.parent.name, file
    raise FileNotFoundError(f"{path} is not a run: no file {file}")


def groups(runs: Sequence[LoggedRun]) -> dict[str, list[LoggedRun]]:
    """Group runs by label, in the order given."""
    grouped: dict[str, list[LoggedRun]] = {}
    for run in runs:
        grouped.setdefault(run.label, []).append(run)
    return grouped


def median_and_range(
    runs: Sequence[LoggedRun], metric: str
) -> list[tuple[int, float, float, float]]:
    """Median, minimum and maximum at each epoch or update that all runs logged, in rows."""
    rows = []
    for place in shared(runs, metric):
        values = [run.curves[metric][place] for run in runs]
        rows.append((place, statistics.median(values), min(values), max(values)))
    if not rows:
        folders = ", ".join(str(run.folder) for run in runs)
        raise ValueError(f"{metric}: these runs logged it at no common epoch or update: {folders}")
    return rows


def summary(runs: Sequence[LoggedRun], metrics: Sequence[str], x: str = "epoch") -> str:
    """Markdown table of the last common epoch or update: median (min to max) for each label."""
    head = ["", "runs", "epochs" if x == "epoch" else "updates", *map(plain_name, metrics)]
    rows = []
    for label, members in groups(runs).items():
        ends = [median_and_range(members, metric)[-1] for metric in metrics]
        places = ", ".join(dict.fromkeys(str(place) for place, *_ in ends))
        cells = [cell(*numbers) for _, *numbers in ends]
        rows.append([label, str(len(members)), places, *cells])
    return tables.markdown_table(head, rows)


def draw(
    runs: Sequence[LoggedRun],
    metrics: Sequence[str],
    picture: Path,
    title: str = "",
    x: str = "epoch",
    log_x: bool = False,
    band: bool = False,
) -> None:
    """Draw a panel per metric: the median of each label, and its runs as thin lines.

    With ``x="seconds"``, medians over runs are at their median seconds. ``log_x`` makes the x axis
    logarithmic; ``band`` draws the range of the runs in place of lines.
    """

    def plot(axis: Axes, curve: Mapping[Any, float], **style: Any) -> Line2D:
        # Points outside a logarithmic axis would still stretch the y axis.
        shown = {place: value for place, value in curve.items() if place > 0 or not log_x}
        (line,) = axis.plot(list(shown), list(shown.values()), **style)
        return line

    def by_x(members: Sequence[LoggedRun], curve: Mapping[int, Any]) -> dict[Any, Any]:
        if x != "seconds":
            return dict(curve)
        return {statistics.median(r.seconds_at(p) for r in members): v for p, v in curve.items()}

    rows = math.ceil(len(metrics) / _PANELS)
    columns = math.ceil(len(metrics) / rows)
    figure = new_figure(5.2 * columns, 4 * rows, title)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(metrics) :]:
        axis.remove()
    for axis, metric in zip(axes, metrics, strict=False):
        drawn: list[dict[Any, float]] = []
        for label, members in groups(runs).items():
            common = median_and_range(members, metric)
            found = by_x(members, {place: row for place, *row in common if place > 0 or not log_x})
            medians = {place: values[0] for place, values in found.items()}
            # Dashed, so that a line beneath remains visible.
            style: Any = (0, (4, 4)) if any(map(partial(_alike, medians), drawn)) else "-"
            drawn.append(medians)
            color = plot(axis, medians, label=label, lw=1.8, linestyle=style).get_color()
            if band and len(members) > 1:
                _, least, greatest = zip(*found.values(), strict=True)
                axis.fill_between(list(found), least, greatest, color=color, alpha=0.2, linewidth=0)
            for run in members if len(members) > 1 and not band else ():
                curve = by_x([run], dict(sorted(run.curves[metric].items())))
                plot(axis, curve, color=color, lw=0.6, alpha=0.4)
        values = [value for run in runs for value in run.curves[metric].values()]
        # The NLL of a density may be negative.
        wide = min(values) > 0 and max(values) >= _LOG_RANGE * min(values)
        _name_axes(axis, metric, x, wide)
        if log_x:
            set_log_scale(axis, "x")
        elif x != "seconds":
            axis.xaxis.get_major_locator().set_params(integer=True)
    names = axes[0].get_legend_handles_labels()
    if len(names[1]) > _IN_PANEL:
        _name_below(figure, names, 3 * len(metrics))
    else:
        axes[0].legend()
    save_figure(figure, picture, dpi=120, quantize=True)


def _name_below(figure: Figure, names: tuple[list[Any], list[Any]], columns: int) -> None:
    for count in range(min(columns, len(names[1])), 0, -1):
        legend = figure.legend(*names, loc="outside lower center", ncols=count)
        if count == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _alike(a: Mapping[Any, float], b: Mapping[Any, float]) -> bool:
    """Whether two curves differ by at most a hundredth of their range."""
    values = [*a.values(), *b.values()]
    most = max(values) - min(values)
    return a.keys() == b.keys() and all(abs(a[x] - b[x]) <= 0.01 * most for x in a)


def write_csv(
    runs: Sequence[LoggedRun], metrics: Sequence[str], path: Path, x: str = "epoch"
) -> None:
    """Write all curves as CSV: label, number of the run, epoch or step (and seconds), metrics."""
    by_seconds = x == "seconds"
    rows = []
    for label, members in groups(runs).items():
        for number, run in enumerate(members):
            for place in sorted(set().union(*run.curves.values())):
                values = [run.curves[metric].get(place) for metric in metrics]
                cells = ["" if v is None else f"{v:.6g}" for v in values]
                seconds = [f"{run.seconds_at(place):.6g}"] if by_seconds else []
                rows.append([label, number, place, *seconds, *cells])
    places = ["step", "seconds"] if by_seconds else [x]
    tables.write_csv(path, ["label", "run", *places, *metrics], rows)


def shared(runs: Sequence[LoggedRun], metric: str) -> list[int]:
    """Epochs or updates at which all runs logged a metric."""
    return sorted(set.intersection(*(set(run.curves[metric]) for run in runs)))


def cell(median: float, least: float, greatest: float) -> str:
    """Median and range as a table cell."""
    return f"{median:.4g} ({least:.4g} to {greatest:.4g})"


def plain_name(metric: str) -> str:
    """Name of a metric without Markdown syntax."""
    return metric.replace("|", " or ")


def _name_axes(axis: Axes, metric: str, x: str, wide: bool) -> None:
    axis.set_xlabel(_AXES[x])
    ending = metric.rsplit("_", 1)[-1]
    name, logarithmic = _KINDS.get(ending, (plain_name(metric).replace("_", " "), False))
    if (logged := _LOGGED.fullmatch(metric)) and logged[2] in _QUANTITIES:
        name = f"{_SETS[logged[1]]}{_QUANTITIES[logged[2]]}"
    axis.set_ylabel(name)
    if logarithmic and wide:
        set_log_scale(axis)
    axis.grid(alpha=0.3)
