"""What a command that takes minutes checks before it begins. Imports no torch."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path


def check_least(arguments: argparse.Namespace, **least: float) -> None:
    """Checks that options are finite and not below their least value.

    Args:
        arguments: of the command.
        least: by the option's name.

    Raises:
        ValueError: for the first that is.
    """
    for name, smallest in least.items():
        given = getattr(arguments, name)
        if not smallest <= given < math.inf:
            finite = " and finite" if given == math.inf else ""
            raise ValueError(f"--{name} must be at least {smallest:g}{finite}, got {given}")


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Checks that options, or all values of one that has several, are finite and above 0.

    Args:
        arguments: of the command.
        names: of the options.

    Raises:
        ValueError: for the first value that is not.
    """
    for name in names:
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if not 0 < value < math.inf:
                raise ValueError(f"--{name} must be positive and finite, got {value:g}")


def check_seed(arguments: argparse.Namespace) -> None:
    """Checks that ``--seed`` is one that torch takes.

    Raises:
        ValueError: if it is not.
    """
    if not -(2**63) <= arguments.seed < 2**64:
        raise ValueError(f"--seed must be between -2**63 and 2**64 - 1, got {arguments.seed}")


def check_picture(option: str, path: Path) -> None:
    """Checks that a file can be written, and that its ending is one of a picture.

    Args:
        option: the option that names the file, for messages.
        path: the file.

    Raises:
        OSError: if it cannot be written.
        ValueError: for another ending, or none.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder: give the name of a file")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"{option} {path} does not name a picture: end it in .png, .svg or .pdf")
    check_file(path)


def check_file(path: Path) -> None:
    """Checks that a file can be written; makes the folder it is to lie in.

    Raises:
        OSError: if it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
