"""Errors of exports."""

from __future__ import annotations

import importlib


class ExportError(ValueError):
    """A model, form, format or file that cannot be exported, with a one-line reason."""


def check_installed(what: str, *packages: str, extra: str) -> None:
    """Check that packages, given by import names, are installed.

    ``what`` needs them; ``extra`` of ln-zoo installs them.

    Raises:
        ExportError: if one is missing, with the command that installs it.

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
