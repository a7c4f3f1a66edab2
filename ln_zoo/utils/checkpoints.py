"""Atomic checkpoint files with validation on reading."""

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
    """A checkpoint file is damaged."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write checkpoints atomically and validate them on reading.

    A checkpoint is written to ``NAME.partial``, synced and renamed; the replaced ``last.ckpt`` is
    kept as ``last-previous.ckpt``. (Lightning's writer copies from the temporary folder, so a kill
    may leave a truncated file in place of the previous checkpoint.) Reading verifies checksums,
    which torch ignores, and raises `DamagedCheckpointError`. Paths such as ``s3://...`` use
    Lightning's writer.
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
    """Replace a strategy's default checkpoint plugin by `AtomicCheckpointIO`.

    A user's plugin and a strategy with its own writer are kept; a wrapping plugin without an inner
    one wraps `AtomicCheckpointIO`.
    """
    chosen = strategy._checkpoint_io  # the public property would set the default
    if isinstance(chosen, _WrappingCheckpointIO):
        chosen.checkpoint_io = AtomicCheckpointIO()  # no-op if it wraps one already
    elif chosen is None and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = AtomicCheckpointIO()


def check_whole(path: str | Path) -> None:
    """Verify the checksums of a checkpoint, at about 2 GB/s.

    Files without checksums (``torch.serialization.set_crc32_options(False)``, or the format before
    torch 1.6) pass. torch stores its members uncompressed, so an archive that unpacks to more than
    its size is rejected unread.

    Raises:
        DamagedCheckpointError: if the file is damaged.
        OSError: if it cannot be read.
    """
    state = os.stat(path)
    damage = _damage(os.fspath(path), state.st_ino, state.st_size, state.st_mtime_ns)
    if damage:
        raise DamagedCheckpointError(f"{path} is damaged: {damage}")


@functools.lru_cache(maxsize=64)
def _damage(path: str, *version: int) -> str:
    """Why a file is damaged, or an empty string; cached by inode, size and time."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return ""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.compress_type != zipfile.ZIP_STORED for m in members):
                return "its members are compressed, which torch does not do"
            if sum(m.file_size for m in members) > os.path.getsize(path):
                return "its members are larger than the file"
            if not any(m.CRC for m in members):
                return ""
            member = archive.testzip()
    except Exception as error:
        # A damaged directory can raise nearly anything, including EINVAL from seek.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        return f"cut short or overwritten ({str(error) or type(error).__name__})"
    return f"the checksum of {member} differs" if member else ""


def previous(path: str | Path) -> Path:
    """Path of the previous checkpoint of a path, such as ``last-previous.ckpt``."""
    path = Path(path)
    return path.with_name(f"{path.stem}{_PREVIOUS}{path.suffix}")


def sweep(folder: str | Path) -> list[Path]:
    """Remove partial checkpoints of killed processes from a folder, and return their paths.

    Files ``*.ckpt.partial`` that are being written are kept.
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
            continue  # being written, already removed, or not permitted
        removed.append(partial)
    return removed


def newest_whole(folder: Path) -> tuple[Path, list[str]]:
    """The newest intact checkpoint of the runs in a folder, and the damage of newer ones.

    Partial files are removed. FileNotFoundError if there is no checkpoint; ValueError if all are
    damaged.
    """
    for checkpoints in folder.glob("*/checkpoints"):
        sweep(checkpoints)
    found = list(folder.glob("*/checkpoints/*.ckpt"))
    if not found:
        raise FileNotFoundError(
            f"--ckpt_path last: no */checkpoints/*.ckpt in {folder}: omit it or give a file"
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
    raise ValueError(
        f"--ckpt_path last: all checkpoints in {folder} are damaged: {'; '.join(damaged)}"
    )


def _write(content: memoryview, path: Path) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            _lock(file)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            _keep_previous(path)
            os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _write_error(error, path, content.nbytes) from error
        raise


def _keep_previous(path: Path) -> None:
    if not path.is_file() or path.is_symlink():
        return
    kept = previous(path)
    kept.unlink(missing_ok=True)
    try:
        os.link(path, kept)
    except OSError:  # a file system without hard links
        os.replace(path, kept)


def _lock(file: IO[bytes]) -> None:
    """Lock a file against `sweep` while this process lives."""
    if fcntl is not None:
        # On a file system without locks `sweep` cannot lock either.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _write_error(error: OSError, path: Path, size: int) -> OSError:
    try:
        free = f", {shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = ""
    kept = "; the previous one is intact" if path.is_file() or previous(path).is_file() else ""
    readable = OSError(
        f"the checkpoint {path} could not be written ({error.strerror}: it needs "
        f"{size / 1e6:.1f} MB{free}){kept}: make room, or write to another folder"
    )
    readable.errno = error.errno
    return readable


def _is_local(path: str | Path) -> bool:
    return "://" not in os.fspath(path)
