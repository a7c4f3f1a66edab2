"""Errors that bad input gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    message: str,
    call: Callable[..., object],
    *arguments: Any,
    error: type[Exception] = ValueError,
    **options: Any,
) -> str:
    """Assert that a call raises an error that matches a message; returns its whole message."""
    with pytest.raises(error, match=message) as caught:
        call(*arguments, **options)
    return str(caught.value)
