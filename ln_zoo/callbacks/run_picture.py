"""A picture beside the logs of a run, made of what the run logged."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import TrainerFn


class RunPicture(Callback):
    """Draws a picture beside the file of the run's `CSVLogger` when training ends.

    Also where it ends by an error or an interruption. Without that logger it does nothing. What is
    drawn, and under which name, says the subclass.
    """

    #: Name of the picture's file, and what the command line calls it.
    file_name: str
    written_as: str

    def __init__(self) -> None:
        self.written: Path | None = None

    def draw(self, metrics: Path, picture: Path) -> bool:
        """Draws what a ``metrics.csv`` holds; ``False`` where there is nothing to draw."""
        raise NotImplementedError

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
                picture = metrics.with_name(self.file_name)
                if metrics.is_file() and self.draw(metrics, picture):
                    self.written = picture
                return
