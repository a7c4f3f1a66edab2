"""Draws the curves of a run beside its logs."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

#: Endings of logged names that are drawn on a logarithmic axis.
_LOGARITHMIC = ("loss", "nll")


class CurvesPlot(Callback):
    """Draws every logged loss and metric against the update as ``curves.png`` when training ends.

    It reads the file of the run's `CSVLogger`, so without one it does nothing.
    """

    def __init__(self) -> None:
        self.written: Path | None = None

    # teardown, not on_fit_end: the logger writes its last rows between the two.
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()
                metrics = Path(logger.log_dir) / "metrics.csv"
                if metrics.is_file():
                    self.written = metrics.with_name("curves.png")
                    draw_curves(metrics, self.written)
                return


def read_curves(metrics: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Reads a ``metrics.csv``: by name the updates and the values, in the order logged."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    with metrics.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(int(row["step"]))
                    values.append(float(text))
    return curves


def draw_curves(metrics: Path, picture: Path) -> None:
    """Draws a ``metrics.csv``: one panel for each kind of metric, its sets together."""
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    curves = read_curves(metrics)
    panels: dict[str, list[str]] = {}
    for name in curves:
        if not name.endswith("seconds"):
            kind = name.rsplit("_", 1)[-1]
            panels.setdefault("nll" if kind == "loss" else kind, []).append(name)
    if not panels:
        return
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (kind, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            steps, values = curves[name]
            axis.plot(steps, values, label=name, marker="." if len(steps) < 3 else None)
        if kind.endswith(_LOGARITHMIC) and min(min(curves[n][1]) for n in names) > 0:
            axis.set_yscale("log")
        axis.set_xlabel("update")
        axis.set_ylabel("nats" if kind == "nll" else kind)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
