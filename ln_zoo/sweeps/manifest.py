"""The file of a sweep, ``sweep.json``, which holds its grid."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ln_zoo.sweeps.grid import Grid, SweepError
from ln_zoo.utils.files import atomic_write_text, check_output_folder

MANIFEST = "sweep.json"
#: Version 1 has digests of configurations in place of their contents.
_FORMAT_VERSION = 2


def read_grid(folder: Path) -> Grid | None:
    """The grid in a sweep's folder, or None."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SweepError(f"{path} cannot be read ({error}): choose another --out") from error
    try:
        if content.pop("format_version") not in (1, _FORMAT_VERSION):
            raise SweepError(f"{path} was written by a newer version of ln_zoo")
        return Grid(**content)
    except (AttributeError, KeyError, TypeError) as error:
        raise SweepError(f"{path} was not written by ln-zoo sweep: choose another --out") from error


def existing_grid(folder: Path) -> Grid:
    """The grid in a sweep's folder; SweepError if there is none."""
    if (grid := read_grid(folder)) is None:
        raise SweepError(f"there is no sweep in {folder}")
    return grid


def make_folder(folder: Path) -> None:
    """Create a folder of a sweep; SweepError unless it can be written to."""
    try:
        check_output_folder(folder, "make it writable, or choose another with --out")
    except OSError as error:
        raise SweepError(str(error)) from error


def write_grid(grid: Grid, folder: Path) -> None:
    """Atomically write a grid to its folder."""
    content = {"format_version": _FORMAT_VERSION} | asdict(grid)
    atomic_write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def check_extends(new: Grid, old: Grid, folder: Path) -> None:
    """Raises SweepError unless the new grid contains all runs of the old one.

    Norms, seeds and values may be added; finished runs stay valid.
    """
    differing = []
    was: Any
    now: Any
    for name in ("configs", "options", "test", "threads"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            differing.append(f"{name} {_shown(was)} there, {_shown(now)} here")
    for name in ("sampler", "pruner"):
        was, now = old.search.get(name, "none"), new.search.get(name, "none")
        if was != now:
            differing.append(f"--{name} {was} there, {now} here")
    if list(old.settings) != list(new.settings):
        was, now = list(old.settings), list(new.settings)
        differing.append(f"--set of {_shown(was)} there, of {_shown(now)} here")
    kept: dict[str, tuple[list[Any], list[Any]]]
    kept = {"norms": (old.norms, new.norms), "seeds": (old.seeds, new.seeds)}
    kept |= {f"--set {k}": (v, new.settings.get(k, v)) for k, v in old.settings.items()}
    for name, (was, now) in kept.items():
        if missing := [value for value in was if value not in now]:
            differing.append(f"{name} {_shown(missing)} only there")
    digests = new.all_digests()
    for name, digest in old.all_digests().items():
        if digests.get(name, digest) != digest:
            differing.append(f"{name} has changed since")
    if differing:
        raise SweepError(
            f"{folder} holds another sweep ({'; '.join(differing)}): choose another --out. More "
            "norms, seeds and values may be added to it"
        )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nothing"
    return str(value)
