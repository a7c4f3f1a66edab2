"""Pictures of the logged metrics, next to the logs."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn

from ln_zoo.plots.curves import plot_curves
from ln_zoo.utils.packages import require


class PictureAfterTraining(Callback):
    """Draw a picture next to ``metrics.csv`` when training ends, also by an error or a signal.

    A subclass implements `draw` and names the file. No-op without a `CSVLogger`.
    """

    #: File name of the picture, and its name on the command line.
    file_name: str
    written_as: str

    def __init__(self) -> None:
        require("matplotlib")
        self.written: Path | None = None

    def draw(self, metrics: Path, picture: Path) -> bool:
        """Draw a ``metrics.csv``; returns False if there is nothing to draw."""
        raise NotImplementedError

    # In teardown: the logger writes its last rows after on_fit_end.
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
                picture = metrics.with_name(self.file_name)
                if metrics.is_file() and self.draw(metrics, picture):
                    self.written = picture
                return


class CurvesPlot(PictureAfterTraining):
    """Draw ``curves.png``, all logged losses and metrics by update; see `PictureAfterTraining`."""

    file_name = "curves.png"
    written_as = "plot"

    def draw(self, metrics: Path, picture: Path) -> bool:
        return plot_curves(metrics, picture)
