"""One rule for every comparison, in the words of ``docs/results/protocol.md``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

from ln_zoo.reproduction.claims import BETTER, SAME, UNDECIDED, WORSE
from ln_zoo.sweeps.statistics import Difference, mean_difference

#: Error of a word, half of it on either side.
ALPHA = 0.05


@dataclass(frozen=True)
class Verdict:
    """An effect with its 95 % interval, and one-sided p-values of the three words."""

    estimate: float
    low: float
    high: float
    better: float
    worse: float
    same: float

    @property
    def p(self) -> float:
        """The p-value of a decision, of whichever word."""
        return min(1.0, 2 * min(self.better, self.worse, self.same))

    def word(self, alpha: float = ALPHA) -> str:
        """The word of the 95 % interval if its own p-value is at most ``alpha``, or *undecided*.

        *same* comes before *better* and *worse*.
        """
        found = {SAME: self.same, BETTER: self.better, WORSE: self.worse}
        word = next((word for word, p in found.items() if p <= ALPHA / 2), UNDECIDED)
        return word if found.get(word, 1.0) <= alpha / 2 else UNDECIDED


def decide(
    effects: Sequence[float], margin: float, least_deviation: float = 0.0, censored: bool = False
) -> Verdict:
    """The verdict of paired effects, of which positive ones favour the claim.

    By Student's t, with a standard deviation of at least ``least_deviation``. If runs are
    ``censored``, by Wilcoxon's exact signed-rank test: the estimate is that of Hodges and Lehmann,
    and an effect may be infinite. A single pair decides nothing.

    Example:
        >>> decide([0.9, 1.0, 1.2], 0.2).word(), decide([-0.01, 0.0, 0.01], 0.2).word()
        ('better', 'same')
        >>> decide([0.0, 0.3, 0.1], 0.2).word(), decide([math.inf] * 6, 0.2, censored=True).word()
        ('undecided', 'better')
    """
    if len(effects) < 2:
        estimate = effects[0] if effects else math.nan
        return Verdict(estimate, math.nan, math.nan, 1.0, 1.0, 1.0)
    if censored:
        return _by_ranks(effects, margin)
    from scipy.stats import t  # slow to import

    found = mean_difference(effects, least_deviation)
    error = max(statistics.stdev(effects), least_deviation) / math.sqrt(found.number)

    def above(least: float) -> float:
        if not error:  # all effects are equal
            return 0.5 if found.mean == least else float(found.mean < least)
        return float(t.sf((found.mean - least) / error, found.number - 1))

    same = max(above(-margin), 1 - above(margin))
    return Verdict(found.mean, found.low, found.high, above(0.0), 1 - above(0.0), same)


def _by_ranks(effects: Sequence[float], margin: float) -> Verdict:
    def tails(shift: float) -> tuple[float, float]:
        return signed_rank([effect - shift for effect in effects])

    pairs = combinations_with_replacement(effects, 2)
    means = sorted(0.0 if math.isnan(a + b) else (a + b) / 2 for a, b in pairs)
    finite = sorted({mean for mean in means if math.isfinite(mean)}) or [0.0]
    # Between neighbouring means the p-values of a shift are constant.
    ends = [-math.inf, *finite, math.inf]
    middles = [finite[0] - 1, *((a + b) / 2 for a, b in pairwise(finite)), finite[-1] + 1]
    ranges = list(zip(ends, middles, ends[1:], strict=False))
    low = next((a for a, shift, _ in ranges if tails(shift)[1] > ALPHA / 2), finite[-1])
    high = next((b for _, shift, b in ranges[::-1] if tails(shift)[0] > ALPHA / 2), finite[0])
    below, above = tails(0.0)
    same = max(tails(-margin)[1], tails(margin)[0])
    return Verdict(statistics.median(means), low, high, above, below, same)


def holm(verdicts: Mapping[str, Verdict], number: int) -> dict[str, str]:
    """The word of each verdict with Holm's correction over ``number`` outcomes.

    A word stays if its own p-value passes the step of its outcome, whose place is that of the
    smallest of its p-values. Outcomes without a verdict count as p = 1.

    Example:
        >>> found = {"a": decide([0.9, 1.0, 1.2], 0.2)}
        >>> holm(found, 1), holm(found, 8)
        ({'a': 'better'}, {'a': 'undecided'})
    """
    words = dict.fromkeys(verdicts, UNDECIDED)
    for place, name in enumerate(sorted(verdicts, key=lambda name: verdicts[name].p)):
        alpha = ALPHA / (number - place)
        if verdicts[name].p > alpha:
            break
        words[name] = verdicts[name].word(alpha)
    return words


def power(deviation: float, effect: float, pairs: int, alpha: float = ALPHA) -> float:
    """Probability that a paired t test (two-sided) finds an effect.

    Example:
        >>> round(power(1.0, 1.0, 10), 2)
        0.8
    """
    from scipy.stats import nct, t

    limit = t.ppf(1 - alpha / 2, pairs - 1)
    return float(nct.sf(limit, pairs - 1, abs(effect) / deviation * math.sqrt(pairs)))


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
