"""Files: read from anywhere, no more than is reasonable and never for ever; small pictures."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file that is not a pipe, device or folder, which may never end.

    Args:
        path: of the file; links are followed.
        most: bytes that it may have.

    Raises:
        OSError: if it cannot be read, is not a regular file, or is longer.

    Example:
        >>> read_regular(__file__, 9)
        Traceback (most recent call last):
            ...
        OSError: it is longer than 9 bytes
        >>> read_regular(__file__, 100_000)[:3]
        b'\"\"\"'
    """
    flags = os.O_RDONLY
    if sys.platform == "win32":
        flags |= os.O_BINARY
    else:
        flags |= os.O_NONBLOCK  # opening a pipe that nobody writes to would wait
    if Path(path).is_dir():
        raise IsADirectoryError("it is a folder")
    with open(os.open(path, flags), "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is not a regular file")
        if state.st_size > most:
            raise OSError(f"it is longer than {most:,} bytes")
        return file.read(state.st_size)


def few_colours(picture: Path) -> None:
    """Writes a .png anew with a table of 256 colours, in a third to a half of the bytes.

    Lines and a few small photographs need no more. Pictures of other kinds stay as they are.

    Args:
        picture: of matplotlib, which brings what reads it.
    """
    if picture.suffix.lower() != ".png":
        return
    from PIL import Image

    with Image.open(picture) as image:
        small = image.convert("RGB").quantize(256)
    small.save(picture, optimize=True)
