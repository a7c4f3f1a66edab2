"""Class paths: a class as the text ``module.Class`` in configurations, checkpoints and cards."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def class_path(cls: Any) -> str:
    """Import path of a class or function; ours by the room that exports it, if one does."""
    module, name = cls.__module__, cls.__qualname__
    room = ".".join(module.split(".")[:2])
    if room.startswith("ln_zoo.") and getattr(sys.modules[room], name, None) is cls:
        module = room
    return f"{module}.{name}"


def import_path(path: str) -> Any:
    """Import the object at ``module.name``. ImportError if there is none.

    Runs the module's code: for paths that the user gave, and for the user's own files.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"{path!r} cannot be imported: {error}") from error


def loaded(path: str) -> Any:
    """The object at a path whose module is imported already, else None."""
    module, *names = path.split(".")
    found: Any = sys.modules.get(module)
    for name in names:
        module = f"{module}.{name}"
        # Not by getattr, which may import another module.
        found = sys.modules.get(module) or getattr(found, "__dict__", {}).get(name)
    return found
