"""Outcomes of the comparisons in ``claims.yaml``, from tables in git or from a sweep.

A table has a row for each run, or for each run and update. ``seed``, or ``run``, identifies pairs.
A row of a run that is judged says in ``begun`` when it began.
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ln_zoo.plots.comparison import Curve
from ln_zoo.reproduction.claims import (
    BETTER,
    CONFIRMED,
    IN_PART,
    NOT_MEASURED,
    REFUTED,
    UNDECIDED,
    Comparison,
    Outcome,
    claims,
    content,
    key,
    protocol_date,
)
from ln_zoo.reproduction.statistics import Verdict, decide, holm, welch
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.speed import best_of, steps_to

Row = Mapping[str, str]
#: Columns with the method of a row.
_METHODS = ("method", "norm", "label")
#: Table of `benchmarks.updates`.
_UPDATE_SECONDS = "docs/figures/update_seconds.csv"
#: Offset between the seeds of two files, whose runs differ.
_SEED_OFFSET = 100_000
#: Log of the margin of every speed, 0.8 to 1.25.
SPEED_MARGIN = math.log(1.25)
#: Runs with seeds below this are not judged.
_FIRST_SEED = 100


def recompute_all(root: Path) -> dict[str, Outcome]:
    """The outcome of every row, from the tables below ``root``.

    Holm's correction is over the primary outcomes.

    Raises:
        SweepError: for a table that is missing or lacks something, or a judged run that began
            before the protocol or has a seed that is not fresh.
    """
    found: dict[str, tuple[Comparison, Outcome, Verdict | None]] = {}
    for claim in claims():
        for row in claim.rows:
            try:
                found[key(claim, row)] = row, *_outcome(row, root, found)
            except (OSError, ValueError, KeyError) as error:
                raise SweepError(f"{', '.join(row.files)}: {error}") from error
    primary = {
        name: verdict for name, (row, _, verdict) in found.items() if row.primary and verdict
    }
    words = holm(primary, content()["primary"])
    return {
        name: replace(outcome, word=words.get(name, outcome.word))
        for name, (_, outcome, _) in found.items()
    }


def _outcome(
    row: Comparison, root: Path, found: Mapping[str, Any]
) -> tuple[Outcome, Verdict | None]:
    if row.pairs:
        return _judged(row, root)
    if row.kind == "none":
        return Outcome(), None
    if row.kind == "tasks":
        return _tasks(row, {name: outcome for name, (_, outcome, _) in found.items()}), None
    rows = list(_rows(row, root))
    return (theory_outcome(rows), None) if row.kind == "theory" else compare(row, rows)


def _judged(row: Comparison, root: Path) -> tuple[Outcome, Verdict | None]:
    """The outcome of runs that the protocol covers; ValueError if it does not cover one."""
    rows = list(_rows(row, root))
    for each in rows:
        if datetime.fromisoformat(each["begun"]) < protocol_date():
            raise ValueError(f"a run began at {each['begun']}, before the protocol")
        if int(each["seed"]) < _FIRST_SEED:
            raise ValueError(
                f"seed {each['seed']} is not fresh: judged ones start at {_FIRST_SEED}"
            )
    methods = [_curves(rows, method, row) for method in (row.norm, row.baseline)]
    seeds = [sorted(each) for each in methods]
    if seeds != [[*range(_FIRST_SEED, _FIRST_SEED + row.pairs)]] * 2:
        raise ValueError(
            f"seeds {seeds[0]} and {seeds[1]}, where the protocol has {row.pairs} pairs"
        )
    outcome, verdict = compare(row, rows)
    if outcome.pairs != row.pairs:
        raise ValueError(f"{outcome.pairs} of {row.pairs} pairs are long enough to compare")
    best = best_of(row.metric)
    stuck = [
        sum(best(curve.values()) > (row.floor or math.inf) for curve in each.values())
        for each in methods
    ]
    if max(stuck) >= 2:
        number = f"{stuck[0]} and {stuck[1]} runs never below {row.floor:g}"
        return Outcome(UNDECIDED, number, row.pairs, True, UNDECIDED), None
    return replace(outcome, judged=True), verdict


def compare(row: Comparison, rows: Sequence[Row]) -> tuple[Outcome, Verdict]:
    """The outcome of a ``speed`` or ``end``, without correction, from rows of a table."""
    if row.kind == "speed":
        effects, misses, rounding = speed_effects(row, rows)
        verdict = decide(effects, SPEED_MARGIN, rounding, censored=misses > 0)
        show, number = math.exp, "{:.3g} times as fast"
    else:
        effects, misses = end_effects(row, rows), 0
        margin = math.log(row.margin) if row.log and row.margin else row.margin
        verdict = decide(effects, margin)
        show = math.exp if row.log else float
        number = "{:.3g} times" if row.log else "{:+.3g}"
    ends = [show(each) for each in (verdict.estimate, verdict.low, verdict.high)]
    text = number.format(ends[0]) if math.isfinite(ends[0]) else "no finite estimate"
    if not math.isnan(verdict.low):
        sign = "" if row.kind == "speed" or row.log else "+"
        text += f" ({ends[1]:{sign}.3g} to {ends[2]:{sign}.3g})"
    text = text.replace("inf", "no bound")
    if misses:
        text += f", {misses} of {len(effects)} pairs with a miss"
    kept = [round(each, 5) if math.isfinite(each) else None for each in ends]
    word = verdict.word()
    return Outcome(word, text, len(effects), False, word, *kept), verdict


def speed_effects(row: Comparison, rows: Sequence[Row]) -> tuple[list[float], int, float]:
    """Log ratios of the baseline's updates to the target over the norm's, misses, and rounding.

    A ratio is infinite if one run of a pair misses the target, and its log 0 if both do. Misses are
    pairs with one. A pair is left out if one run ended before the other reached the target.
    ``target: own`` is each run's own best value.
    """
    own, base = (_curves(rows, each, row) for each in (row.norm, row.baseline))
    effects, misses, variances = [], 0, []
    for seed in _shared(own, base):
        curves = own[seed], base[seed]
        first, second = (_steps(curve, row) for curve in curves)
        if math.isinf(first) and math.isinf(second):
            effects.append(0.0)
            misses += 1
            continue
        # What a run would have reached after its end is unknown.
        ends = max(curves[0]), max(curves[1])
        if (first > ends[0] and second > ends[0]) or (second > ends[1] and first > ends[1]):
            continue
        misses += math.isinf(first - second)
        effects.append(math.log(max(second, 1)) - math.log(max(first, 1)))
        variances.append(_rounding(curves[0], first) + _rounding(curves[1], second))
    return effects, misses, math.sqrt(statistics.fmean(variances)) if variances else 0.0


def _steps(curve: Curve, row: Comparison) -> float:
    target = best_of(row.metric)(curve.values()) if row.target == "own" else float(row.target)
    return steps_to(curve, row.metric, target)


def _rounding(curve: Curve, step: float) -> float:
    """Variance of log(step), uniform since the previous score."""
    before = max((place for place in curve if place < step), default=0)
    return ((step - before) / step) ** 2 / 12 if math.isfinite(step) and step else 0.0


def end_effects(row: Comparison, rows: Sequence[Row]) -> list[float]:
    """Paired differences of a score, baseline from norm, positive where the norm is ahead.

    A method is a label, a number to compare with, or a list of conditions on columns, over whose
    rows the score is averaged; a list of two such lists is their difference.
    """
    sign = -1 if row.lower else 1
    if isinstance(row.baseline, (int, float)):
        own = _scores(rows, row.norm, row)
        return [sign * (score - row.baseline) for score in own.values()]
    own, base = (_scores(rows, each, row) for each in (row.norm, row.baseline))
    return [sign * (own[seed] - base[seed]) for seed in _shared(own, base)]


def _scores(rows: Sequence[Row], method: Any, row: Comparison) -> dict[int, float]:
    if isinstance(method, list):
        first, second = (_scores(rows, each, row) for each in method)
        return {seed: first[seed] - second[seed] for seed in first if seed in second}
    scores: dict[int, list[float]] = {}
    for each in _of(rows, method):
        value = _value(each, row.metric)
        if value is not None:
            scores.setdefault(int(each["seed"]), []).append(value * row.scale)
    best = min if row.lower else max
    picks: dict[str, Callable[[list[float]], float]] = {
        "last": lambda values: values[-1],
        "best": lambda values: best(values),
        "mean": statistics.fmean,
    }
    pick = picks[row.score]
    found = {seed: pick(values) for seed, values in scores.items()}
    return {seed: math.log(value) for seed, value in found.items()} if row.log else found


def _tasks(row: Comparison, outcomes: Mapping[str, Outcome]) -> Outcome:
    """Whether the log of the speed-up is larger in the first group of rows, by Welch's t."""
    groups = [
        [math.log(outcomes[name].estimate or math.nan) for name in names]
        for names in row.tasks.values()
    ]
    found = welch(*groups)
    number = f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
    word = BETTER if found.low > 0 else UNDECIDED
    return Outcome(
        word, number, None, False, word, *(round(x, 5) for x in (found.mean, found.low, found.high))
    )


def theory_outcome(rows: Sequence[Row]) -> Outcome:
    """How many cases are as the paper says."""
    agree = sum(each["agrees"] == "yes" for each in rows)
    word = CONFIRMED if agree == len(rows) else IN_PART if agree else REFUTED
    wrong = [f"{each['case']}: {each['measured']}" for each in rows if each["agrees"] != "yes"]
    number = f"{agree} of {len(rows)} cases" + (f"; not {'; '.join(wrong)}" if wrong else "")
    return Outcome(word, number)


# Tables


def _rows(row: Comparison, root: Path) -> Iterable[dict[str, str]]:
    update = _update_seconds(row.timed, root) if row.timed else {}
    for number, name in enumerate(row.files):
        with (root / name).open(newline="", encoding="utf-8") as file:
            for each in csv.DictReader(file):
                if each.get("state", "finished") != "finished":
                    continue
                if _fits(each, row.where):
                    seed = int(each.get("seed", each.get("run", 0)))
                    if update:
                        each["seconds"] = str(float(each["step"]) * update[each["norm"]])
                    yield each | {"seed": str(number * _SEED_OFFSET + seed)}


def _update_seconds(experiment: str, root: Path) -> dict[str, float]:
    """Seconds of an update by method, relative to layer norm's in interleaved rounds."""
    with (root / _UPDATE_SECONDS).open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["experiment"] == experiment]
    (unit,) = (float(row["seconds"]) for row in found if row["contestant"] == "layer")
    return {row["contestant"]: unit * float(row["wall_ratio"]) for row in found}


def _fits(row: Row, where: Mapping[str, Any]) -> bool:
    return all(
        row[column] in map(str, values if isinstance(values, list) else [values])
        for column, values in where.items()
    )


def _of(rows: Sequence[Row], method: Any) -> list[Row]:
    if isinstance(method, dict):
        found = [row for row in rows if _fits(row, method)]
    else:
        found = next(
            (kept for c in _METHODS if (kept := [row for row in rows if row.get(c) == method])), []
        )
    if not found:
        raise ValueError(f"no row of {method!r}")
    return found


def _value(row: Row, metric: str) -> float | None:
    total = 0.0
    for part in metric.split("+"):
        factor, _, column = part.rpartition("*")
        if not row[column]:
            return None
        total += float(factor or 1) * float(row[column])
    return total


def _curves(rows: Sequence[Row], method: Any, row: Comparison) -> dict[int, Any]:
    curves: dict[int, dict[float, float]] = {}
    for each in _of(rows, method):
        value = _value(each, row.metric)
        if value is not None and math.isfinite(value):
            place = float(each[row.x if row.x in each else "epoch"])
            curves.setdefault(int(each["seed"]), {})[place] = value
    return curves


def _shared(values: Mapping[int, Any], baseline: Mapping[int, Any]) -> list[int]:
    if not (seeds := [seed for seed in values if seed in baseline]):
        raise ValueError("no seed has runs of both")
    return seeds


def write_outcomes(root: Path, path: Path) -> dict[str, Outcome]:
    """Write the outcomes of all rows as JSON, without default values."""
    found = recompute_all(root)
    plain = {
        name: {
            k: v for k, v in asdict(outcome).items() if v is not None and v is not False and v != ""
        }
        for name, outcome in found.items()
        if outcome.word != NOT_MEASURED
    }
    lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in plain.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return found
