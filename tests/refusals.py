"""Errors that bad input gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def refuses(
    message: str | Iterable[object],
    call: Callable[..., object],
    *arguments: Any,
    error: type[Exception] = ValueError,
    **options: Any,
) -> str:
    """Assert that a call raises an error; returns its whole message.

    Args:
        message: pattern of the message, or the names and values that it has to mention.
        call: what is called with ``arguments`` and ``options``; ``cli`` for a command.
        error: type of the error.
    """
    pattern = message if isinstance(message, str) else None
    with pytest.raises(error, match=pattern) as caught:
        call(*arguments, **options)
    said = str(caught.value)
    if not isinstance(message, str):
        assert [each for each in message if str(each) not in said] == [], said
    return said
