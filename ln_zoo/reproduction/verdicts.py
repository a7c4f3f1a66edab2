"""Verdicts of the rules in ``claims.yaml``, from curves and test scores by seed.

The same functions judge the runs of a sweep and the tables in ``docs/figures``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ln_zoo.reproduction.claims import HOLDS, IN_PART, OF_CURVES, UNDECIDED, Rule
from ln_zoo.reproduction.decisions import combine, decide, decide_margin
from ln_zoo.reproduction.speed_ups import Curves, speed_to, speeds
from ln_zoo.reproduction.statistics import interval_text, seeds_to_decide, shared_seeds
from ln_zoo.sweeps.speed import higher_is_better
from ln_zoo.sweeps.statistics import paired

#: By seed.
Scores = Mapping[int, float]
#: Values of the options of a run.
Setting = tuple[Any, ...]


@dataclass(frozen=True)
class Finding:
    """The verdict of a rule and its evidence."""

    verdict: str  # "holds", "holds in part", "does not hold" or "undecided"
    number: str  # text with the effect and its 95 % interval
    seeds: int | None  # number of pairs of runs; None for a difference between tasks
    # 95 % interval of the effect, for the last target of a speed; None for a single seed or after a
    # rank test.
    interval: tuple[float, float] | None = None
    # Seeds to detect the rule's effect with the spread so far; None if unknown.
    seeds_needed: int | None = None

    @property
    def text(self) -> str:
        """The verdict with its numbers, in one line."""
        text = f"{self.verdict}; {self.number}"
        if self.seeds is not None:
            text += f", {self.seeds} seed{'s' if self.seeds > 1 else ''}"
        if self.verdict == UNDECIDED and (self.seeds_needed or 0) > (self.seeds or 0):
            text += f"; about {self.seeds_needed} seeds in all would decide it"
        return text


def judge_rule(
    rule: Rule,
    names: tuple[str, str],
    curves: Callable[[str], Curves],
    scores: Callable[[str], Scores],
    leads: Callable[[str, Callable[[float], float]], Scores],
    start: float | None = None,
) -> Finding:
    """The verdict of any rule but ``measured``.

    ``names`` are the norm and the baseline. ``curves`` and ``scores`` read a norm's curves and test
    scores; ``leads`` computes `mean_leads` at a value of the rule's setting, on a scale. ``start``
    as in `speeds`.
    """
    if rule.kind in OF_CURVES:
        own, base = (_finite(curves(name), rule.metric) for name in names)
        if rule.kind == "own_best":
            assert rule.value is not None
            return judge_own_best(own, base, rule.metric, rule.value)
        if rule.kind == "lower_best":
            lowest, theirs = ({seed: min(c.values()) for seed, c in x.items()} for x in (own, base))
            return judge_scores(lowest, theirs, rule.metric, "lower", rule.margin, rule.matters)
        return judge_speed(own, base, rule.metric, start, rule.matters)
    if rule.kind == "grows":
        less, more = (leads(value, float) for value in (rule.less, rule.more))
        odds = None
        if rule.log_odds:
            odds = leads(rule.less, log_odds), leads(rule.more, log_odds)
        return judge_growth(less, more, rule.metric, rule.matters, odds)
    values, baseline = (scores(name) for name in names)
    return judge_scores(values, baseline, rule.metric, rule.kind, rule.margin, rule.matters)


def _finite(curves: Curves, metric: str) -> Curves:
    """Curves without NaN and infinity, as diverged runs have."""
    found = {}
    for seed, curve in curves.items():
        found[seed] = {step: value for step, value in curve.items() if math.isfinite(value)}
        if not found[seed]:
            raise ValueError(f"{metric} of seed {seed} is never finite")
    return found


def mean_leads(
    scores: Mapping[Any, float],
    settings: Collection[Setting],
    names: tuple[str, str],
    metric: str,
) -> Scores:
    """Mean lead of a norm over a baseline by seed, for seeds with all settings."""
    sign = 1 if higher_is_better(metric) else -1
    found = {}
    for seed in sorted({seed for *_, seed in scores}):
        pairs = [[scores.get((name, each, seed)) for name in names] for each in settings]
        leads = [sign * (a - b) for a, b in pairs if a is not None and b is not None]
        if leads and len(leads) == len(pairs):
            found[seed] = statistics.fmean(leads)
    return found


def judge_speed(
    curves: Curves,
    baseline: Curves,
    metric: str,
    start: float | None = None,
    matters: float | None = None,
) -> Finding:
    """The verdict of the rule ``faster``; arguments as in `speeds`, and the relevant ratio."""
    every = speeds(curves, baseline, metric, start)
    number = f"times as fast to {'; '.join(each.text for each in every)}"
    found = [each for each in every if each.asked]
    verdict = combine(each.verdict(matters or 1.0) for each in found)
    pairs = len(found[0].steps)
    interval, spread = None, math.nan
    if not found[-1].missed and pairs > 1:
        last = found[-1].difference
        interval = math.exp(-last.high), math.exp(-last.low)
    if pairs > 1:
        # The largest that can be measured.
        measured = [
            max(statistics.stdev(each.logs), each.rounding) for each in found if not each.missed
        ]
        spread = max(measured, default=math.nan)
    needed = seeds_to_decide(spread, math.log(matters)) if matters else None
    if needed and any(each.missed for each in found):
        # With fewer, no rank test reaches 2.5 %. From there on, the spread does not tell.
        needed = max(needed, 6) if pairs < 6 else None
    return Finding(verdict, number, pairs, interval, needed)


def judge_own_best(curves: Curves, baseline: Curves, metric: str, value: float) -> Finding:
    """The verdict of the rule ``own_best``: updates of each run to its own best value."""
    to_best = speed_to(curves, baseline, metric, 1.0)
    found = to_best.difference
    low, high = math.exp(found.low), math.exp(found.high)
    number = f"{math.exp(found.mean):.2g}{interval_text(low, high)} of the baseline's updates"
    verdict = decide(found.low, found.high, "below")
    if verdict == HOLDS and not low <= value <= high:
        verdict = IN_PART
    needed = _needed(to_best.logs, math.log(value), to_best.rounding)
    return Finding(verdict, number, found.number, _ends(low, high), needed)


def judge_scores(
    scores: Scores, baseline: Scores, metric: str, kind: str, margin: float, matters: float | None
) -> Finding:
    """The verdict of the rules ``lower``, ``higher`` and ``comparable`` on paired test scores."""
    seeds = shared_seeds(scores, baseline)
    found = paired(scores, baseline)
    assert found is not None
    if kind == "comparable":
        verdict = decide_margin(found.low, found.high, margin)
    else:
        side = "below" if kind == "lower" else "above"
        verdict = decide(found.low, found.high, side, matters or 0.0)
    number = f"{metric} {found.mean:+.3g}{interval_text(found.low, found.high, '+')}"
    differences = [scores[seed] - baseline[seed] for seed in seeds]
    needed = _needed(differences, matters or margin or None)
    return Finding(verdict, number, found.number, _ends(found.low, found.high), needed)


def judge_growth(
    less: Scores,
    more: Scores,
    metric: str,
    matters: float | None,
    odds: tuple[Scores, Scores] | None = None,
) -> Finding:
    """The verdict of the rule ``grows``: whether a lead is larger at one setting than at another.

    ``less`` and ``more`` are the leads by seed at both settings. Given ``odds``, the same leads in
    log-odds, the claim holds only if both scales show growth, and does not hold only if log-odds
    show none.
    """
    found = paired(more, less)
    if found is None:
        raise ValueError("no seed has finished at all settings")
    verdict = decide(found.low, found.high, "above", matters or 0.0)
    seeds = [seed for seed in less if seed in more]
    ends = [statistics.fmean(leads[seed] for seed in seeds) for leads in (less, more)]
    number = f"lead in {metric} {ends[0]:+.3g} to {ends[1]:+.3g}, {found.mean:+.3g}"
    number += interval_text(found.low, found.high, "+")
    if odds:
        logs = paired(odds[1], odds[0])
        assert logs is not None
        number += f"; in log-odds {logs.mean:+.2g}{interval_text(logs.low, logs.high, '+', 2)}"
        if (logs.low <= 0) if verdict == HOLDS else (logs.low > 0):
            verdict = UNDECIDED
    needed = _needed([more[seed] - less[seed] for seed in seeds], matters)
    return Finding(verdict, number, found.number, _ends(found.low, found.high), needed)


def _needed(
    differences: Sequence[float], effect: float | None, least_deviation: float = 0.0
) -> int | None:
    if effect is None or len(differences) < 2:
        return None
    return seeds_to_decide(max(statistics.stdev(differences), least_deviation), effect)


def _ends(low: float, high: float) -> tuple[float, float] | None:
    return None if math.isnan(low) else (low, high)


def log_odds(percent: float) -> float:
    """Log-odds of an accuracy in percent; ValueError if they are infinite."""
    if not 0 < percent < 100:
        raise ValueError(f"an accuracy of {percent:g} % has no finite log-odds")
    return math.log(percent / (100 - percent))
