"""Checks the runs of a grid before the first begins."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_zoo.cli import check_training
from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.errors import error_text
from ln_zoo.sweeps.grid import Grid, Run, SweepError, norm_name
from ln_zoo.sweeps.ranges import corners
from ln_zoo.sweeps.state import Length
from ln_zoo.utils.class_paths import import_path
from ln_zoo.utils.schema import argument_types

if TYPE_CHECKING:
    from jsonargparse import Namespace


@dataclass
class Checked:
    """What a check of a grid has found."""

    lengths: dict[str, Length] = field(default_factory=dict)  # of the runs, by label
    data_seed: bool = False  # whether the data module has a seed
    callback: bool = False  # whether `Normalize` gives the model its norm
    data: str = ""  # checksum
    modules: dict[str, list[str]] = field(default_factory=dict)  # see `Grid.modules`
    paths: set[str] = field(default_factory=set)  # see `Grid.paths`


def check_grid(grid: Grid, out: Path) -> Checked:
    """Builds the model of every label once.

    Raises:
        SweepError: for the first label whose arguments are wrong, and for data that differ from
            the sweep's, in one line.
    """
    grid = replace(grid, callback=not _takes_norm(grid))
    grid = corners(grid) if grid.search else grid
    runs = {run.label: run for run in reversed(grid.runs())}
    arguments: dict[str, list[str]] = {}
    for label, run in reversed(runs.items()):
        # First the checks without torch.
        with _named(label):
            arguments[label] = _arguments(grid, run)
            check_training(arguments[label])
    from ln_zoo.cli.lightning import settings_of

    checked = Checked(callback=grid.callback)
    for label, argv in arguments.items():
        with _named(label):
            found = settings_of(argv)
            _check_callbacks(found, grid.test)
        trainer = found.trainer
        updates = trainer.get("max_steps")
        length = Length(trainer.get("max_epochs"), updates if updates and updates > 0 else None)
        checked.lengths[label] = length
        if grid.search:
            checked.lengths[norm_name(runs[label].norm)] = length
        checked.data_seed |= "seed" in (found.data.get("init_args") or ())
        checked.data = checked.data or _checksum(found.data)
        settings = found.as_dict()
        for module in _own_modules(settings):
            checked.modules[module] = _folders(module, out)
            checked.paths |= {name for name in (module, f"{module}.py") if os.path.exists(name)}
        settings["trainer"].pop("logger", None)  # its folder is the sweep's
        checked.paths |= _relative_paths(settings)
    if grid.data and checked.data not in ("", grid.data):
        raise SweepError(
            f"the data here have checksum {checked.data[:12]}, those of {out} have "
            f"{grid.data[:12]}: give the same files"
        )
    return checked


def _checksum(data: Namespace) -> str:
    """The checksum of the data, or "" if they have no files here."""
    module = import_path(data.class_path)(**(data.get("init_args") or {}))
    checksum = getattr(module, "checksum", None)
    return (checksum() if checksum is not None else None) or ""


def _own_modules(settings: Any) -> set[str]:
    """Top-level modules of the classes in settings that are not installed, such as ``my_norm``."""
    if isinstance(settings, list):
        return {module for each in settings for module in _own_modules(each)}
    if not isinstance(settings, Mapping):
        return set()
    found = {module for each in settings.values() for module in _own_modules(each)}
    path = settings.get("class_path")
    if isinstance(path, str) and not _is_installed(module := path.partition(".")[0]):
        found.add(module)
    return found


def _relative_paths(settings: Any) -> set[str]:
    """Texts in settings that name files or folders here."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list):
        return {path for each in settings for path in _relative_paths(each)}
    is_path = isinstance(settings, str | os.PathLike) and not os.path.isabs(str(settings))
    return {str(settings)} if is_path and os.path.exists(str(settings)) else set()


def _is_installed(module: str) -> bool:
    file = _file_of(module)
    if file is None or module == "ln_zoo" or file.is_relative_to(sysconfig.get_path("stdlib")):
        return True
    return bool({"site-packages", "dist-packages"} & set(file.parts))


def _file_of(module: str) -> Path | None:
    found = sys.modules.get(module)
    for folder in getattr(found, "__path__", ()):
        return Path(folder, "__init__.py")
    file = getattr(found, "__file__", None)
    return Path(file) if file else None


def _folders(module: str, out: Path) -> list[str]:
    """The folder of a module, relative to the sweep's, and absolute."""
    file = _file_of(module)
    assert file is not None
    return places(file.parent.parent if file.stem == "__init__" else file.parent, out)


def places(folder: Path, out: Path) -> list[str]:
    """A folder relative to the sweep's, and absolute."""
    return [os.path.relpath(folder.absolute(), out.absolute()), str(folder.absolute())]


def _takes_norm(grid: Grid) -> bool:
    """Whether the model's class has an argument `norm`; true for a class that is not found."""
    configs = [f"--config={grid.configuration(path)}" for path in grid.configs]
    path = Arguments(["fit", *configs, *grid.options]).last("model")
    cls = import_path(path) if isinstance(path, str) and "." in path else None
    if not isinstance(cls, type):
        return True
    known, others = argument_types(cls)
    return "norm" in known or others


def _arguments(grid: Grid, run: Run) -> list[str]:
    # This function finds out whether the data module has a seed.
    return ["fit", *(a for a in grid.arguments(run) if not a.startswith("--data.seed="))]


@contextlib.contextmanager
def _named(label: str) -> Iterator[None]:
    """Name the label in errors of ``fit``, and drop its notes, which the run prints again."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        raise SweepError(f"{label}: {error_text(error)}") from error


def _check_callbacks(settings: Namespace, test: str) -> None:
    if not any(_classes(settings.trainer.get("logger"), "CSVLogger")):
        raise SweepError("a sweep reads metrics.csv: keep CSVLogger among the loggers")
    checkpoints = _classes(settings.trainer.get("callbacks"), "ModelCheckpoint")
    if test == "best" and not any((x.get("init_args") or {}).get("monitor") for x in checkpoints):
        raise SweepError("--test best needs a ModelCheckpoint with a monitor among callbacks")


def _classes(chosen: Any, name: str) -> list[Namespace]:
    several: list[Any] = chosen if isinstance(chosen, list) else [chosen]
    return [x for x in several if str(getattr(x, "class_path", "")).rpartition(".")[2] == name]
