"""Draws the curves of a run beside its logs."""

from __future__ import annotations

from pathlib import Path

from ln_zoo.callbacks.run_picture import RunPicture
from ln_zoo.plots.curves import plot_curves


class CurvesPlot(RunPicture):
    """Draws every logged loss and metric against the update as ``curves.png`` when training ends.

    Also where it ends by an error or an interruption. It reads the file of the run's `CSVLogger`,
    so without one it does nothing.
    """

    file_name = "curves.png"
    written_as = "plot"

    def draw(self, metrics: Path, picture: Path) -> bool:
        return plot_curves(metrics, picture)
