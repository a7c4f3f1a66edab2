"""Verdicts of rules on claims, from curves and test scores by seed.

The rules are those of ``ln_zoo/zoo/claims.yaml``. The same functions judge the runs of a sweep and
the tables in ``docs/figures``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ln_zoo.plots import comparison
from ln_zoo.sweeps.statistics import Difference, paired, seeds_to_decide, signed_rank
from ln_zoo.zoo import claims, speed

#: Shares of the baseline's fall that a run has to reach, the targets of the rule ``faster``.
TARGETS = (0.90, 0.95, 0.99)
#: By seed.
Curves = Mapping[int, comparison.Curve]
Scores = Mapping[int, float]


@dataclass(frozen=True)
class Finding:
    """The verdict of a rule, and what it rests on.

    Attributes:
        verdict: ``"holds"``, ``"holds in part"``, ``"does not hold"`` or ``"undecided"``.
        number: effect with its 95 % interval, in words.
        seeds: pairs of runs behind it.
        interval: 95 % interval of the effect, of the last target for a speed; ``None`` for a single
            seed, or where the rank test decided.
        seeds_needed: that would show the effect which matters to the rule, from the spread
            seen so far; ``None``: not known.
    """

    verdict: str
    number: str
    seeds: int
    interval: tuple[float, float] | None = None
    seeds_needed: int | None = None


@dataclass(frozen=True)
class Speed:
    """How fast a norm meets one target, compared with the baseline.

    Attributes:
        share: of the baseline's fall.
        target: value of the metric.
        steps: updates of each seed's run; infinite: not within the run.
        baseline_steps: the same of the baseline.
        rounding: standard deviation of a log ratio that comes from scoring at intervals alone:
            the target is met somewhere between two scores.
    """

    share: float
    target: float
    steps: dict[int, float]
    baseline_steps: dict[int, float]
    rounding: float

    @property
    def logs(self) -> list[float]:
        """log of the ratio of updates by seed: infinite if one run misses, 0 if both do."""
        found = []
        for seed, steps in self.steps.items():
            base = self.baseline_steps[seed]
            both = math.isinf(steps) and math.isinf(base)
            # A run that is there before its first update took the shortest time that is seen.
            found.append(0.0 if both else math.log(max(steps, 1)) - math.log(max(base, 1)))
        return found

    @property
    def missed(self) -> bool:
        """Whether a run misses the target."""
        return any(map(math.isinf, [*self.steps.values(), *self.baseline_steps.values()]))

    @property
    def difference(self) -> Difference:
        """Mean log ratio with its interval, which is never narrower than rounding makes it."""
        return _difference(self.logs, self.rounding)

    @property
    def verdict(self) -> str:
        """Of this target alone, with 2.5 % of error on either side."""
        if self.missed:
            below, above = signed_rank(self.logs)
            return claims.HOLDS if below <= 0.025 else _opposed(above <= 0.025)
        return claims.decide(self.difference.low, self.difference.high, "below")

    @property
    def words(self) -> str:
        """Ratio of the baseline's updates to the norm's, with its interval."""
        head = f"{self.share:.0%}".replace("%", " %")
        if self.missed:
            met = [
                f"{sum(map(math.isfinite, steps.values()))} of {len(steps)}"
                for steps in (self.steps, self.baseline_steps)
            ]
            return f"{head}: met by {met[0]}, baseline {met[1]}"
        found = self.difference
        ends = _interval(math.exp(-found.high), math.exp(-found.low))
        return f"{head}: {math.exp(-found.mean):.3g}{ends}"


def _opposed(opposed: bool) -> str:
    return claims.DOES_NOT_HOLD if opposed else claims.UNDECIDED


def speeds(mine: Curves, theirs: Curves, metric: str, start: float | None = None) -> list[Speed]:
    """Updates to each of `TARGETS`, for the seeds that both have.

    The fall goes from the median over seeds of the baseline's first logged value to the median of
    its best ones.

    Args:
        mine: curves of the norm.
        theirs: curves of the baseline.
        metric: name of the metric, which says whether lower is better.
        start: where the fall begins, if the first value was logged late.

    Raises:
        ValueError: if no seed has both.
    """
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        raise ValueError("no seed has runs of both")
    best = max if speed.higher_is_better(metric) else min
    first = start
    if first is None:
        first = statistics.median(theirs[seed][min(theirs[seed])] for seed in seeds)
    last = statistics.median(best(theirs[seed].values()) for seed in seeds)
    found = []
    for share in TARGETS:
        target = first + share * (last - first)
        steps, base = (
            {seed: speed.steps_to(curves[seed], metric, target) for seed in seeds}
            for curves in (mine, theirs)
        )
        variances = [
            _rounding(mine[seed], steps[seed]) + _rounding(theirs[seed], base[seed])
            for seed in seeds
        ]
        found.append(Speed(share, target, steps, base, math.sqrt(statistics.fmean(variances))))
    return found


def _rounding(curve: comparison.Curve, step: float) -> float:
    """Variance of log(step) if the target was met at any time since the score before."""
    before = max((place for place in curve if place < step), default=0)
    return ((step - before) / step) ** 2 / 12 if math.isfinite(step) and step else 0.0


def _difference(logs: Sequence[float], rounding: float) -> Difference:
    """The interval of the mean, with a standard deviation of at least ``rounding``."""
    found = paired(dict(enumerate(logs)), dict.fromkeys(range(len(logs)), 0.0))
    assert found is not None
    if found.number < 2 or statistics.stdev(logs) >= rounding:
        return found
    from scipy.stats import t

    half = float(t.ppf(0.975, found.number - 1)) * rounding / math.sqrt(found.number)
    return Difference(found.number, found.mean, found.mean - half, found.mean + half)


def judge_speed(
    mine: Curves,
    theirs: Curves,
    metric: str,
    start: float | None = None,
    matters: float | None = None,
) -> Finding:
    """The verdict of the rule ``faster``; arguments as in `speeds`, and the ratio that matters."""
    found = speeds(mine, theirs, metric, start)
    verdicts = {each.verdict for each in found}
    faster, slower = claims.HOLDS in verdicts, claims.DOES_NOT_HOLD in verdicts
    if faster and slower:
        verdict = claims.IN_PART
    elif len(verdicts) == 1:
        (verdict,) = verdicts
    else:
        verdict = claims.UNDECIDED
    number = f"times as fast to {'; '.join(each.words for each in found)}"
    pairs = len(found[0].steps)
    interval, spread = None, math.nan
    if not found[-1].missed and pairs > 1:
        last = found[-1].difference
        interval = math.exp(-last.high), math.exp(-last.low)
    if pairs > 1:
        # The widest of those that can be measured.
        measured = [
            max(statistics.stdev(each.logs), each.rounding) for each in found if not each.missed
        ]
        spread = max(measured, default=math.nan)
    needed = seeds_to_decide(spread, math.log(matters)) if matters else None
    if needed and any(each.missed for each in found):
        needed = max(needed, 6)  # below, no outcome of the rank test is beyond 2.5 %
    return Finding(verdict, number, pairs, interval, needed)


def judge_own_best(mine: Curves, theirs: Curves, metric: str, value: float) -> Finding:
    """The verdict of the rule ``own_best``: each run's time to its own best.

    Args:
        mine: curves of the norm.
        theirs: curves of the baseline.
        metric: name of the metric.
        value: the paper's ratio of the norm's time to the baseline's.

    Raises:
        ValueError: if no seed has both.
    """
    best = max if speed.higher_is_better(metric) else min
    logs, variances = [], []
    for seed in mine:
        if seed in theirs:
            own, base = (
                speed.steps_to(curve, metric, best(curve.values()))
                for curve in (mine[seed], theirs[seed])
            )
            logs.append(math.log(max(own, 1)) - math.log(max(base, 1)))
            variances.append(_rounding(mine[seed], own) + _rounding(theirs[seed], base))
    if not logs:
        raise ValueError("no seed has runs of both")
    rounding = math.sqrt(statistics.fmean(variances))
    found = _difference(logs, rounding)
    low, high = math.exp(found.low), math.exp(found.high)
    number = f"{math.exp(found.mean):.2g}{_interval(low, high)} of the baseline's updates"
    verdict = claims.decide(found.low, found.high, "below")
    if verdict == claims.HOLDS and not low <= value <= high:
        verdict = claims.IN_PART
    needed = _needed(logs, math.log(value))
    return Finding(verdict, number, found.number, _ends(low, high), needed)


def judge_scores(
    mine: Scores, theirs: Scores, metric: str, kind: str, margin: float, matters: float | None
) -> Finding:
    """The verdict of the rules ``lower``, ``higher`` and ``comparable`` on paired test scores.

    Raises:
        ValueError: if no seed has both.
    """
    found = paired(mine, theirs)
    if found is None:
        raise ValueError("no seed has runs of both")
    if kind == "comparable":
        verdict = claims.decide_margin(found.low, found.high, margin)
    else:
        side = "below" if kind == "lower" else "above"
        verdict = claims.decide(found.low, found.high, side)
    number = f"{metric} {found.mean:+.3g}{_interval(found.low, found.high, '+')}"
    differences = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
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

    Args:
        less: leads by seed where they are said to be smaller.
        more: leads by seed where they are said to be larger.
        metric: name of the metric.
        matters: change that matters.
        odds: the same leads in log-odds. Then both scales have to agree.

    Raises:
        ValueError: if no seed has finished at both settings.
    """
    found = paired(more, less)
    if found is None:
        raise ValueError("no seed has finished at all settings")
    verdict = claims.decide(found.low, found.high, "above")
    seeds = [seed for seed in less if seed in more]
    ends = [statistics.fmean(leads[seed] for seed in seeds) for leads in (less, more)]
    number = f"lead in {metric} {ends[0]:+.3g} to {ends[1]:+.3g}, {found.mean:+.3g}"
    number += _interval(found.low, found.high, "+")
    if odds:
        logs = paired(odds[1], odds[0])
        assert logs is not None
        number += f"; in log-odds {logs.mean:+.2g}{_interval(logs.low, logs.high, '+', 2)}"
        if claims.decide(logs.low, logs.high, "above") != verdict:
            verdict = claims.UNDECIDED
    needed = _needed([more[seed] - less[seed] for seed in seeds], matters)
    return Finding(verdict, number, found.number, _ends(found.low, found.high), needed)


def _needed(differences: Sequence[float], effect: float | None) -> int | None:
    if effect is None or len(differences) < 2:
        return None
    return seeds_to_decide(statistics.stdev(differences), effect)


def _ends(low: float, high: float) -> tuple[float, float] | None:
    return None if math.isnan(low) else (low, high)


def _interval(low: float, high: float, sign: str = "", digits: int = 3) -> str:
    return "" if math.isnan(low) else f" ({low:{sign}.{digits}g} to {high:{sign}.{digits}g})"


def log_odds(percent: float) -> float:
    """Log-odds of an accuracy in percent.

    Example:
        >>> log_odds(50.0)
        0.0
    """
    return math.log(percent / (100 - percent))
