"""Checks of arguments of norms and layers."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from ln_zoo.norms.base import Norm


def check_fields(norm: Any) -> None:
    """Check the fields of a norm, a dataclass, by their types.

    Raises:
        ValueError: unless ``float`` fields are finite, eps is at least 0, and ``bool`` fields are
            booleans.
    """
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
    """Check that no norm was passed as another argument of a layer, by position.

    Args:
        owner: the layer.
        **arguments: its arguments.

    Raises:
        TypeError: if one of them is a norm.
    """
    for name, value in arguments.items():
        if isinstance(value, Norm):
            raise TypeError(
                f"{type(owner).__name__}: {name} was given the norm {value!r}; give it by "
                f"keyword: norm={type(value).__name__}(...)"
            )
