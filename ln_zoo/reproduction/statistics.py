"""Tests and intervals of the verdicts, beside those of `ln_zoo.sweeps.statistics`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ln_zoo.sweeps.statistics import Difference


def welch(values: Sequence[float], others: Sequence[float]) -> Difference:
    """The difference of two means, with the 95 % interval of Welch's t.

    Example:
        >>> welch([1.0, 2.0, 3.0], [0.0, 1.0])
        Difference(number=5, mean=1.5, low=-0.987..., high=3.987...)
    """
    from scipy.stats import ttest_ind  # slow to import

    ends = ttest_ind(values, others, equal_var=False).confidence_interval()
    mean = statistics.fmean(values) - statistics.fmean(others)
    return Difference(len(values) + len(others), mean, float(ends.low), float(ends.high))


def signed_rank(differences: Sequence[float]) -> tuple[float, float]:
    """Exact one-sided p-values of Wilcoxon's signed-rank test, below 0 and above 0.

    Differences of 0 are dropped and ties share their ranks; infinite differences, of runs that miss
    a target, tie for the highest rank.

    Example:
        >>> signed_rank([-1.0, -2.0, -3.0])
        (0.125, 1.0)
    """
    kept = [each for each in differences if each]
    if not kept:
        return 1.0, 1.0
    sizes = sorted(map(abs, kept))
    # Twice the mean rank of equal sizes, an integer.
    ranks = {size: 2 * sizes.index(size) + sizes.count(size) + 1 for size in sizes}
    counts = {0: 1}  # choices of signs by twice the sum of positive ranks
    for each in kept:
        shifted = {total + ranks[abs(each)]: count for total, count in counts.items()}
        counts = {t: counts.get(t, 0) + shifted.get(t, 0) for t in counts | shifted}
    here = sum(ranks[abs(each)] for each in kept if each > 0)
    every = 2 ** len(kept)
    below = sum(count for total, count in counts.items() if total <= here) / every
    above = sum(count for total, count in counts.items() if total >= here) / every
    return below, above


def seeds_to_decide(deviation: float, effect: float, most: int = 1000) -> int | None:
    """Seeds at which a paired t test (95 %, two-sided) finds an effect with 80 % probability.

    ``deviation`` is the standard deviation of the paired differences so far. None if more than
    ``most`` are needed.

    Example:
        >>> seeds_to_decide(1.0, 1.0)
        10
    """
    if not math.isfinite(deviation) or not effect:
        return None
    from scipy.stats import t

    for number in range(2, most + 1):
        quantiles = t.ppf(0.975, number - 1) + t.ppf(0.8, number - 1)
        if quantiles * deviation / math.sqrt(number) <= abs(effect):
            return number
    return None


def shared_seeds(values: Mapping[int, Any], baseline: Mapping[int, Any]) -> list[int]:
    """Seeds of both; ValueError if there are none."""
    if not (seeds := [seed for seed in values if seed in baseline]):
        raise ValueError("no seed has runs of both norms")
    return seeds


def interval_text(low: float, high: float, sign: str = "", digits: int = 3) -> str:
    """An interval in parentheses; empty if it is unknown."""
    return "" if math.isnan(low) else f" ({low:{sign}.{digits}g} to {high:{sign}.{digits}g})"
