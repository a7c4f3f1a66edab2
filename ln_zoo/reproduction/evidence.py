"""Verdicts recomputed from the tables in git, ``data`` in ``claims.yaml``.

A table has one row for each run, or for each run and update. Its column ``seed`` (or ``run``, the
number of a run within its label) identifies pairs. The keys of ``data``:

- ``file``: path of the table from the root of the repository, or several with the same columns;
- ``norm``, ``baseline``: values in the column ``label``, ``norm`` or ``method``; default: from the
  rule;
- ``where``: required values of other columns;
- ``metric``: column, or a sum such as ``100*a+b``; default: the metric of the rule. The last row
  of a run has its score;
- ``start``: for curves that were logged late, the value of an untrained network;
- ``scale``: factor of the column, such as 100 for fractions in points.

Keys of ``measured`` alone:

- ``groups``: a column; the rule holds if it holds in each group;
- ``test``: ``below``, ``above``, ``within`` (``margin`` of 0) or ``at_most`` (``margin``), for the
  paired difference of the metric; or ``each_below`` (``margin``), for each score of the norm;
- ``log``: whether to take the log of the metric first;
- ``tasks``: two groups of tasks by name, each with ``file``, ``norm``, ``baseline`` and ``metric``.
  The rule holds if the log of the speed-up to 95 % of the baseline's improvement, mean over seeds,
  is larger in the first group, by the 95 % interval of Welch's t over tasks.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ln_zoo.plots.comparison import Curve
from ln_zoo.reproduction.claims import DOES_NOT_HOLD, HOLDS, UNDECIDED, Outcome, Rule
from ln_zoo.reproduction.decisions import combine, decide, decide_margin
from ln_zoo.reproduction.speed_ups import speeds
from ln_zoo.reproduction.statistics import welch
from ln_zoo.reproduction.verdicts import Finding, Scores, judge_rule, mean_leads
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.statistics import Difference, paired

Row = dict[str, str]
#: Columns with the method of a row.
_METHODS = ("method", "norm", "label")
#: Offset between the seeds of two files, whose runs differ.
_SEED_OFFSET = 100_000


def recompute(rule: Rule, outcome: Outcome, root: Path) -> Finding:
    """The verdict of a rule on the tables of an outcome."""
    try:
        return _judge(rule, outcome.data, root)
    except (OSError, ValueError, KeyError) as error:
        raise SweepError(f"{', '.join(outcome.files)}: {error}") from error


def _judge(rule: Rule, data: dict[str, Any], root: Path) -> Finding:
    if "tasks" in data:
        return _judge_tasks(data["tasks"], root)
    rows = list(_rows(data, root))
    names = data.get("norm", rule.norm), data.get("baseline", rule.baseline)
    if rule.kind == "measured":
        return _judge_measured(rows, names, data)
    metric = data.get("metric", rule.metric)
    return judge_rule(
        rule,
        names,
        lambda name: _curves(rows, name, metric),
        lambda name: _scores(rows, name, metric, data.get("scale", 1)),
        lambda value, scale: _leads(rows, rule, value, scale),
        data.get("start"),
    )


def _judge_tasks(groups: dict[str, dict[str, dict[str, Any]]], root: Path) -> Finding:
    found = []
    for tasks in groups.values():
        found.append({name: _log_speed_up(task, root) for name, task in tasks.items()})
    ends = welch(*([*each.values()] for each in found))
    values = "; ".join(", ".join(f"{name} {v:.2f}" for name, v in each.items()) for each in found)
    change = f"{ends.mean:+.2f} ({ends.low:+.2f} to {ends.high:+.2f})"
    verdict = decide(ends.low, ends.high, "above")
    return Finding(verdict, f"log of the speed-up: {values}: {change}", None)


def _log_speed_up(task: dict[str, Any], root: Path) -> float:
    rows, metric = list(_rows(task, root)), task["metric"]
    own, baseline = (_curves(rows, task[name], metric) for name in ("norm", "baseline"))
    (to_target,) = speeds(own, baseline, metric, targets=(0.95,))
    return -statistics.fmean(to_target.logs)


def _judge_measured(rows: list[Row], names: tuple[str, str], data: dict[str, Any]) -> Finding:
    column, margin = data.get("groups"), data.get("margin", 0.0)
    metric, scale = data["metric"], data.get("scale", 1)
    if data["test"] == "each_below":
        return _judge_each(_scores(rows, names[0], metric, scale), metric, margin)
    verdicts, words, found = [], [], None
    for group in dict.fromkeys(row[column] for row in rows) if column else [""]:
        members = [row for row in rows if not column or row[column] == group]
        scores = [_scores(members, name, metric, scale) for name in names]
        if data.get("log"):
            scores = [{seed: math.log(v) for seed, v in each.items()} for each in scores]
        found = paired(*scores)
        if found is None:
            raise ValueError(f"no seed of both {names[0]} and {names[1]} {group}")
        verdicts.append(_side(found, data["test"], margin))
        words.append(f"{group} {_shown(found, bool(data.get('log')))}".strip())
    assert found is not None
    ends = (found.low, found.high) if len(words) == 1 and not math.isnan(found.low) else None
    return Finding(combine(verdicts), "; ".join(words), found.number, ends)


def _judge_each(scores: Scores, metric: str, bound: float) -> Finding:
    values = sorted(scores.values())
    verdict = UNDECIDED
    if values[-1] < bound or values[0] >= bound:
        verdict = HOLDS if values[0] < bound else DOES_NOT_HOLD
    return Finding(verdict, f"{metric} {values[0]:.3g} to {values[-1]:.3g}", len(values))


def _side(found: Difference, test: str, margin: float) -> str:
    if test == "within":
        return decide_margin(found.low, found.high, margin)
    if test == "at_most":
        return decide(found.low - margin, found.high - margin, "below")
    return decide(found.low, found.high, test)


def _shown(found: Difference, log: bool) -> str:
    """A difference, or a ratio if the difference is of logs."""
    change: Callable[[float], str] = (lambda v: f"{math.exp(v):.3g}") if log else "{:+.3g}".format
    text = change(found.mean)
    return (
        text if math.isnan(found.low) else f"{text} ({change(found.low)} to {change(found.high)})"
    )


def _rows(data: dict[str, Any], root: Path) -> Iterable[Row]:
    files = data["file"] if isinstance(data["file"], list) else [data["file"]]
    for number, name in enumerate(files):
        with (root / name).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if row.get("state", "finished") != "finished":
                    continue
                if all(
                    row[column] == str(value) for column, value in data.get("where", {}).items()
                ):
                    seed = int(row["seed" if "seed" in row else "run"])
                    yield row | {"seed": str(number * _SEED_OFFSET + seed)}


def _of(rows: list[Row], name: str) -> list[Row]:
    for column in _METHODS:
        found = [row for row in rows if row.get(column) == name]
        if found:
            return found
    raise ValueError(f"no row of {name!r}")


def _value(row: Row, metric: str) -> float | None:
    total = 0.0
    for part in metric.split("+"):
        factor, _, column = part.rpartition("*")
        if not row[column]:
            return None
        total += float(factor or 1) * float(row[column])
    return total


def _curves(rows: list[Row], name: str, metric: str) -> dict[int, Curve]:
    curves: dict[int, Curve] = {}
    for row in _of(rows, name):
        value = _value(row, metric)
        if value is not None:
            place = int(row["step" if "step" in row else "epoch"])
            curves.setdefault(int(row["seed"]), {})[place] = value
    return curves


def _scores(rows: list[Row], name: str, metric: str, scale: float) -> dict[int, float]:
    values = {int(row["seed"]): _value(row, metric) for row in _of(rows, name)}
    return {seed: scale * value for seed, value in values.items() if value is not None}


def _leads(rows: list[Row], rule: Rule, value: str, scale: Callable[[float], float]) -> Scores:
    columns = [column for column in rows[0] if "." in column]
    scores = {
        (row["norm"], tuple(row[column] for column in columns), int(row["seed"])): scale(
            float(row[rule.metric])
        )
        for row in rows
        if row[rule.setting] == value
    }
    settings = {setting for _, setting, _ in scores}
    return mean_leads(scores, settings, (rule.norm, rule.baseline), rule.metric)
