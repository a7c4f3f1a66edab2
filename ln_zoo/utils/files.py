"""Files: bounded reads, atomic writes, pictures."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    import numpy as np

#: Marks annotations of values that only the user gives, never a file; see `ln_zoo.utils.trust`.
FROM_USER = "from the user"
#: Name of a file as an argument.
UserFile = Annotated[str, FROM_USER]
#: Pixels of the largest picture that is decoded.
MAX_PIXELS = 25_000_000


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


def decode_picture(
    content: bytes,
    where: str | Path,
    mode: Literal["L", "RGB"],
    formats: tuple[str, ...] = ("PNG", "JPEG"),
) -> np.ndarray:
    """Decode a picture file in memory to uint8: grey levels (H, W) or RGB (H, W, 3).

    Mode ``"L"`` requires a grey picture, ``"RGB"`` converts. Only ``formats`` are tried: other
    formats of PIL can run programs (EPS starts Ghostscript). ValueError, with ``where``, if the
    picture has another format, is damaged, or has more than `MAX_PIXELS` pixels.
    """
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    def opened() -> Image.Image:
        return Image.open(BytesIO(content), formats=formats)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = opened()
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.size} pixels, more than {MAX_PIXELS:,} in all")
            if mode == "L" and image.mode != mode:
                raise ValueError(f"it has mode {image.mode}, expected grey, mode {mode}")
            image.verify()  # checksums of PNG, which decoding skips
            return np.asarray(opened().convert(mode))
    except Exception as error:  # a damaged picture can raise anything
        unknown = isinstance(error, UnidentifiedImageError)
        why = "it has another format or a damaged header" if unknown else error
        raise ValueError(f"{where} must be a {' or '.join(formats)} picture: {why}") from error


def quantize_png(picture: Path) -> None:
    """Reduce a PNG to 256 colours, a third to a half of its size; no-op for other formats."""
    if picture.suffix.lower() != ".png":
        return
    from PIL import Image

    pixels = decode_picture(picture.read_bytes(), picture, "RGB", ("PNG",))
    Image.fromarray(pixels).quantize(256).save(picture, optimize=True)
