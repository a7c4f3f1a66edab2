"""Verdicts computed anew from the tables in git, those of ``data`` in ``claims.yaml``.

A table has one row for each run, or for each run and update. Its columns ``seed`` (or ``run``, a
run's number within its label) tell the pairs. The keys of ``data``:

- ``file``: path of the table from the root of the repository, or several with the same columns;
- ``norm``, ``baseline``: values of the first column that has them, ``label``, ``norm`` or
  ``method``; default: those of the rule;
- ``where``: values that other columns have to have;
- ``metric``: column, or a sum such as ``100*a+b``; default: the metric of the rule. Where it is a
  score and a run has several rows, the last counts;
- ``start``: for curves that were logged late, the value of an untrained network;
- ``scale``: factor of the column, such as 100 for fractions in points;
- ``groups``: ``measured`` alone: a column; the rule holds if it holds in each group;
- ``test``: ``measured`` alone: ``below``, ``above``, ``within`` (``margin`` of 0) or ``at_most``
  (``margin``), for the paired difference of the metric; or ``each_below`` (``margin``), for each
  score of the norm;
- ``log``: ``measured`` alone: whether to take the log of the metric first.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ln_zoo.plots import comparison
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.statistics import Difference, paired
from ln_zoo.sweeps.verdicts import (
    Finding,
    Scores,
    judge_growth,
    judge_own_best,
    judge_scores,
    judge_speed,
    log_odds,
)
from ln_zoo.zoo import claims, speed
from ln_zoo.zoo.claims import Outcome, Rule

Row = dict[str, str]
#: Columns that name the method of a row.
_METHODS = ("method", "norm", "label")
#: A seed in one file is not the same run as in another.
_APART = 100_000


def recompute(rule: Rule, outcome: Outcome, root: Path) -> Finding:
    """The verdict of a rule on the tables of an outcome.

    Args:
        rule: of the claim.
        outcome: with ``data``.
        root: of the repository.

    Raises:
        SweepError: if a table is missing, or lacks a column or all pairs of runs.
    """
    try:
        return _judge(rule, outcome.data, root)
    except (OSError, ValueError, KeyError) as error:
        raise SweepError(f"{outcome.data.get('file')}: {error}") from error


def _judge(rule: Rule, data: dict[str, Any], root: Path) -> Finding:
    rows = list(_rows(data, root))
    names = data.get("norm", rule.norm), data.get("baseline", rule.baseline)
    if rule.kind == "measured":
        return _judge_measured(rows, names, data)
    metric = data.get("metric", rule.metric)
    if rule.kind in claims.OF_CURVES:
        mine, theirs = (_curves(rows, name, metric) for name in names)
        if rule.kind == "own_best":
            assert rule.value is not None
            return judge_own_best(mine, theirs, rule.metric, rule.value)
        return judge_speed(mine, theirs, rule.metric, data.get("start"), rule.matters)
    if rule.kind == "grows":
        leads = [
            _leads(rows, rule, value, scale) for scale in _scales(rule) for value in _ends(rule)
        ]
        odds = (leads[2], leads[3]) if rule.log_odds else None
        return judge_growth(leads[0], leads[1], rule.metric, rule.matters, odds)
    mine_, theirs_ = (_scores(rows, name, metric, data.get("scale", 1)) for name in names)
    return judge_scores(mine_, theirs_, rule.metric, rule.kind, rule.margin, rule.matters)


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
    same = len(set(verdicts)) == 1
    mixed = {claims.HOLDS, claims.DOES_NOT_HOLD} <= set(verdicts)
    verdict = verdicts[0] if same else claims.IN_PART if mixed else claims.UNDECIDED
    ends = (found.low, found.high) if len(words) == 1 and not math.isnan(found.low) else None
    return Finding(verdict, "; ".join(words), found.number, ends)


def _judge_each(scores: Scores, metric: str, bound: float) -> Finding:
    values = sorted(scores.values())
    verdict = claims.UNDECIDED
    if values[-1] < bound or values[0] >= bound:
        verdict = claims.HOLDS if values[0] < bound else claims.DOES_NOT_HOLD
    return Finding(verdict, f"{metric} {values[0]:.3g} to {values[-1]:.3g}", len(values))


def _side(found: Difference, test: str, margin: float) -> str:
    if test == "within":
        return claims.decide_margin(found.low, found.high, margin)
    if test == "at_most":
        return claims.decide(found.low - margin, found.high - margin, "below")
    return claims.decide(found.low, found.high, test)


def _shown(found: Difference, log: bool) -> str:
    """A difference, or the ratio that it is the log of."""
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
                    yield row | {"seed": str(number * _APART + seed)}


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


def _curves(rows: list[Row], name: str, metric: str) -> dict[int, comparison.Curve]:
    curves: dict[int, comparison.Curve] = {}
    for row in _of(rows, name):
        value = _value(row, metric)
        if value is not None:
            place = int(row["step" if "step" in row else "epoch"])
            curves.setdefault(int(row["seed"]), {})[place] = value
    return curves


def _scores(rows: list[Row], name: str, metric: str, scale: float) -> dict[int, float]:
    # The last row of a run is the one that stays.
    values = {int(row["seed"]): _value(row, metric) for row in _of(rows, name)}
    return {seed: scale * value for seed, value in values.items() if value is not None}


def _scales(rule: Rule) -> list[Callable[[float], float]]:
    return [float, log_odds] if rule.log_odds else [float]


def _ends(rule: Rule) -> tuple[str, str]:
    return rule.less, rule.more


def _leads(rows: list[Row], rule: Rule, value: str, scale: Callable[[float], float]) -> Scores:
    """Mean lead by seed over all other settings, of seeds that have all of them."""
    sign = 1 if speed.higher_is_better(rule.metric) else -1
    settings = [column for column in rows[0] if "." in column]
    scores = {
        (row["norm"], tuple(row[column] for column in settings), int(row["seed"])): scale(
            float(row[rule.metric])
        )
        for row in rows
        if row[rule.setting] == value
    }
    every = {setting for _, setting, _ in scores}
    found = {}
    for seed in sorted({seed for *_, seed in scores}):
        pairs = [[scores.get((n, s, seed)) for n in (rule.norm, rule.baseline)] for s in every]
        each = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
        if len(each) == len(pairs):
            found[seed] = sum(each) / len(each)
    return found
