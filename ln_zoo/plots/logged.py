"""Logging of pictures."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger


def log_picture(trainer: Trainer, name: str, picture: Path) -> None:
    """Log a PNG file at the current update, in the series ``name``.

    Supports the `TensorBoardLogger` and loggers with ``log_image(name, [file], step=...)``, such as
    `WandbLogger`.
    """
    from matplotlib.image import imread

    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            image = imread(picture)[..., :3]
            logger.experiment.add_image(name, image, trainer.global_step, dataformats="HWC")
        elif callable(log_image := getattr(logger, "log_image", None)):
            log_image(name, [str(picture)], step=trainer.global_step)
