"""Checks of arguments: errors name the argument, its value and what is expected.

TypeError for a value of another type, ValueError for one that is out of range.

Example:
    >>> check_at_least(1, hidden_size=4, channels=[32, 0])
    Traceback (most recent call last):
    ValueError: channels must be integers of at least 1, got [32, 0]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any


def check_at_least(least: int, **values: int | Sequence[int]) -> None:
    """Check that values, or all elements of a value, are integers of at least ``least``."""
    for name, value in values.items():
        several = isinstance(value, list | tuple)
        numbers: Any = value if several else [value]
        wanted = f"{'integers' if several else 'an integer'} of at least {least}"
        if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
            raise TypeError(f"{name} must be {wanted}, got {value!r}")
        if any(n < least for n in numbers):
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


def check_optional(least: int, **values: int | None) -> None:
    """Check the values that are not None, as `check_at_least`."""
    check_at_least(least, **{name: value for name, value in values.items() if value is not None})


def check_positive(**values: float | None) -> None:
    """Check that the values that are not None are positive numbers."""
    given = {name: value for name, value in values.items() if value is not None}
    _check_numbers(given, "positive", lambda value: value > 0)


def check_not_negative(**values: float) -> None:
    """Check that values are finite numbers of at least 0."""
    _check_numbers(values, "finite and at least 0", lambda value: 0 <= value < math.inf)


def check_probability(**values: float) -> None:
    """Check that values are numbers in [0, 1)."""
    _check_numbers(values, "in [0, 1)", lambda value: 0 <= value < 1)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Check that a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def _check_numbers(
    values: Mapping[str, float], wanted: str, allowed: Callable[[float], bool]
) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not allowed(value):
            raise ValueError(f"{name} must be {wanted}, got {value!r}")
