"""Late binding: lets a subpackage call functions of a higher one without importing it.

``ln_zoo/__init__.py`` binds the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LOADERS: dict[str, Callable[[], Any]] = {}


def bind(name: str, load: Callable[[], Any]) -> None:
    """Bind a name to a function that imports its module on first use."""
    _LOADERS[name] = load


def bound(name: str) -> Any:
    """The module bound to a name."""
    return _LOADERS[name]()
