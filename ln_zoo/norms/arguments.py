"""Checks of norms as arguments, and of their fields."""

from __future__ import annotations

import dataclasses
import math
import numbers
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
