"""Learning curves of a run."""

from __future__ import annotations

from pathlib import Path

from ln_zoo.callbacks.picture_after_training import PictureAfterTraining
from ln_zoo.plots.curves import plot_curves


class CurvesPlot(PictureAfterTraining):
    """Draw ``curves.png``, all logged losses and metrics by update; see `PictureAfterTraining`."""

    file_name = "curves.png"
    written_as = "plot"

    def draw(self, metrics: Path, picture: Path) -> bool:
        return plot_curves(metrics, picture)
