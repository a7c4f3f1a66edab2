"""Validation of the arguments of callbacks: errors name the argument."""

from __future__ import annotations


def check_at_least(least: int, **values: int | None) -> None:
    """Raise ValueError unless each value is at least ``least``, or None."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
