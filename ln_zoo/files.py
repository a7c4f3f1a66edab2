"""Files: bounded reads, atomic writes, small pictures."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; OSError for pipes and devices, which may never end."""
    flags = os.O_RDONLY
    if sys.platform == "win32":
        flags |= os.O_BINARY
    else:
        flags |= os.O_NONBLOCK  # opening a pipe without a writer would block
    if Path(path).is_dir():
        raise IsADirectoryError("it is a folder")
    file = open(os.open(path, flags), "rb")  # noqa: SIM115 (the caller closes it)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes; OSError if it is longer."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(f"it is longer than {most:,} bytes")
        return file.read(size)


def check_output_folder(folder: Path, remedy: str) -> None:
    """Create a folder; `unwritable` unless a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        raise unwritable(folder, error, remedy) from error


def unwritable(folder: Path, error: OSError, remedy: str) -> OSError:
    """The error for an output folder without write access; ``remedy`` says what to do."""
    return OSError(f"the output folder {folder} cannot be written to ({error.strerror}): {remedy}")


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the path to errors of the block without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Atomically replace a file: yields a temporary file that is synced and renamed at the end.

    After an error or a power failure the old file is intact. The folder must exist.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Atomically write text in UTF-8, without converting line ends."""
    with atomic_write(path) as file:
        file.write(text.encode())


def check_checkpoint(path: str) -> None:
    """Raise FileNotFoundError if a checkpoint does not exist."""
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no checkpoint {path!r}: give a file, or `last` for the newest run of the same name"
        )


def relative(path: str | Path) -> Path:
    """The path relative to the current folder if it lies below it."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def quantize_png(picture: Path) -> None:
    """Reduce a PNG to 256 colours, a third to a half of its size; no-op for other formats."""
    if picture.suffix.lower() != ".png":
        return
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(256)
    small.save(picture, optimize=True)
