"""From a 95 % interval to a verdict."""

from __future__ import annotations

from collections.abc import Iterable

from ln_zoo.reproduction.claims import DOES_NOT_HOLD, HOLDS, IN_PART, UNDECIDED


def decide(low: float, high: float, wanted: str, matters: float = 0.0) -> str:
    """The verdict of an interval on an effect that is claimed to lie below or above 0.

    The claim holds if the interval lies on that side, and does not if it excludes an effect of the
    size ``matters`` on that side. An interval that is unknown has NaN as its ends.

    Example:
        >>> decide(-0.3, -0.1, "below"), decide(-0.3, 0.1, "below"), decide(0.1, 0.3, "below")
        ('holds', 'undecided', 'does not hold')
        >>> decide(-0.3, 0.1, "below", matters=0.4)
        'does not hold'
    """
    if wanted == "below":
        low, high = -high, -low
    elif wanted != "above":
        raise ValueError(f"wanted must be 'below' or 'above', got {wanted!r}")
    if low > 0:
        return HOLDS
    return DOES_NOT_HOLD if high < matters else UNDECIDED


def decide_margin(low: float, high: float, margin: float) -> str:
    """The verdict of an interval on a difference that is claimed to be less than a margin.

    Example:
        >>> decide_margin(-0.3, 0.4, 0.5), decide_margin(-0.3, 0.6, 0.5)
        ('holds', 'undecided')
        >>> decide_margin(0.6, 0.8, 0.5)
        'does not hold'
    """
    if -margin < low and high < margin:
        return HOLDS
    return DOES_NOT_HOLD if low > margin or high < -margin else UNDECIDED


def combine(verdicts: Iterable[str]) -> str:
    """The verdict of a rule with several parts: if some hold and others do not, it is in part."""
    found = set(verdicts)
    if len(found) == 1:
        return found.pop()
    return IN_PART if {HOLDS, DOES_NOT_HOLD} <= found else UNDECIDED
