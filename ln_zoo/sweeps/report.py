"""The report of a sweep: curves, tables, paired differences, and how fast the baseline is met."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_zoo import tables
from ln_zoo.files import atomic_write_text
from ln_zoo.plots import comparison
from ln_zoo.sweeps import speed
from ln_zoo.sweeps.grid import Grid, Run, SweepError, norm_name
from ln_zoo.sweeps.state import FAILED, FINISHED, State, metrics_of, state_of
from ln_zoo.sweeps.statistics import Difference, SeedSummary, paired
from ln_zoo.zoo.reported import metric_unit

#: Scores of skip-thoughts in the paper's Figure 3.
_SENTENCES = ("sick_pearson", "sick_mse", "mr", "cr", "subj", "mpqa")
#: Metrics to draw: the first group that all runs logged.
_CURVES = (
    (("epoch_train_nll", "epoch_test_error"), "epoch"),
    (("step_val_bound",), "step"),
    (("step_train_sequence_nll", "step_val_sequence_nll"), "step"),
    (("step_val_token_nll", *(f"step_{name}" for name in _SENTENCES)), "step"),
    (("step_train_token_nll", "step_val_token_nll"), "step"),
    (("val_image_r1", "val_image_r5", "val_image_r10"), "step"),
    (("step_train_error", "step_val_error"), "step"),
    (("step_train_nll", "step_train_error"), "step"),
)


@dataclass(frozen=True)
class Member:
    """A finished run: its test metrics in the units of the tables, and its curves' table."""

    run: Run
    metrics: dict[str, float]
    curves: Path


@dataclass(frozen=True)
class Reached:
    """Updates and seconds of a run to the best value of the baseline with its seed and settings."""

    run: Run
    metric: str  # of the curve
    best: float  # best value of the baseline
    steps: float  # updates of the run to that value; infinite if it is missed
    baseline_steps: float
    seconds: float  # wall time of the run's training; NaN if unknown
    baseline_seconds: float
    own_best: float  # best value of the run
    own_steps: float  # updates to its own best value

    @property
    def share(self) -> float:
        """Updates relative to the baseline's; NaN if the baseline never improved."""
        return self.steps / self.baseline_steps if self.baseline_steps else math.nan

    @property
    def own_share(self) -> float:
        """Updates to the own best value, relative to the baseline's."""
        return self.own_steps / self.baseline_steps if self.baseline_steps else math.nan


@dataclass(frozen=True)
class Chosen:
    """The best settings of a norm by validation."""

    norm: str
    label: str  # of its best runs
    score: float  # mean over the seeds
    edges: list[str]  # options whose best value is the smallest or largest of the grid
    tied: list[str]  # labels of other settings with the same score


class Report:
    """Report on the finished runs of a sweep in the folder ``out``.

    ``baseline`` defaults to ``none`` if it is in the grid, otherwise to the first norm; ``metrics``
    of the curves to known ones that all runs logged; ``select``, the metric of ``metrics.csv`` that
    chooses settings, to the first test metric, in validation. x is ``"epoch"`` or ``"step"``.

    Raises:
        SweepError: if nothing has finished, or for an unknown baseline or metric.
    """

    def __init__(
        self,
        grid: Grid,
        out: Path,
        baseline: str | None = None,
        metrics: Sequence[str] | None = None,
        x: str | None = None,
        select: str | None = None,
    ) -> None:
        self.grid = grid
        self.out = out
        self.runs = grid.runs()
        self.states = {run.name: state_of(out / run.name) for run in self.runs}
        self.members = list(self._members())
        if not self.members:
            failed = [s.error for s in self.states.values() if s.kind == FAILED]
            why = f"; {len(failed)} failed, such as: {failed[0]}" if failed else ""
            raise SweepError(f"{out}: no run has finished yet{why}")
        names = [norm_name(norm) for norm in grid.norms]
        self.baseline = baseline or ("none" if "none" in names else names[0])
        if self.baseline not in names:
            raise SweepError(f"--baseline {self.baseline} is not one of {', '.join(names)}")
        columns = [_columns(member.curves) for member in self.members]
        shared = set.intersection(*columns)
        self.metrics, self.x = _chosen_curves(shared, metrics, x, out)
        self.select = select or next(
            (f"val_{name}" for name in self.test_metrics if f"val_{name}" in shared), None
        )
        if self.select and self.select not in shared:
            raise SweepError(f"--select: not all runs logged {self.select!r}")

    @property
    def test_metrics(self) -> list[str]:
        return list(self.members[0].metrics)

    @property
    def reached_metrics(self) -> list[str]:
        """Metrics of the curves, and the metric that chooses settings."""
        return list(dict.fromkeys([*self.metrics, *([self.select] if self.select else [])]))

    def of_label(self, label: str) -> list[Member]:
        return [member for member in self.members if member.run.label == label]

    def by_seed(self, label: str, metric: str) -> dict[int, float]:
        return {
            member.run.seed: member.metrics[metric]
            for member in self.of_label(label)
            if metric in member.metrics
        }

    def labels(self) -> list[str]:
        """Labels with a finished run."""
        return list(dict.fromkeys(member.run.label for member in self.members))

    # Statistics

    def spreads(self) -> dict[tuple[str, str], SeedSummary]:
        return {
            (label, metric): SeedSummary.of(list(values.values()))
            for label in self.labels()
            for metric in self.test_metrics
            if (values := self.by_seed(label, metric))
        }

    def differences(self) -> dict[tuple[str, str, str], Difference]:
        """Paired differences by label, label of the baseline, and metric.

        Compares each label with the baseline at the same settings, then each norm at its best
        settings with the baseline at its best.
        """
        pairs = {label: other for label in self.labels() if (other := self._baseline_of(label))}
        found = {}
        chosen = {each.norm: each.label for each in self.chosen()}
        best = chosen.get(self.baseline)
        asked = [*pairs.items(), *((label, best) for label in chosen.values() if best)]
        for label, other in asked:
            for metric in self.test_metrics:
                difference = paired(self.by_seed(label, metric), self.by_seed(str(other), metric))
                if label != other and difference is not None:
                    found[label, str(other), metric] = difference
        return found

    def chosen(self) -> list[Chosen]:
        """The best settings of each norm by validation; empty for a single setting.

        Means are over the seeds that have finished with all settings of the norm, or over all
        seeds if no seed has.
        """
        if not self.select or not any(len(values) > 1 for values in self.grid.settings.values()):
            return []
        scores: dict[str, dict[str, dict[int, float]]] = {}
        for member in self.members:
            of_norm = scores.setdefault(norm_name(member.run.norm), {})
            of_norm.setdefault(member.run.label, {})[member.run.seed] = self._score(member)
        found = []
        for norm, labels in scores.items():
            shared = set.intersection(*map(set, labels.values()))
            means = {
                label: statistics.fmean(values[seed] for seed in shared or values)
                for label, values in labels.items()
            }
            label = speed.best_of(self.select)(means, key=means.__getitem__)
            settings = self.of_label(label)[0].run.settings
            tied = [
                each
                for each, mean in means.items()
                if each != label and math.isclose(mean, means[label], rel_tol=1e-9)
            ]
            found.append(Chosen(norm, label, means[label], self._edges(settings), tied))
        return found

    def median_seed(self, label: str) -> int | None:
        """The seed with the median validation score, the run to publish; None without a score.

        For an even number of runs, the worse of the two in the middle.
        """
        if not self.select:
            return None
        sign = -1 if speed.higher_is_better(self.select) else 1
        ordered = sorted(
            self.of_label(label), key=lambda each: (sign * self._score(each), each.run.seed)
        )
        return ordered[len(ordered) // 2].run.seed

    def reached(self) -> list[Reached]:
        """`Reached` of each run, for each of `reached_metrics`."""
        pairs = {label: self._baseline_of(label) for label in self.labels()}
        return [
            reached
            for metric in self.reached_metrics
            for label, other in pairs.items()
            if other is not None
            for reached in self.reach(label, other, metric)
        ]

    def reach(self, label: str, other: str, metric: str) -> list[Reached]:
        """`Reached` of the runs of a label, with another label as the baseline."""
        baselines = {member.run.seed: member for member in self.of_label(other)}
        found = []
        for member in self.of_label(label):
            base = baselines.get(member.run.seed)
            if base is None:
                continue
            curves = [_curve(each.curves, metric) for each in (member, base)]
            own, best = (speed.best_of(metric)(curve.values()) for curve in curves)
            steps, before = (speed.steps_to(curve, metric, best) for curve in curves)
            times = (steps * _pace(member.curves), before * _pace(base.curves))
            to_own = speed.steps_to(curves[0], metric, own)
            found.append(Reached(member.run, metric, best, steps, before, *times, own, to_own))
        return found

    def best_label(self, norm: str) -> str:
        """The label of a norm at its best settings by validation."""
        chosen = {each.norm: each.label for each in self.chosen()}
        labels = {m.run.label for m in self.members if norm_name(m.run.norm) == norm}
        if not labels:
            raise SweepError(f"{self.out}: no run of {norm} has finished")
        if norm not in chosen and len(labels) > 1:
            raise SweepError(f"{self.out}: no validation metric chooses among settings of {norm}")
        return chosen.get(norm, min(labels))

    # Output

    def write(self, folder: Path) -> str:
        """Writes ``report.md``, the tables as CSV and ``curves.png``; returns the Markdown.

        Also draws ``curves_seconds.png`` if all runs have timed their training.
        """
        folder.mkdir(parents=True, exist_ok=True)
        pictures = [self.x] if self.metrics else []
        if self.x == "step" and all(_seconds(member.curves) for member in self.members):
            pictures.append("seconds")
        for x in pictures:
            name = "curves_seconds" if x == "seconds" else "curves"
            curves = []
            for member in self.members:
                read = comparison.read_curves(member.curves, self.metrics, x)
                seconds = comparison.read_seconds(member.curves, x)
                curves.append(comparison.Run(member.run.label, member.curves.parent, read, seconds))
            comparison.draw(curves, self.metrics, folder / f"{name}.png", x=x, band=True)
            comparison.write_csv(curves, self.metrics, folder / f"{name}.csv", x)
        for name, rows in self._tables().items():
            atomic_write_text(folder / f"{name}.csv", _csv(rows))
        text = self._markdown(pictures)
        atomic_write_text(folder / "report.md", text)
        return text

    def _tables(self) -> dict[str, list[list[Any]]]:
        """Rows by name of the table; the first row has the names of the columns."""
        names = self.test_metrics
        options = list(self.grid.settings)
        runs: list[list[Any]] = [["norm", *options, "seed", "state", *names, "updates", "failure"]]
        metrics = {member.run.name: member.metrics for member in self.members}
        for run in self.runs:
            state = self.states[run.name]
            values = [metrics.get(run.name, {}).get(name) for name in names]
            steps = (state.results or {}).get("steps")
            settings = [run.settings[option] for option in options]
            row = [norm_name(run.norm), *settings, run.seed, state.kind, *values]
            runs.append([*row, steps, state.error])
        spread: list[list[Any]] = [["label", "metric", "unit", *SeedSummary.__dataclass_fields__]]
        for (label, metric), s in self.spreads().items():
            spread.append([label, metric, metric_unit(metric).unit, *vars(s).values()])
        columns = ["label", "baseline", "metric", "unit", "pairs", "mean", "low", "high"]
        differences: list[list[Any]] = [columns]
        for (label, other, metric), d in self.differences().items():
            differences.append([label, other, metric, metric_unit(metric).unit, *vars(d).values()])
        reached: list[list[Any]] = [["label", "seed", *list(Reached.__dataclass_fields__)[1:]]]
        for r in self.reached():
            reached.append([r.run.label, r.run.seed, *list(vars(r).values())[1:]])
        return {"runs": runs, "spread": spread, "differences": differences, "reached": reached}

    def _markdown(self, pictures: Sequence[str]) -> str:
        done = [state.kind for state in self.states.values()].count(FINISHED)
        parts = [f"# {self.out.name}", f"{done} of {len(self.runs)} runs have finished."]
        failed = {name: state.error for name, state in self.states.items() if state.kind == FAILED}
        parts += ["\n".join(f"- `{name}` failed: {error}" for name, error in failed.items())]
        parts += [self._spread_table(), self._chosen_table()]
        parts += [self._difference_table(), self._reached_table()]
        if pictures:
            parts.append("![Curves: median and range over the seeds](curves.png)")
        if "seconds" in pictures:
            parts.append("![The same against seconds of training](curves_seconds.png)")
        return "\n\n".join(part for part in parts if part) + "\n"

    def _spread_table(self) -> str:
        spreads, rows = self.spreads(), []
        for label in self.labels():
            found = [spreads.get((label, metric)) for metric in self.test_metrics]
            seed, count = self.median_seed(label), len(self.of_label(label))
            cells = [_spread_cell(spread) if spread else "—" for spread in found]
            rows.append([label, str(count), "—" if seed is None else str(seed), *cells])
        text = "Mean ± standard deviation (least to greatest) over seeds."
        if self.select:
            text += f" Median seed: the one with the median {self.select}."
        head = ["", "seeds", "median seed", *map(_with_unit, self.test_metrics)]
        return _section("Test", text, head, rows)

    def _chosen_table(self) -> str:
        rows = []
        for each in self.chosen():
            labels = [each.label, *each.tied]
            settings = " or ".join(label.partition(", ")[2] for label in labels)
            rows.append([each.norm, settings, f"{each.score:.4g}", ", ".join(each.edges) or "no"])
        text = (
            "Means over the seeds that have finished with all settings of a norm, if there are any."
        )
        head = ["", "settings", f"mean {self.select}", "at an edge of the grid"]
        return _section("Best settings by validation", text, head, rows)

    def _difference_table(self) -> str:
        rows = []
        for (label, other, metric), d in self.differences().items():
            interval = "—" if math.isnan(d.low) else f"{d.low:+.3g} to {d.high:+.3g}"
            cells = [label, other, _with_unit(metric), str(d.number), f"{d.mean:+.3g}", interval]
            rows.append(cells)
        text = (
            "Mean over pairs of runs with the same seed, tested on the same examples, with the "
            "95 % interval of the paired t statistic over seeds. A single pair has no interval: "
            "two runs cannot separate the effects of method and seed."
        )
        head = ["", "compared with", "metric", "pairs", "difference", "95 % interval"]
        return _section(f"Paired differences from {self.baseline}", text, head, rows)

    def _reached_table(self) -> str:
        reached, rows = self.reached(), []
        for label in self.labels():
            for metric in self.reached_metrics:
                found = [r for r in reached if r.run.label == label and r.metric == metric]
                if found:
                    rows.append(_reached_cells(label, metric, found))
        text = (
            f"The best value that {self.baseline} has logged with the same seed and settings: "
            "median (least to greatest) over seeds. Seconds are wall time of training. The last "
            "two columns are updates to the run's own best value and their share of the baseline's."
        )
        share = "share of the baseline's"
        head = ["", "metric", "updates", share, "seconds", "met by", "updates to own best", share]
        return _section(f"Updates and seconds to the best of {self.baseline}", text, head, rows)

    # Helpers

    def _members(self) -> Iterable[Member]:
        for run in self.runs:
            folder = self.out / run.name
            curves = metrics_of(folder)
            state: State = self.states[run.name]
            if state.kind == FINISHED and curves is not None:
                metrics = {
                    name: value * metric_unit(name).scale for name, value in state.metrics.items()
                }
                yield Member(run, metrics, curves)

    def _score(self, member: Member) -> float:
        assert self.select is not None
        curve = comparison.read_curves(member.curves, [self.select])[self.select]
        best: float = speed.best_of(self.select)(curve.values())
        return best if self.grid.test == "best" else curve[max(curve)]

    def _baseline_of(self, label: str) -> str | None:
        settings = self.of_label(label)[0].run.settings
        for member in self.members:
            if norm_name(member.run.norm) == self.baseline and member.run.settings == settings:
                return member.run.label
        return None

    def _edges(self, settings: Mapping[str, str]) -> list[str]:
        edges = []
        for option, values in self.grid.settings.items():
            try:
                numbers = sorted(map(float, values))
                here = float(settings[option])
            except ValueError:
                continue
            if len(numbers) > 1 and here in (numbers[0], numbers[-1]):
                edges.append(f"{option}={settings[option]}")
        return edges


def _chosen_curves(
    shared: set[str], metrics: Sequence[str] | None, x: str | None, out: Path
) -> tuple[list[str], str]:
    if metrics:
        for metric in metrics:
            if not shared & set(metric.split("|")):
                raise SweepError(f"--metric: not all runs in {out} logged {metric!r}")
        return list(metrics), x or ("step" if metrics[0].startswith("step_") else "epoch")
    for names, axis in _CURVES:
        if shared >= set(names) and x in (None, axis):
            return list(names), axis
    validation = (n for n in shared if n.startswith("val_") and not n.startswith("val_batch_"))
    return sorted(validation)[:2], x or "epoch"


def _curve(curves: Path, metric: str) -> comparison.Curve:
    return comparison.read_curves(curves, [metric], "step")[metric]


def _columns(curves: Path) -> set[str]:
    with curves.open(newline="") as file:
        return set(next(csv.reader(file), [])) - {"epoch", "step"}


def _pace(curves: Path) -> float:
    """Seconds per update from the timings of callbacks; NaN without timings."""
    if seconds := _seconds(curves):
        return seconds[max(seconds)] / max(seconds)
    with curves.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("epoch_seconds")]
    if not rows:
        return math.nan
    updates = (int(rows[-1]["step"]) + 1) / (int(rows[-1]["epoch"]) + 1)
    return statistics.fmean(float(row["epoch_seconds"]) for row in rows) / updates


def _seconds(curves: Path) -> comparison.Curve:
    return comparison.read_seconds(curves) if "step_seconds" in _columns(curves) else {}


def _with_unit(metric: str) -> str:
    unit = metric_unit(metric).unit
    return f"{metric} ({unit})" if unit else metric


def _section(title: str, text: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join([f"## {title}", "", text, "", tables.markdown_table(head, rows)])


def _spread_cell(spread: SeedSummary) -> str:
    if spread.number == 1:
        return f"{spread.mean:.4g}"
    text = f"{spread.mean:.4g} ± {spread.deviation:.2g}"
    return f"{text} ({spread.least:.4g} to {spread.greatest:.4g})"


def _reached_cells(label: str, metric: str, rows: Sequence[Reached]) -> list[str]:
    met = sum(math.isfinite(row.steps) for row in rows)
    steps, share, seconds, own_steps, own_share = (
        _range([getattr(row, name) for row in rows])
        for name in ("steps", "share", "seconds", "own_steps", "own_share")
    )
    return [label, metric, steps, share, seconds, f"{met} of {len(rows)}", own_steps, own_share]


def _range(values: Sequence[float]) -> str:
    if any(math.isnan(value) for value in values):
        return "—"

    def text(value: float) -> str:
        if not math.isfinite(value):
            return "never"
        return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"

    middle = text(statistics.median(values))
    least, greatest = text(min(values)), text(max(values))
    return middle if least == greatest else f"{middle} ({least} to {greatest})"


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    exact = [[f"{c:.10g}" if isinstance(c, float) else c for c in row] for row in rows]
    cells = [["" if cell in (None, "nan") else cell for cell in row] for row in exact]
    return tables.csv_table(cells[0], cells[1:]) + "\n"
