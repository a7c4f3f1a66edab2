"""Checks of arguments of norms, layers and models: errors name the argument."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from ln_zoo.norms.base import Norm


def check_fields(norm: Any) -> None:
    """Raise ValueError for a field that is not finite, not a boolean, or a negative eps."""
    for field in dataclasses.fields(norm):
        value = getattr(norm, field.name)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        hint = ""
        if field.name == "eps" and not (number and math.isfinite(value) and value >= 0):
            wanted, hint = "a finite number >= 0", "; 1e-5 is the usual choice"
        elif field.type in ("float", float) and not (number and math.isfinite(value)):
            wanted = "a finite number"
        elif field.type in ("bool", bool) and not isinstance(value, bool):
            wanted = "True or False"
        else:
            continue
        raise ValueError(
            f"{type(norm).__name__}: {field.name} must be {wanted}, got {value!r}{hint}"
        )


def check_no_norm(owner: object, **arguments: object) -> None:
    """Raise TypeError if a norm was passed by position as another argument of ``owner``."""
    for name, value in arguments.items():
        if isinstance(value, Norm):
            raise TypeError(
                f"{type(owner).__name__}: {name} was given the norm {value!r}; give it by "
                f"keyword: norm={type(value).__name__}(...)"
            )


def check_sizes(**sizes: int | Sequence[int]) -> None:
    """Raise TypeError or ValueError unless sizes, or their elements, are integers of at least 1."""
    small = {}
    for name, given in sizes.items():
        values = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values):
            raise TypeError(f"{name} must be an integer, or several, got {given!r}")
        if values and min(values) < 1:
            small[name] = given
    if small:
        raise ValueError(f"every size must be at least 1, got {small}")


def check_positive(**values: float | None) -> None:
    """Raise TypeError or ValueError unless values are positive numbers or None."""
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}")


def check_words(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Raise ValueError unless each value is among its choices, given as (value, choices)."""
    for name, (value, words) in choices.items():
        if value not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {value!r}")
