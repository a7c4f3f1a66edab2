"""Checkpoint files that no kill, full disk or worn one takes away unnoticed."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed
    fcntl = None  # type: ignore[assignment]

_PARTIAL = ".partial"
_PREVIOUS = "-previous"


class DamagedCheckpointError(ValueError):
    """The bytes of a checkpoint are not those that were written."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints so that a whole one is on the disk at every moment.

    A checkpoint is written beside its target, as ``NAME.partial``, forced to the disk, and renamed.
    Lightning's own writer goes through the folder of temporary files: where that is on another file
    system, a kill during the copy leaves a truncated file in place of the checkpoint before. A file
    that is replaced stays as ``NAME-previous`` (``last-previous.ckpt`` beside ``last.ckpt``).

    Reading compares the checksums that every checkpoint has, and raises `DamagedCheckpointError`
    where they differ; torch itself does not look at them. Paths that are not local files, such as
    ``s3://...``, go to Lightning's own writer.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False)
        >>> type(trainer.strategy.checkpoint_io).__name__
        'AtomicCheckpointIO'
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        if storage_options is not None or not _is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        _write(buffer.getbuffer(), Path(path))

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if Path(path).is_file():
            check_whole(path)
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        super().remove_checkpoint(path)
        if _is_local(path):
            previous(path).unlink(missing_ok=True)


def use_atomic_checkpoints(strategy: Strategy) -> None:
    """Makes a strategy write checkpoints with `AtomicCheckpointIO`, where it used Lightning's own.

    What a user chose stays: a plugin (one that wraps none yet wraps this one), and a strategy that
    writes in a way of its own.

    Example:
        >>> from lightning.pytorch.strategies import SingleDeviceStrategy
        >>> strategy = SingleDeviceStrategy("cpu")
        >>> use_atomic_checkpoints(strategy)
        >>> type(strategy.checkpoint_io).__name__
        'AtomicCheckpointIO'
    """
    chosen = strategy._checkpoint_io  # the public property would put Lightning's own in its place
    if isinstance(chosen, _WrappingCheckpointIO):
        chosen.checkpoint_io = AtomicCheckpointIO()  # without effect where it wraps one already
    elif chosen is None and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def check_whole(path: str | Path) -> None:
    """Raises `DamagedCheckpointError` if a checkpoint is damaged, as far as its checksums tell.

    It reads the file once, about 2 GB/s. A file that torch wrote without checksums
    (``torch.serialization.set_crc32_options(False)``), or in its format before version 1.6, is
    not looked at.

    Args:
        path: of an existing file.

    Raises:
        DamagedCheckpointError: the message names the file.
        OSError: if it cannot be read.
    """
    state = os.stat(path)
    damage = _damage(os.fspath(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if damage:
        raise DamagedCheckpointError(f"{path} is damaged: {damage}")


@functools.lru_cache(maxsize=64)
def _damage(path: str, *version: int) -> str:
    """What is wrong with a file, or nothing; read once for each version of it."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return ""
    try:
        with zipfile.ZipFile(path) as archive:
            if not any(member.CRC for member in archive.infolist()):
                return ""
            member = archive.testzip()
    except Exception as error:
        # A damaged table of contents fails in many ways: by its numbers, names or flags, or in the
        # system's seek.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        return f"cut short or overwritten ({str(error) or type(error).__name__})"
    return f"the checksum of {member} differs" if member else ""


def previous(path: str | Path) -> Path:
    """Where the checkpoint lies that the one at ``path`` has replaced.

    Example:
        >>> previous("checkpoints/last.ckpt").name
        'last-previous.ckpt'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}{_PREVIOUS}{path.suffix}")


def sweep(folder: str | Path) -> list[Path]:
    """Removes what a kill left of checkpoints that were being written into a folder.

    Only files named ``*.ckpt.partial`` that no process is writing to.

    Returns:
        What was removed.

    Example:
        >>> sweep("no such folder")
        []
    """
    removed = []
    for partial in Path(folder).glob(f"*.ckpt{_PARTIAL}"):
        try:
            with open(partial, "r+b") as file:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    partial.unlink()
            if fcntl is None:
                partial.unlink()
        except OSError:
            continue  # being written to, already gone, or not ours to remove
        removed.append(partial)
    return removed


def newest_whole(folder: Path) -> tuple[Path, list[str]]:
    """The newest whole checkpoint of all runs in a folder, and what is wrong with newer ones.

    Files that a kill left half-written are removed.

    Args:
        folder: of runs, each with a folder ``checkpoints``.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if all are damaged.
    """
    for checkpoints in folder.glob("*/checkpoints"):
        sweep(checkpoints)
    found = list(folder.glob("*/checkpoints/*.ckpt"))
    if not found:
        raise FileNotFoundError(
            f"--ckpt_path last: there is no */checkpoints/*.ckpt in {folder}; start without it, "
            "or give the file itself"
        )
    found.sort(key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"), reverse=True)
    damaged: list[str] = []
    for path in found:
        try:
            check_whole(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        return path, damaged
    raise ValueError(f"--ckpt_path last: no checkpoint in {folder} is whole: {'; '.join(damaged)}")


def _write(content: memoryview, path: Path) -> None:
    """Writes a file beside its target, forces it to the disk and renames it."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            _lock(file)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            _keep(path)
            os.replace(partial, path)
        _force(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _in_words(error, path, content.nbytes) from error
        raise


def _keep(path: Path) -> None:
    """Gives the file that is about to be replaced a second name."""
    if not path.is_file() or path.is_symlink():
        return
    kept = previous(path)
    kept.unlink(missing_ok=True)
    try:
        os.link(path, kept)
    except OSError:  # a file system without hard links
        os.replace(path, kept)


def _lock(file: IO[bytes]) -> None:
    """Says to `sweep` that the file is being written to, for as long as this process lives."""
    if fcntl is not None:
        # On a file system without locks `sweep` cannot lock either.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _force(folder: Path) -> None:
    """Forces the names in a folder to the disk, where that can be done."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _in_words(error: OSError, path: Path, size: int) -> OSError:
    """The error with the file, what it needs and what to do."""
    try:
        free = f", {shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = ""
    kept = "; the one before it is whole" if path.is_file() or previous(path).is_file() else ""
    told = OSError(
        f"the checkpoint {path} could not be written ({error.strerror}: it needs "
        f"{size / 1e6:.1f} MB{free}){kept}: make room, or write to another folder"
    )
    told.errno = error.errno
    return told


def _is_local(path: str | Path) -> bool:
    return "://" not in os.fspath(path)
