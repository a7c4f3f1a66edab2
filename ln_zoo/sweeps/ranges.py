"""Ranges of settings, which a search explores. Imports neither torch nor Optuna."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ln_zoo.sweeps.grid import Grid, SweepError

_RANGE = re.compile(r"(log|uniform|int)\(([^,]+),([^,]+)\)")


def parse_range(text: str) -> tuple[str, float, float] | None:
    """Kind and bounds of a range; None for any other value.

    Example:
        >>> parse_range("log(1e-4, 1e-2)"), parse_range("1e-3")
        (('log', 0.0001, 0.01), None)
    """
    found = _RANGE.fullmatch(text.replace(" ", ""))
    if found is None:
        return None
    try:
        low, high = float(found[2]), float(found[3])
    except ValueError:
        raise SweepError(f"--set {text}: the bounds of a range are two numbers") from None
    whole = low.is_integer() and high.is_integer()
    if not low < high or (found[1] == "log" and low <= 0) or (found[1] == "int" and not whole):
        needed = {"log": "0 < LOW < HIGH", "int": "whole LOW < HIGH"}.get(found[1], "LOW < HIGH")
        raise SweepError(f"--set {text}: {found[1]}(LOW,HIGH) needs {needed}")
    return found[1], low, high


def check_settings(settings: Mapping[str, Sequence[str]], searched: bool) -> None:
    """Raises SweepError for a range without a search, and for a search of nothing."""
    for option, values in settings.items():
        ranges = [value for value in values if parse_range(value)]
        if ranges and not searched:
            raise SweepError(f"--set {option}={ranges[0]} is a range: give --search optuna")
        if ranges and len(values) > 1:
            raise SweepError(f"--set {option}: give one range, or a list of values, not both")
    if searched and not settings:
        raise SweepError("--search needs --set, such as --set 'model.lr=log(1e-4,1e-2)'")


def corners(grid: Grid) -> Grid:
    """The grid with two trials a norm instead of its own: all first, and all last values."""
    trials = []
    for norm in grid.norms:
        for place in (0, -1):
            settings = {
                option: values[place] if (found := parse_range(values[0])) is None
                else value_text(found[0], found[1:][place])
                for option, values in grid.settings.items()
            }  # fmt: skip
            trials.append({"norm": norm, "number": place, "settings": settings})
    return replace(grid, trials=trials)


def value_text(kind: str, value: Any) -> str:
    """A value as the text of an option; four digits, which also name the run's folder."""
    if kind == "int":
        return str(int(value))
    return f"{value:.4g}" if kind else str(value)
