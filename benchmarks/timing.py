"""Interleaved timing: every round runs every contestant once, and ratios are taken by round.

What else a machine does changes from second to second. It is felt by all contestants of a round
alike, so that the median of ratios says more than a ratio of medians.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)

#: Seconds that one measurement takes at least; quicker calls are repeated within it.
_SHORTEST = 0.02


@dataclass
class Times:
    """Seconds per call, one entry a round: by the clock, and of the processor over all threads."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Of one or more values.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.5, high=2.5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def interleave(
    calls: Mapping[Name, Callable[[], object]], rounds: int, seconds: float
) -> dict[Name, Times]:
    """Times calls in rounds, each beginning with the next contestant.

    Args:
        calls: what is timed, by name; each is called once or more before, to warm up.
        rounds: how many at most.
        seconds: that one contestant may take on average; there is one round at least.

    Returns:
        The times by name; entries of one round stand at the same place.
    """
    numbers = {name: _calls_per_measurement(call) for name, call in calls.items()}
    times = {name: Times() for name in calls}
    order = list(calls)
    start = time.perf_counter()
    for done in range(rounds):
        if done and time.perf_counter() - start > seconds * len(calls) * done / (done + 1):
            break
        first = done % len(order)
        gc.collect()
        gc.disable()
        try:
            for name in order[first:] + order[:first]:
                wall, cpu = _measure(calls[name], numbers[name])
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
        finally:
            gc.enable()
    return times


def ratios(values: list[float], baseline: list[float]) -> Spread:
    """Spread of the ratios of entries at the same place.

    Example:
        >>> ratios([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]).median
        3.0
    """
    return Spread.of([a / b for a, b in zip(values, baseline, strict=True)])


def compared(found: Times, baseline: Times) -> dict[str, float]:
    """Ratios by the clock and of processor time, with quartiles, as columns of a CSV file."""
    columns = {}
    for kind in ("wall", "cpu"):
        spread = ratios(getattr(found, kind), getattr(baseline, kind))
        columns[f"{kind}_ratio"] = spread.median
        columns[f"{kind}_ratio_low"] = spread.low
        columns[f"{kind}_ratio_high"] = spread.high
    return columns


def _calls_per_measurement(call: Callable[[], object]) -> int:
    call()
    wall, cpu = _measure(call, 1)
    if cpu < _SHORTEST:  # by the clock, another process may have run in between
        wall = min(wall, *(min(_measure(call, 1)) for _ in range(9)))
    return max(1, round(_SHORTEST / max(wall, 1e-7)))


def _measure(call: Callable[[], object], number: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(number):
        call()
    return (time.perf_counter() - wall) / number, (time.process_time() - cpu) / number
