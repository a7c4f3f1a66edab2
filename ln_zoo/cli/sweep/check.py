"""Checks the runs of a grid before the first begins."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ln_zoo.cli import check_training
from ln_zoo.cli.arguments import Arguments
from ln_zoo.cli.errors import error_text
from ln_zoo.sweeps.grid import Grid, Run, SweepError
from ln_zoo.sweeps.state import Length
from ln_zoo.utils.class_paths import import_path
from ln_zoo.utils.schema import argument_types

if TYPE_CHECKING:
    from jsonargparse import Namespace


def check_grid(grid: Grid) -> tuple[Grid, dict[str, Length]]:
    """Builds the model of every label once.

    Returns the grid, with what its data and model take, and the length of the runs by label.
    SweepError for the first label whose arguments are wrong, in one line.
    """
    grid = replace(grid, callback=not _takes_norm(grid))
    runs = {run.label: run for run in reversed(grid.runs())}
    arguments: dict[str, list[str]] = {}
    for label, run in reversed(runs.items()):
        # First the checks without torch.
        with _named(label):
            arguments[label] = _arguments(grid, run)
            check_training(arguments[label])
    from ln_zoo.cli.lightning import settings_of

    lengths: dict[str, Length] = {}
    seeded = False
    for label, argv in arguments.items():
        with _named(label):
            found = settings_of(argv)
            _check_callbacks(found, grid.test)
        trainer = found.trainer
        updates = trainer.get("max_steps")
        lengths[label] = Length(
            trainer.get("max_epochs"), updates if updates and updates > 0 else None
        )
        seeded = seeded or "seed" in (found.data.get("init_args") or ())
    return replace(grid, data_seed=seeded), lengths


def _takes_norm(grid: Grid) -> bool:
    """Whether the model's class has an argument `norm`; true for a class that is not found."""
    configs = [f"--config={path}" for path in grid.configs]
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
