"""Verdicts of the rules in ``claims.yaml``, from curves and test scores by seed.

The same functions judge the runs of a sweep and the tables in ``docs/figures``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ln_zoo.plots import comparison
from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Rule
from ln_zoo.sweeps import speed
from ln_zoo.sweeps.statistics import (
    Difference,
    mean_difference,
    paired,
    seeds_to_decide,
    signed_rank,
)

#: Targets of the rule ``faster``, as shares of the baseline's improvement.
TARGETS = (0.90, 0.95, 0.99)
#: The targets of 95 and 99 % count only if this share of the baseline's runs reaches them;
#: otherwise a miss shows where runs level off, not their speed.
REACHED = 0.9
#: By seed.
Curves = Mapping[int, comparison.Curve]
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


@dataclass(frozen=True)
class Speed:
    """Updates to reach one target, for a norm and the baseline."""

    share: float  # of the baseline's improvement
    target: float  # value of the metric
    steps: dict[int, float]  # updates by seed; infinite if the run misses the target
    baseline_steps: dict[int, float]
    rounding: float  # standard deviation of a log ratio due to scoring at intervals
    # Last updates of both runs by seed, after which a miss says nothing; default: no end.
    ends: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def logs(self) -> list[float]:
        """log of the ratio of updates by pair of runs, infinite if one misses the target.

        Pairs are left out if both miss, or if one ended before the other reached the target.
        """
        found = []
        for seed, steps in self.steps.items():
            base = self.baseline_steps[seed]
            if math.isinf(max(steps, base)):
                end, base_end = self.ends.get(seed, (math.inf, math.inf))
                first, missing_end = min((steps, base_end), (base, end))
                if math.isinf(first) or first > missing_end:
                    continue
            # A target that is met before the first update counts as one update.
            found.append(math.log(max(steps, 1)) - math.log(max(base, 1)))
        return found

    @property
    def missed(self) -> bool:
        """Whether any run misses the target."""
        return any(map(math.isinf, [*self.steps.values(), *self.baseline_steps.values()]))

    @property
    def asked(self) -> bool:
        """Whether the verdict uses this target: the first, or one that the baseline reaches."""
        reached = statistics.fmean(map(math.isfinite, self.baseline_steps.values()))
        return self.share <= TARGETS[0] or reached >= REACHED

    @property
    def difference(self) -> Difference:
        """Mean log ratio with its interval, at least as wide as from rounding alone."""
        return mean_difference(self.logs, self.rounding)

    def verdict(self, matters: float = 1.0) -> str:
        """Verdict for this target, with 2.5 % of error on either side; ``matters`` is a ratio."""
        if self.missed:
            below, _ = signed_rank(self.logs)
            _, above = signed_rank([log + math.log(matters) for log in self.logs])
            opposed = claims.DOES_NOT_HOLD if above <= 0.025 else claims.UNDECIDED
            return claims.HOLDS if below <= 0.025 else opposed
        found = self.difference
        return claims.decide(found.low, found.high, "below", math.log(matters))

    @property
    def text(self) -> str:
        """Ratio of the baseline's updates to the norm's, with its interval."""
        head = f"{self.share:.0%}".replace("%", " %")
        if self.missed:
            met = [
                f"{sum(map(math.isfinite, steps.values()))} of {len(steps)}"
                for steps in (self.steps, self.baseline_steps)
            ]
            return (
                f"{head}: met by {met[0]}, baseline {met[1]}{'' if self.asked else ', not asked'}"
            )
        found = self.difference
        ends = _interval(math.exp(-found.high), math.exp(-found.low))
        return f"{head}: {math.exp(-found.mean):.3g}{ends}"


def speeds(
    curves: Curves,
    baseline: Curves,
    metric: str,
    start: float | None = None,
    targets: Sequence[float] = TARGETS,
) -> list[Speed]:
    """Updates to each target, a share of the baseline's improvement, for shared seeds.

    The baseline improves from the median over seeds of its first values to the median of its best
    values.
    """
    seeds, best = _shared_seeds(curves, baseline), speed.best_of(metric)
    first = start
    if first is None:
        first = statistics.median(baseline[seed][min(baseline[seed])] for seed in seeds)
    last = statistics.median(best(baseline[seed].values()) for seed in seeds)
    if best(first, last) == first:
        raise ValueError(
            f"the baseline's {metric} never improves: there is no fall to compare with"
        )
    return [
        _speed(curves, baseline, metric, share, first + share * (last - first)) for share in targets
    ]


def _shared_seeds(values: Mapping[int, Any], baseline: Mapping[int, Any]) -> list[int]:
    if not (seeds := [seed for seed in values if seed in baseline]):
        raise ValueError("no seed has runs of both norms")
    return seeds


def _speed(
    curves: Curves, baseline: Curves, metric: str, share: float, target: float | None = None
) -> Speed:
    """Updates to a target; without one, to each run's own best value."""

    def steps_of(curve: comparison.Curve) -> float:
        value = speed.best_of(metric)(curve.values()) if target is None else target
        return speed.steps_to(curve, metric, value)

    seeds = _shared_seeds(curves, baseline)
    steps, base = ({seed: steps_of(each[seed]) for seed in seeds} for each in (curves, baseline))
    variances = [
        _rounding(curves[seed], steps[seed]) + _rounding(baseline[seed], base[seed])
        for seed in seeds
    ]
    rounding = math.sqrt(statistics.fmean(variances))
    ends = {seed: (float(max(curves[seed])), float(max(baseline[seed]))) for seed in seeds}
    return Speed(share, math.nan if target is None else target, steps, base, rounding, ends)


def _rounding(curve: comparison.Curve, step: float) -> float:
    """Variance of log(step), uniform since the previous score."""
    before = max((place for place in curve if place < step), default=0)
    return ((step - before) / step) ** 2 / 12 if math.isfinite(step) and step else 0.0


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
    if rule.kind in claims.OF_CURVES:
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
    sign = 1 if speed.higher_is_better(metric) else -1
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
    verdict = claims.combine(each.verdict(matters or 1.0) for each in found)
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
    to_best = _speed(curves, baseline, metric, 1.0)
    found = to_best.difference
    low, high = math.exp(found.low), math.exp(found.high)
    number = f"{math.exp(found.mean):.2g}{_interval(low, high)} of the baseline's updates"
    verdict = claims.decide(found.low, found.high, "below")
    if verdict == claims.HOLDS and not low <= value <= high:
        verdict = claims.IN_PART
    needed = _needed(to_best.logs, math.log(value), to_best.rounding)
    return Finding(verdict, number, found.number, _ends(low, high), needed)


def judge_scores(
    scores: Scores, baseline: Scores, metric: str, kind: str, margin: float, matters: float | None
) -> Finding:
    """The verdict of the rules ``lower``, ``higher`` and ``comparable`` on paired test scores."""
    seeds = _shared_seeds(scores, baseline)
    found = paired(scores, baseline)
    assert found is not None
    if kind == "comparable":
        verdict = claims.decide_margin(found.low, found.high, margin)
    else:
        side = "below" if kind == "lower" else "above"
        verdict = claims.decide(found.low, found.high, side, matters or 0.0)
    number = f"{metric} {found.mean:+.3g}{_interval(found.low, found.high, '+')}"
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
    verdict = claims.decide(found.low, found.high, "above", matters or 0.0)
    seeds = [seed for seed in less if seed in more]
    ends = [statistics.fmean(leads[seed] for seed in seeds) for leads in (less, more)]
    number = f"lead in {metric} {ends[0]:+.3g} to {ends[1]:+.3g}, {found.mean:+.3g}"
    number += _interval(found.low, found.high, "+")
    if odds:
        logs = paired(odds[1], odds[0])
        assert logs is not None
        number += f"; in log-odds {logs.mean:+.2g}{_interval(logs.low, logs.high, '+', 2)}"
        if (logs.low <= 0) if verdict == claims.HOLDS else (logs.low > 0):
            verdict = claims.UNDECIDED
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


def _interval(low: float, high: float, sign: str = "", digits: int = 3) -> str:
    return "" if math.isnan(low) else f" ({low:{sign}.{digits}g} to {high:{sign}.{digits}g})"


def log_odds(percent: float) -> float:
    """Log-odds of an accuracy in percent; ValueError if they are infinite."""
    if not 0 < percent < 100:
        raise ValueError(f"an accuracy of {percent:g} % has no finite log-odds")
    return math.log(percent / (100 - percent))
