"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest known name, or "".

    Example:
        >>> nearest("LayrNorm", ["LayerNorm", "BatchNorm"])
        "; did you mean 'LayerNorm'?"
    """
    lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""
