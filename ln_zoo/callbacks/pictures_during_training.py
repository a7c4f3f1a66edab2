"""Pictures at chosen epochs and updates of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from ln_zoo.callbacks.on_update import EveryUpdate
from ln_zoo.plots.figures import save_figure
from ln_zoo.utils.checks import check_optional
from ln_zoo.utils.packages import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PicturesDuringTraining(EveryUpdate):
    """Draw pictures after every n-th epoch, every n-th update, or both; see `draw`.

    Args:
        every_n_epochs: epochs between pictures; None: none at the end of epochs.
        every_n_steps: updates between pictures; None: none within epochs.
    """

    def __init__(self, every_n_epochs: int | None, every_n_steps: int | None) -> None:
        check_optional(1, every_n_epochs=every_n_epochs, every_n_steps=every_n_steps)
        if every_n_epochs is None and every_n_steps is None:
            raise ValueError("every_n_epochs and every_n_steps are both None: give one of them")
        require("matplotlib")
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.written: list[Path] = []

    def draw(self, trainer: Trainer, folder: Path, epochs: float) -> None:
        """Draw into a folder after this many epochs; called on all processes."""
        raise NotImplementedError

    def keep(self, trainer: Trainer, name: str, figure: Figure, picture: Path) -> None:
        """Write a figure, and log it in the series ``name``.

        Loggers with ``log_image(name, [file], step=...)``, such as `WandbLogger`, are supported.
        """
        save_figure(figure, picture)
        self.written.append(picture)
        from matplotlib.image import imread

        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                image = imread(picture)[..., :3]
                logger.experiment.add_image(name, image, trainer.global_step, dataformats="HWC")
            elif callable(log_image := getattr(logger, "log_image", None)):
                log_image(name, [str(picture)], step=trainer.global_step)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._drawn = trainer.global_step

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            done = (batch_idx + 1) / trainer.num_training_batches
            self._draw_once(trainer, trainer.current_epoch + done)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw_once(trainer, trainer.current_epoch + 1.0)

    def _draw_once(self, trainer: Trainer, epochs: float) -> None:
        if trainer.global_step != self._drawn:  # both are due at the end of some epochs
            self._drawn = trainer.global_step
            self.draw(trainer, Path(trainer.log_dir or ".") / "samples", epochs)  # collective
