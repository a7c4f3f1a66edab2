"""Hands pictures to the run's loggers."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger


def log_picture(trainer: Trainer, name: str, picture: Path) -> None:
    """Gives a picture to each logger that takes pictures, at the number of updates done.

    Those are the `TensorBoardLogger` and loggers with ``log_image(name, [file], step=...)``, as
    that of Weights & Biases.

    Args:
        trainer: of the run.
        name: of the row of pictures that this one belongs to.
        picture: a .png file.
    """
    from matplotlib.image import imread

    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            image = imread(picture)[..., :3]
            logger.experiment.add_image(name, image, trainer.global_step, dataformats="HWC")
        elif callable(log_image := getattr(logger, "log_image", None)):
            log_image(name, [str(picture)], step=trainer.global_step)
