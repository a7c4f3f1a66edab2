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
