"""The error of cards, and text from files made safe for a terminal."""

from __future__ import annotations

import re

#: Control characters except newline and tab, bidi marks, surrogates.
_TERMINAL_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class CardError(ValueError):
    """A card that is missing, damaged or unsupported; control characters are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NotAllowedError(CardError):
    """A file chooses a class that it may not, or far too many values."""


def printable(text: str) -> str:
    """Text with control characters escaped, as ``\\x1b``; newlines and tabs stay.

    They would move the cursor, rename the window or hide text.

    Example:
        >>> print(printable("mlp\\x1b[2J\\r\\n"))
        mlp\\x1b[2J\\r
        <BLANKLINE>
    """
    return _TERMINAL_CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class; torch and the hub append more."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
