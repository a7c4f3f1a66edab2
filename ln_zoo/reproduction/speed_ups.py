"""Updates of a norm and of the baseline to the same targets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ln_zoo.plots.comparison import Curve
from ln_zoo.reproduction.claims import DOES_NOT_HOLD, HOLDS, UNDECIDED
from ln_zoo.reproduction.decisions import decide
from ln_zoo.reproduction.statistics import interval_text, shared_seeds, signed_rank
from ln_zoo.sweeps.speed import best_of, steps_to
from ln_zoo.sweeps.statistics import Difference, mean_difference

#: Targets of the rule ``faster``, as shares of the baseline's improvement.
TARGETS = (0.90, 0.95, 0.99)
#: The targets of 95 and 99 % count only if this share of the baseline's runs reaches them;
#: otherwise a miss shows where runs level off, not their speed.
REACHED = 0.9
#: By seed.
Curves = Mapping[int, Curve]


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
            opposed = DOES_NOT_HOLD if above <= 0.025 else UNDECIDED
            return HOLDS if below <= 0.025 else opposed
        found = self.difference
        return decide(found.low, found.high, "below", math.log(matters))

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
        ends = interval_text(math.exp(-found.high), math.exp(-found.low))
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
    seeds, best = shared_seeds(curves, baseline), best_of(metric)
    first = start
    if first is None:
        first = statistics.median(baseline[seed][min(baseline[seed])] for seed in seeds)
    last = statistics.median(best(baseline[seed].values()) for seed in seeds)
    if best(first, last) == first:
        raise ValueError(
            f"the baseline's {metric} never improves: there is no fall to compare with"
        )
    return [
        speed_to(curves, baseline, metric, share, first + share * (last - first))
        for share in targets
    ]


def speed_to(
    curves: Curves, baseline: Curves, metric: str, share: float, target: float | None = None
) -> Speed:
    """Updates to a target; without one, to each run's own best value."""

    def steps_of(curve: Curve) -> float:
        value = best_of(metric)(curve.values()) if target is None else target
        return steps_to(curve, metric, value)

    seeds = shared_seeds(curves, baseline)
    steps, base = ({seed: steps_of(each[seed]) for seed in seeds} for each in (curves, baseline))
    variances = [
        _rounding(curves[seed], steps[seed]) + _rounding(baseline[seed], base[seed])
        for seed in seeds
    ]
    rounding = math.sqrt(statistics.fmean(variances))
    ends = {seed: (float(max(curves[seed])), float(max(baseline[seed]))) for seed in seeds}
    return Speed(share, math.nan if target is None else target, steps, base, rounding, ends)


def _rounding(curve: Curve, step: float) -> float:
    """Variance of log(step), uniform since the previous score."""
    before = max((place for place in curve if place < step), default=0)
    return ((step - before) / step) ** 2 / 12 if math.isfinite(step) and step else 0.0
