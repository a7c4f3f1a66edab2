"""Statistics over seeds: summaries, and differences between runs of the same seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SeedSummary:
    """Number, mean, standard deviation (n - 1; NaN for one value) and range of values."""

    number: int
    mean: float
    deviation: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedSummary:
        """Summarises one or more values."""
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(len(values), statistics.fmean(values), deviation, min(values), max(values))


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its 95 % interval (NaN for a single pair)."""

    number: int
    mean: float
    low: float
    high: float


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """The difference from a baseline over shared seeds; None without a shared seed.

    The interval is from Student's t with n - 1 degrees of freedom, for the mean of n differences
    between runs with the same seed.

    Example:
        >>> paired({0: 1.0, 1: 2.0, 2: 4.0}, {0: 2.0, 1: 4.0, 2: 5.0, 3: 0.0})
        Difference(number=3, mean=-1.333..., low=-2.767..., high=0.100...)
    """
    differences = [values[seed] - baseline[seed] for seed in values if seed in baseline]
    return mean_difference(differences) if differences else None


def mean_difference(differences: Sequence[float], least_deviation: float = 0.0) -> Difference:
    """The mean and its interval, for a standard deviation of at least ``least_deviation``."""
    number, mean = len(differences), statistics.fmean(differences)
    if number < 2:
        return Difference(1, mean, math.nan, math.nan)
    from scipy.stats import t  # slow to import

    deviation = max(statistics.stdev(differences), least_deviation)
    half = float(t.ppf(0.975, number - 1)) * (deviation / math.sqrt(number))
    return Difference(number, mean, mean - half, mean + half)


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
