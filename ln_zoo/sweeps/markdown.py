"""The page of a sweep's report, in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ln_zoo.sweeps.comparisons import Reached, differences, reached, spreads
from ln_zoo.sweeps.results import Results
from ln_zoo.sweeps.selection import chosen_settings, median_seed
from ln_zoo.sweeps.state import FAILED, FINISHED
from ln_zoo.sweeps.statistics import SeedSummary
from ln_zoo.utils import tables
from ln_zoo.zoo.reported import metric_unit

#: Text below the pictures.
_CAPTIONS = {
    "curves.png": "Curves: median and range over the seeds",
    "curves_seconds.png": "The same against seconds of training",
}


def report_page(results: Results, metrics: Sequence[str], pictures: Sequence[str]) -> str:
    """The page; ``metrics`` are the curves that are compared with the baseline's best."""
    states = results.states
    done = [state.kind for state in states.values()].count(FINISHED)
    failed = {name: state.error for name, state in states.items() if state.kind == FAILED}
    parts = [
        f"# {results.out.name}",
        f"{done} of {len(states)} runs have finished.",
        "\n".join(f"- `{name}` failed: {error}" for name, error in failed.items()),
        _test_section(results),
        _settings_section(results),
        _differences_section(results),
        _reached_section(results, metrics),
        *(f"![{_CAPTIONS[name]}]({name})" for name in pictures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _test_section(results: Results) -> str:
    found, rows = spreads(results), []
    for label in results.labels():
        cells = [found.get((label, metric)) for metric in results.test_metrics]
        seed, count = median_seed(results, label), len(results.of_label(label))
        rows.append(
            [label, str(count), "—" if seed is None else str(seed), *map(_spread_cell, cells)]
        )
    text = "Mean ± standard deviation (least to greatest) over seeds."
    if results.select:
        text += f" Median seed: the one with the median {results.select}."
    head = ["", "seeds", "median seed", *map(_with_unit, results.test_metrics)]
    return _section("Test", text, head, rows)


def _settings_section(results: Results) -> str:
    rows = []
    for each in chosen_settings(results):
        labels = [each.label, *each.tied]
        settings = " or ".join(label.partition(", ")[2] for label in labels)
        edges = ", ".join(each.edges) or "no"
        if each.finished < each.settings:
            edges = f"{each.finished} of {each.settings} settings have finished"
        rows.append([each.norm, settings, f"{each.score:.4g}", edges])
    text = "Means over the seeds that have finished with all settings of a norm, if there are any."
    head = ["", "settings", f"mean {results.select}", "at an edge of the grid"]
    return _section("Best settings by validation", text, head, rows)


def _differences_section(results: Results) -> str:
    rows = []
    for (label, other, metric), d in differences(results).items():
        interval = "—" if math.isnan(d.low) else f"{d.low:+.3g} to {d.high:+.3g}"
        rows.append([label, other, _with_unit(metric), str(d.number), f"{d.mean:+.3g}", interval])
    text = (
        "Mean over pairs of runs with the same seed, tested on the same examples, with the 95 % "
        "interval of the paired t statistic over seeds. A single pair has no interval: two runs "
        "cannot separate the effects of method and seed."
    )
    head = ["", "compared with", "metric", "pairs", "difference", "95 % interval"]
    return _section(f"Paired differences from {results.baseline}", text, head, rows)


def _reached_section(results: Results, metrics: Sequence[str]) -> str:
    found: dict[tuple[str, str], list[Reached]] = {}
    for each in reached(results, metrics):
        found.setdefault((each.run.label, each.metric), []).append(each)
    rows = [
        _reached_cells(label, metric, found[label, metric])
        for label in results.labels()
        for metric in metrics
        if (label, metric) in found
    ]
    text = (
        f"The best value that {results.baseline} has logged with the same seed and settings: "
        "median (least to greatest) over seeds. Seconds are wall time of training. The last two "
        "columns are updates to the run's own best value and their share of the baseline's."
    )
    share = "share of the baseline's"
    head = ["", "metric", "updates", share, "seconds", "met by", "updates to own best", share]
    return _section(f"Updates and seconds to the best of {results.baseline}", text, head, rows)


def _section(title: str, text: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return "\n".join([f"## {title}", "", text, "", tables.markdown_table(head, rows)])


def _with_unit(metric: str) -> str:
    unit = metric_unit(metric).unit
    return f"{metric} ({unit})" if unit else metric


def _spread_cell(spread: SeedSummary | None) -> str:
    if spread is None:
        return "—"
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
    middle = _number(statistics.median(values))
    least, greatest = _number(min(values)), _number(max(values))
    return middle if least == greatest else f"{middle} ({least} to {greatest})"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"
