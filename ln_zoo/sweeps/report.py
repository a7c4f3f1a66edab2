"""The report of a sweep: tables as CSV, curves, and a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ln_zoo.sweeps.comparisons import Reached, differences, reached, spreads
from ln_zoo.sweeps.grid import norm_name
from ln_zoo.sweeps.markdown import report_page
from ln_zoo.sweeps.pictures import draw_curves, metrics_to_draw
from ln_zoo.sweeps.results import Results
from ln_zoo.sweeps.statistics import SeedSummary
from ln_zoo.utils import tables
from ln_zoo.utils.files import atomic_write_text
from ln_zoo.zoo.reported import metric_unit

Rows = list[list[Any]]


def write_report(
    results: Results, folder: Path, metrics: Sequence[str] | None = None, x: str | None = None
) -> str:
    """Writes ``report.md``, the tables as CSV and ``curves.png``; returns the Markdown.

    Args:
        results: results of the sweep.
        folder: folder of the report.
        metrics: metrics of the curves; default: known ones that all runs logged.
        x: ``"epoch"`` or ``"step"``; default: by the metrics.

    Raises:
        SweepError: if not all runs logged a metric.
    """
    metrics, x = metrics_to_draw(results, metrics, x)
    # Also the metric that chooses settings.
    compared = list(dict.fromkeys([*metrics, *([results.select] if results.select else [])]))
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_curves(results, metrics, x, folder)
    for name, rows in _csv_tables(results, compared).items():
        atomic_write_text(folder / f"{name}.csv", _csv(rows))
    page = report_page(results, compared, pictures)
    atomic_write_text(folder / "report.md", page)
    return page


def _csv_tables(results: Results, metrics: Sequence[str]) -> dict[str, Rows]:
    """Rows by name of the table; the first row has the names of the columns."""
    spread: Rows = [["label", "metric", "unit", *SeedSummary.__dataclass_fields__]]
    for (label, metric), s in spreads(results).items():
        spread.append([label, metric, metric_unit(metric).unit, *vars(s).values()])
    paired: Rows = [["label", "baseline", "metric", "unit", "pairs", "mean", "low", "high"]]
    for (label, other, metric), d in differences(results).items():
        paired.append([label, other, metric, metric_unit(metric).unit, *vars(d).values()])
    updates: Rows = [["label", "seed", *list(Reached.__dataclass_fields__)[1:]]]
    for r in reached(results, metrics):
        updates.append([r.run.label, r.run.seed, *list(vars(r).values())[1:]])
    return {"runs": _runs(results), "spread": spread, "differences": paired, "reached": updates}


def _runs(results: Results) -> Rows:
    names, options = results.test_metrics, list(results.grid.settings)
    metrics = {each.run.name: each.metrics for each in results.finished}
    rows: Rows = [["norm", *options, "seed", "state", *names, "updates", "failure"]]
    for run in results.grid.runs():
        state = results.states[run.name]
        settings = [run.settings[option] for option in options]
        values = [metrics.get(run.name, {}).get(name) for name in names]
        updates = (state.results or {}).get("steps")
        rows.append(
            [norm_name(run.norm), *settings, run.seed, state.kind, *values, updates, state.error]
        )
    return rows


def _csv(rows: Rows) -> str:
    exact = [[f"{c:.10g}" if isinstance(c, float) else c for c in row] for row in rows]
    cells = [["" if cell in (None, "nan") else cell for cell in row] for row in exact]
    return tables.csv_table(cells[0], cells[1:]) + "\n"
