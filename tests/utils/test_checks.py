"""Checks of arguments: the type of the error, and name and value in its message."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses

from ln_zoo.utils.checks import (
    check_at_least,
    check_choice,
    check_not_negative,
    check_optional,
    check_positive,
    check_probability,
)

CASES: list[tuple[Callable[..., None], list[Any], list[Any], list[Any]]] = [
    # Check, allowed values, values out of range, values of another type
    (partial(check_at_least, 2), [2, np.int64(3), [2, 4], (), 10**30], [1, -1, [3, 1]],
     [2.0, True, None, "2", [2, None]]),
    (partial(check_optional, 2), [2, None], [1], [2.5, False]),
    (check_positive, [1, 1e-9, math.inf, None], [0, -0.1, math.nan],
     ["fast", True, torch.tensor(1.0)]),
    (check_not_negative, [0, 0.5], [-1e-9, math.nan, math.inf], [None, "0", False]),
    (check_probability, [0, 0.999], [1, -0.1, math.nan], [None, True]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "allowed", "out_of_range", "of_another_type"), CASES)
def test_values(
    check: Callable[..., None],
    allowed: list[Any],
    out_of_range: list[Any],
    of_another_type: list[Any],
) -> None:
    for value in allowed:
        check(number=value)
    for values, error in ((out_of_range, ValueError), (of_another_type, TypeError)):
        for value in values:
            message = refuses("^number must be", check, error=error, number=value)
            assert repr(value) in message


def test_a_choice() -> None:
    check_choice("mode", "sum", ("sum", "mean"))
    for value in ("max", None, ["sum"]):
        message = refuses(
            "^mode must be 'sum' or 'mean'", check_choice, "mode", value, ("sum", "mean")
        )
        assert repr(value) in message
