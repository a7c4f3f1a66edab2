"""The runs of a sweep as a table, for the same rules as the tables in git."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ln_zoo.reproduction.claims import PAPER, REDUCED, Claim, Outcome
from ln_zoo.reproduction.evidence import compare
from ln_zoo.sweeps.grid import SweepError, norm_name
from ln_zoo.sweeps.manifest import existing_grid
from ln_zoo.sweeps.results import FinishedRun, Results
from ln_zoo.sweeps.selection import best_label
from ln_zoo.utils.tables import write_csv


def judge(results: Results, claim: Claim, size: str = REDUCED) -> Outcome:
    """The outcome of a claim's first comparison, or first of the paper's size, on a sweep's runs.

    Each method has its best settings by validation, unless the comparison names settings. Without
    Holm's correction, and exploratory.
    """
    rows = [row for row in claim.rows if row.kind in ("speed", "end")]
    if size == PAPER:
        rows.sort(key=lambda row: [row.size, row.length].count(REDUCED))
    row = rows[0]
    if not row.pairs and not isinstance(row.norm, list):  # labels of older tables
        row = replace(row, norm=claim.norm, baseline=claim.baseline, metric=claim.metric)
    if isinstance(row.norm, list):  # a lead at two values of a setting
        found = [_tested(run, row.metric) for run in results.finished]
    else:
        runs = [run for name in (row.norm, row.baseline) for run in _best(results, name)]
        if row.kind == "speed" or row.score == "best":
            found = [each for run in runs for each in curve_rows(run, row.metric)]
        elif row.metric in results.test_metrics:
            found = [_tested(run, row.metric) for run in runs]
        else:
            known = ", ".join(results.test_metrics)
            raise SweepError(f"the test has no {row.metric!r}: {known}")
    try:
        return compare(row, found)[0]
    except (ValueError, KeyError) as error:
        raise SweepError(f"{results.out}: {error}") from error


def _best(results: Results, norm: str) -> Sequence[FinishedRun]:
    return results.of_label(best_label(results, norm))


def _tested(run: FinishedRun, metric: str) -> dict[str, str]:
    scores = {metric: str(run.metrics[metric])} if metric in run.metrics else {metric: ""}
    own = {"norm": norm_name(run.run.norm), "seed": str(run.run.seed)}
    return own | {name: str(value) for name, value in run.run.settings.items()} | scores


def curve_rows(run: FinishedRun, metric: str) -> Iterator[dict[str, str]]:
    """A row for each score of a run: norm, seed, step and the metric."""
    own = {"norm": norm_name(run.run.norm), "seed": str(run.run.seed)}
    try:
        curve = run.curve(metric)
    except ValueError as error:
        raise SweepError(f"{run.table}: {error}") from error
    for step, value in sorted(curve.items()):
        yield own | {"step": str(step), metric: f"{value:.7g}"}


def begun(run: FinishedRun) -> str:
    """When a run began, in UTC: the time in the name of its first file of events.

    Names survive copying, unlike the times of files.
    """
    times = [
        float(path.name.split(".")[3]) for path in run.table.parent.glob("events.out.tfevents.*")
    ]
    if not times:
        raise SweepError(f"{run.table.parent}: no file of events says when the run began")
    return datetime.fromtimestamp(min(times), UTC).isoformat(timespec="seconds")


def write_judged(folders: Sequence[Path], metric: str, path: Path) -> int:
    """Write the curves of the finished runs of sweeps as a table that can be judged.

    Returns the number of runs.
    """
    rows: list[dict[str, str]] = []
    runs = 0
    for folder in folders:
        for run in Results(existing_grid(folder), folder).finished:
            rows += [{"begun": begun(run)} | row for row in curve_rows(run, metric)]
            runs += 1
    head = list(rows[0])
    write_csv(path, head, [[row[name] for name in head] for row in rows])
    return runs
