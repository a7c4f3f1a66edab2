"""The finished runs of a sweep, with their test metrics and curves."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from ln_zoo.plots.comparison import Curve, read_curves, read_seconds
from ln_zoo.sweeps.grid import Grid, Run, SweepError, norm_name
from ln_zoo.sweeps.state import FAILED, FINISHED, State, metrics_of, state_of
from ln_zoo.zoo.reported import metric_unit


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    run: Run
    metrics: dict[str, float]  # of the test, in the units of the tables
    table: Path  # metrics.csv, with the curves

    def curve(self, metric: str, x: str = "step") -> Curve:
        """Values of a metric by update, or by epoch."""
        return read_curves(self.table, [metric], x)[metric]

    def logged(self) -> set[str]:
        """Names of the curves."""
        with self.table.open(newline="") as file:
            return set(next(csv.reader(file), [])) - {"epoch", "step"}

    def seconds(self) -> Curve:
        """Seconds of training by update; empty if they were not logged."""
        return read_seconds(self.table) if "step_seconds" in self.logged() else {}

    def seconds_per_update(self) -> float:
        """Mean from the timings of callbacks; NaN without timings."""
        if seconds := self.seconds():
            return seconds[max(seconds)] / max(seconds)
        with self.table.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row.get("epoch_seconds")]
        if not rows:
            return math.nan
        updates = (int(rows[-1]["step"]) + 1) / (int(rows[-1]["epoch"]) + 1)
        return statistics.fmean(float(row["epoch_seconds"]) for row in rows) / updates


class Results:
    """The results of a sweep in the folder ``out``.

    ``baseline`` defaults to ``none`` if it is in the grid, otherwise to the first norm; ``select``,
    the logged metric that chooses settings, to the first test metric, in validation.

    Raises:
        SweepError: if no run has finished, or for an unknown baseline or metric.
    """

    def __init__(
        self, grid: Grid, out: Path, baseline: str | None = None, select: str | None = None
    ) -> None:
        self.grid = grid
        self.out = out
        self.states = {run.name: state_of(out / run.name) for run in grid.runs()}
        self.finished = [
            FinishedRun(run, _in_units(self.states[run.name]), table)
            for run in grid.runs()
            if self.states[run.name].kind == FINISHED
            and (table := metrics_of(out / run.name)) is not None
        ]
        if not self.finished:
            failed = [s.error for s in self.states.values() if s.kind == FAILED]
            why = f"; {len(failed)} failed, such as: {failed[0]}" if failed else ""
            raise SweepError(f"{out}: no run has finished yet{why}")
        names = [norm_name(norm) for norm in grid.norms]
        self.baseline = baseline or ("none" if "none" in names else names[0])
        if self.baseline not in names:
            raise SweepError(f"--baseline {self.baseline} is not one of {', '.join(names)}")
        self.test_metrics = list(self.finished[0].metrics)
        #: Names of the curves of all runs.
        self.logged = set.intersection(*(each.logged() for each in self.finished))
        self.select = select or validation_metric(self.test_metrics, self.logged)
        if self.select and self.select not in self.logged:
            raise SweepError(f"--select: not all runs logged {self.select!r}")

    def labels(self) -> list[str]:
        """Labels with a finished run."""
        return list(dict.fromkeys(each.run.label for each in self.finished))

    def of_label(self, label: str) -> list[FinishedRun]:
        return [each for each in self.finished if each.run.label == label]

    def by_seed(self, label: str, metric: str) -> dict[int, float]:
        """A test metric of the runs of a label."""
        return {
            each.run.seed: each.metrics[metric]
            for each in self.of_label(label)
            if metric in each.metrics
        }

    def baseline_of(self, label: str) -> str | None:
        """The label of the baseline with the same settings; None if it has no finished run."""
        settings = self.of_label(label)[0].run.settings
        for each in self.finished:
            if norm_name(each.run.norm) == self.baseline and each.run.settings == settings:
                return each.run.label
        return None


def validation_metric(tested: Iterable[str], logged: Container[str]) -> str | None:
    """The first tested metric that was logged in validation, by its name there."""
    in_validation = (f"val{separator}{name}" for name in tested for separator in "_/")
    return next(filter(logged.__contains__, in_validation), None)


def _in_units(state: State) -> dict[str, float]:
    return {name: value * metric_unit(name).scale for name, value in state.metrics.items()}
