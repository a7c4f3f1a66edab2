"""Checks of the values that strategies are made with."""

from __future__ import annotations

import math
from typing import Protocol


class _HasEps(Protocol):
    @property
    def eps(self) -> float: ...


def check_eps(norm: _HasEps) -> None:
    """Raises ValueError unless eps is a finite number of at least 0."""
    if not (math.isfinite(norm.eps) and norm.eps >= 0):
        raise ValueError(
            f"{type(norm).__name__}: eps must be a finite number >= 0, got {norm.eps!r}; "
            "1e-5 is the usual choice"
        )
