"""What is said of a model that cannot be exported."""

from __future__ import annotations

import importlib


class ExportError(ValueError):
    """A model, a form, a format or a file that export refuses, with the reason in one line."""


def check_installed(what: str, *packages: str, extra: str) -> None:
    """Checks that packages of an extra are there.

    Args:
        what: that needs them, for the message.
        *packages: names to import.
        extra: of ln-zoo, which installs them.

    Raises:
        ExportError: naming the first that is missing, and the command that installs it.

    Example:
        >>> check_installed("a chart", "no_such_package", extra="charts")
        Traceback (most recent call last):
            ...
        ln_zoo.export.errors.ExportError: a chart needs the package no_such_package: ...
    """
    for name in packages:
        try:
            importlib.import_module(name)
        except ImportError:
            raise ExportError(
                f"{what} needs the package {name}: pip install 'ln-zoo[{extra}]'"
            ) from None
