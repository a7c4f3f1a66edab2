"""Draws the curves of a run beside its logs."""

from __future__ import annotations

import csv
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn

#: By the ending of a logged name: what its axis is called; these axes are logarithmic.
_AXES = {
    "point_nll": "NLL (nats per point)",
    "sequence_nll": "NLL (nats per sequence)",
    "nll": "loss, NLL (nats per case)",
}


class CurvesPlot(Callback):
    """Draws every logged loss and metric against the update as ``curves.png`` when training ends.

    Also where it ends by an error or an interruption. It reads the file of the run's `CSVLogger`,
    so without one it does nothing.
    """

    def __init__(self) -> None:
        self.written: Path | None = None

    # teardown, not on_fit_end: the logger writes its last rows between the two.
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._draw(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
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
    """Draws a ``metrics.csv``: one panel for each kind of metric, each set in one colour.

    What was measured with batch statistics, such as ``val_batch_nll``, is dashed.
    """
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    curves = read_curves(metrics)
    panels: dict[str, list[str]] = {}
    for name in sorted(curves):
        kind = _kind_of(name)
        # What callbacks say of each weight has a picture of its own.
        if kind != "seconds" and not name.startswith("weights/"):
            # The training loss of the zoo's models is their NLL, of one batch.
            panels.setdefault("nll" if kind == "loss" else kind, []).append(name)
    if not panels:
        return
    sets = dict.fromkeys(_set_of(name) for names in panels.values() for name in names)
    colours = {name: f"C{number}" for number, name in enumerate(sets)}
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (kind, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            steps, values = curves[name]
            of_batches = name.endswith("_loss")
            axis.plot(
                steps,
                values,
                label=name,
                color=colours[_set_of(name)],
                linestyle="--" if "_batch_" in name else "-",
                linewidth=0.8 if of_batches else 1.6,
                alpha=0.6 if of_batches else 1.0,
                marker=None if of_batches else ".",
            )
        positive = min(min(curves[name][1]) for name in names) > 0
        if kind in _AXES and positive:
            axis.set_yscale("log")
        axis.set_xlabel("update")
        axis.set_ylabel(_AXES.get(kind, kind))
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize="small")
    figure.savefig(picture, dpi=120)


def _kind_of(name: str) -> str:
    """What was measured: ``"nll"`` for ``val_nll``, ``"point_nll"`` for ``val_point_nll``."""
    known = (kind for kind in _AXES if name.endswith(f"_{kind}"))
    return next(known, name.rpartition("_")[2])


def _set_of(name: str) -> str:
    """What a metric was measured on: ``"val"`` for ``val_nll`` and ``val_batch_nll``."""
    return name.removesuffix(f"_{_kind_of(name)}").removesuffix("_batch")
