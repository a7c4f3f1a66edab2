"""How long generated tests run: a fixed few in the fast suite, a campaign in the slow one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

#: Seconds of each slow test; all of them together take an hour by default.
SECONDS = float(os.environ.get("LN_ZOO_FUZZ_SECONDS", "1200"))
#: Seed of the first round; another one finds other cases.
SEED = int(os.environ.get("LN_ZOO_FUZZ_SEED", "0"))

#: CPU seconds in which any small input is read or refused.
LIMIT = 20

_COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def fast(examples: int) -> settings:
    """The same examples in each run."""
    phases = [Phase.explicit, Phase.generate, Phase.shrink]
    return settings(max_examples=examples, derandomize=True, phases=phases, **_COMMON)


@contextmanager
def limited() -> Iterator[None]:
    """Fails after `LIMIT` seconds of CPU time."""

    def late(*_: Any) -> None:
        raise AssertionError(f"not done after {LIMIT} s of CPU time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def campaign(cases: SearchStrategy[Any], check: Callable[[Any], object]) -> None:
    """Rounds of 200 cases until the time is over; a failure is shrunk and raised.

    Keep it as an `example` of the fast test. The number of cases is printed (``-s``).
    """
    end, tried = time.monotonic() + SECONDS, 0

    def counted(case: Any) -> None:
        nonlocal tried
        tried += 1
        check(case)

    number = SEED
    try:
        while time.monotonic() < end:
            rounds = settings(max_examples=200, **_COMMON)
            seed(number)(rounds(given(cases)(counted)))()
            number += 1
    finally:
        print(f"{tried} cases, seeds {SEED} to {number}")
