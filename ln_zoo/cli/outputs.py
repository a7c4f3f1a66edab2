"""Where a run writes: its name, its folder, what lies there in the end."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from ln_zoo.callbacks import CurvesPlot


def run_name(settings: Namespace) -> str:
    """``<model>-<norm>``, by the names of their classes."""
    model = settings.model
    name = model.class_path.rsplit(".", 1)[-1]
    norm = model.get("init_args", Namespace()).get("norm")
    return f"{name}-{norm.class_path.rsplit('.', 1)[-1]}" if norm else name


def newest_last_checkpoint(settings: Namespace) -> Path:
    """``last.ckpt`` of the newest run of this name.

    Raises:
        FileNotFoundError: if there is none.
    """
    loggers = settings.trainer.get("logger")
    first = loggers[0] if isinstance(loggers, list) else loggers
    if not isinstance(first, Namespace):
        raise FileNotFoundError(
            "--ckpt_path last looks in the folder of the run's logger, and there is no logger: "
            "give the file itself"
        )
    folder = Path(first.init_args.save_dir) / (first.init_args.name or "")
    found = list(folder.glob("*/checkpoints/last.ckpt"))
    if not found:
        raise FileNotFoundError(
            f"--ckpt_path last: there is no */checkpoints/last.ckpt in {folder}; start without it, "
            "or give the file itself"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def check_writable(trainer: Trainer, model: torch.nn.Module) -> None:
    """Fails now, not after an epoch, if the run's folder cannot take what the run will write.

    Raises:
        OSError: if the folder cannot be made or written to, or the disk has no room for two
            checkpoints.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    # Weights and Adam's two moments, in the newest checkpoint and in the one that replaces it.
    needed = 2 * 3 * sum(t.numel() * t.element_size() for t in model.state_dict().values())
    for folder in {Path(logger.save_dir or ".") for logger in trainer.loggers}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"0")
        except OSError as error:
            raise OSError(
                f"the output folder {folder} cannot be written to ({error.strerror}): choose "
                "another with --trainer.logger.save_dir"
            ) from error
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(
                f"the output folder {folder} has {free / 1e6:.0f} MB left, and checkpoints need "
                f"{needed / 1e6:.0f} MB: make room or choose another with --trainer.logger.save_dir"
            )


def tell_where(trainer: Trainer) -> None:
    """Says where checkpoint, curves and plot lie."""
    if not trainer.is_global_zero:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path:
            by = f"best {callback.monitor}" if callback.monitor else "last"
            print(f"checkpoint ({by}): {_relative(callback.best_model_path)}")
        elif isinstance(callback, CurvesPlot) and callback.written:
            print(f"plot: {_relative(callback.written)}")
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            print(f"curves: {_relative(Path(logger.log_dir) / 'metrics.csv')}")
        elif isinstance(logger, TensorBoardLogger):
            print(f"TensorBoard: tensorboard --logdir {_relative(logger.log_dir)}")


def _relative(path: str | Path) -> Path:
    """The path as seen from the current folder, where it lies below it."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
