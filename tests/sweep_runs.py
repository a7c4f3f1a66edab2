"""Runs whose numbers are known, alone and of a sweep."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from refusals import refuses

from ln_zoo.sweeps.grid import Grid, SweepError
from ln_zoo.sweeps.manifest import write_grid
from ln_zoo.sweeps.results import Results

refuses = functools.partial(refuses, error=SweepError)


def write_tested(folder: Path, columns: str, rows: list[str], **results: object) -> None:
    """A run that has finished: the rows of its table, and the results of its test."""
    folder.mkdir(parents=True)
    (folder / "test_results.json").write_text(json.dumps(results))
    (folder / "metrics.csv").write_text("\n".join([columns, *rows]) + "\n")


def results(
    out: Path, layer: list[list[float]], none: list[list[float]], lrs: tuple[str, ...] = ("1",)
) -> Results:
    """A sweep whose runs log these validation losses by epochs of 10 updates.

    The last is the test error too. With several rates the curves are those of the last, and the
    others' are worse.
    """
    out.mkdir(exist_ok=True)
    seeds = list(range(len(layer)))
    grid = Grid(["c.yaml"], ["layer.yaml", "none.yaml"], seeds, {"lr": list(lrs)})
    write_grid(grid, out)
    for run in grid.runs():
        curve = {"layer": layer, "none": none}[Path(run.norm).stem][run.seed]
        if run.settings["lr"] != lrs[-1]:
            curve = [9.0 for _ in curve]
        metrics = {"error": curve[-1], "nll": curve[-1]}
        lines = [f"{epoch},{10 * epoch + 9},{value}" for epoch, value in enumerate(curve)]
        write_tested(out / run.name, "epoch,step,val_nll", lines, metrics=metrics)
    return Results(grid, out)


SLOW = [[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]] * 3
FAST = [
    [0.9, 0.5, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1],
    [0.9, 0.5, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1],
    [0.9, 0.5, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1],
]
#: What `write_run` logs.
METRICS = ["epoch_train_nll", "epoch_test_error"]


def write_run(folder: Path, values: list[float]) -> Path:
    """A run as Lightning logs it: rows of updates between the rows that end an epoch."""
    folder.mkdir(parents=True)
    lines = ["epoch,step,train_loss,epoch_train_nll,epoch_test_error"]
    for epoch, value in enumerate(values):
        lines += [f"{epoch},{9 + 10 * epoch},0.5,,", f"{epoch},{10 + 10 * epoch},,{value},0.02"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def write_steps(folder: Path, scores: dict[int, float], name: str = "step_train_nll") -> Path:
    """A run that was scored within epochs of 10 updates, as `StepEvaluation` logs it."""
    folder.mkdir(parents=True)
    lines = [f"epoch,step,train_loss,{name}"]
    for step, score in scores.items():
        lines += [f"{step // 10},{step},,{score}", f"{step // 10},{step},0.5,"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder
