"""Checks of a run's output folders, and the paths of its files."""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from ln_zoo.cli.run_folders import REMEDY
from ln_zoo.utils.files import check_output_folder, relative


def check_writable(trainer: Trainer, trained: torch.nn.Module | None) -> None:
    """Checks before training that the output folders are writable and have room.

    ``trained`` is the model whose checkpoints will be written, if any.

    Raises:
        OSError: if a folder is not writable, or the disk has no room for three checkpoints.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    folders = {Path(logger.save_dir or ".") for logger in trainer.loggers}
    chosen = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    folders |= {Path(folder) for folder in chosen if folder}
    for folder in folders or {Path(trainer.default_root_dir)}:
        check_output_folder(folder, REMEDY)
        if trained is None:
            continue
        # Weights and Adam's two moments, in two checkpoints and in the one being written.
        needed = 3 * 3 * sum(t.numel() * t.element_size() for t in trained.state_dict().values())
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(
                f"the output folder {folder} has {free / 1e6:.1f} MB left, and checkpoints need "
                f"{needed / 1e6:.1f} MB: make room or choose another with --trainer.logger.save_dir"
            )


def full_disk(error: Exception, trainer: Trainer | None) -> OSError | None:
    """For an error of a full disk: the folder, and how to resume; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    # Errors of `AtomicCheckpointIO` already name the file.
    text = str(error)
    if error.strerror is not None:
        where = error.filename
        if where is None and trainer is not None:
            folders = [x.log_dir for x in trainer.loggers if x.log_dir]
            where = relative(Path(folders[0] if folders else trainer.default_root_dir).absolute())
        text = f"{error.strerror}{f' for {where}' if where else ''}: make room"
    for callback in trainer.checkpoint_callbacks if trainer is not None else ():
        newest = getattr(callback, "newest", None)  # `LastCheckpoint` has it
        if newest is not None and (checkpoint := newest()):
            path = relative(Path(checkpoint).absolute())
            text += f"; then resume with the same command and --ckpt_path {path}"
    return OSError(text)


@contextlib.contextmanager
def quiet_writers() -> Iterator[None]:
    """Silence tracebacks of TensorBoard's thread on a full disk; the run raises as well."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        writer = type(arguments.thread).__module__.partition(".")[0] == "tensorboard"
        if not (writer and isinstance(arguments.exc_value, OSError)):
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def print_paths(trainer: Trainer) -> None:
    """Prints the paths of checkpoint, curves and plot."""
    if not trainer.is_global_zero:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.best_model_path:
            by = f"best {callback.monitor}" if callback.monitor else "last"
            print(f"checkpoint ({by}): {relative(callback.best_model_path)}")
    print_written(trainer)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            print(f"curves: {relative(Path(logger.log_dir) / 'metrics.csv')}")
        elif isinstance(logger, TensorBoardLogger):
            print(f"TensorBoard: tensorboard --logdir {relative(logger.log_dir)}")


def print_written(trainer: Trainer) -> None:
    """Prints the files of callbacks with the attribute ``written_as``."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name, written = getattr(callback, "written_as", None), getattr(callback, "written", None)
        if name and written:
            print(f"{name}: {relative(written)}")
