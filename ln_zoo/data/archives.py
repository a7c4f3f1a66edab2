"""Read compressed files and archives completely, with bounds and checksums, without unpacking.

OSError: a file cannot be opened. ValueError with its name: it is damaged or not regular.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from ln_zoo.utils.files import open_regular

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
"""Suffixes of the archives that `read_archive` reads."""

_COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
_SUFFIXES = (".gz", ".bz2", ".xz")
#: Exceptions of libraries for damaged files. Encrypted zip members raise RuntimeError.
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError),
    *(RuntimeError, NotImplementedError, UnicodeDecodeError, struct.error),
)
#: Bytes of the longest extended tar header (a path); tarfile itself reads any length.
_MAX_HEADER = 1_000_000
#: Bytes that are read at a time.
_PIECE = 1 << 20
#: Maximum characters of a library's message, which may quote damaged content.
_MAX_CAUSE = 200
_EXTENDED_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


@contextmanager
def damage_named(path: str | Path) -> Iterator[None]:
    """Convert a library's errors about a damaged file to ValueError with the path."""
    try:
        yield
    except _DAMAGE as error:
        damage: BaseException = error
    except OSError as error:
        if error.filename is not None:
            raise  # the system's own error names the file
        damage = error
    else:
        return
    raise damaged(path, damage) from damage


def damaged(path: str | Path, cause: BaseException) -> ValueError:
    """The error for a damaged file, in one line."""
    why = " ".join(str(cause).split())[:_MAX_CAUSE]
    return ValueError(
        f"{path} cannot be read: {why}. It is truncated, damaged or of another format; get it again"
    )


@contextmanager
def open_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a regular file, decompressed if it begins as gzip, bzip2 or xz files do.

    ValueError if it is damaged, or empty with the suffix of a compressed file.
    """
    with damage_named(path), ExitStack() as stack:
        file = stack.enter_context(open_regular(path))
        if Path(path).suffix in _SUFFIXES and not file.peek(1):
            raise ValueError(f"{path} is empty: get it again")
        yield _decompressed(file, stack)


def gunzip(stream: IO[bytes], where: str) -> IO[bytes]:
    """Decompress a gzipped member of an archive as a stream."""
    return _named(gzip.open(stream, "rb"), where)


def read_file(path: str | Path, most: int) -> bytes:
    """Content of a file of at most ``most`` bytes, decompressed as by `open_file`."""
    with open_file(path) as file:
        return read_rest(file, most, path)


def read_rest(stream: IO[bytes], most: int, where: str | Path) -> bytes:
    """Rest of a stream of at most ``most`` bytes; stated sizes are not trusted."""
    content = io.BytesIO()
    # In pieces: a read of ``most`` bytes would reserve them first.
    while content.tell() <= most and (piece := stream.read(_PIECE)):
        content.write(piece)
    if content.tell() > most:
        raise ValueError(f"{where} is longer than {most:,} bytes, the most that such a file has")
    return content.getvalue()


def read_archive(path: str | Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Iterate over names and contents of the files of a tar or zip archive.

    A content is valid until the next one. A tar, also compressed, must end with two zero blocks,
    and checksums must match. Damaged headers raise; ``tarfile`` would end silently. Links and
    devices in a tar raise when they are read.
    """
    members: Iterator[tuple[str, IO[bytes] | None]]
    with damage_named(path), ExitStack() as stack:
        file = stack.enter_context(open_regular(path))
        if file.peek(4).startswith(b"PK"):
            members = _zip_members(stack.enter_context(zipfile.ZipFile(file)), file)
        else:
            members = _tar_members(_decompressed(file, stack))
        for name, content in members:
            yield name, _named(content, f"{path}, {name}")


def _decompressed(file: Any, stack: ExitStack) -> IO[bytes]:
    start = file.peek(6)
    for magic, decompress in _COMPRESSED.items():
        if start.startswith(magic):
            return stack.enter_context(decompress(file, "rb"))
    return file


def _zip_members(archive: zipfile.ZipFile, file: Any) -> Iterator[tuple[str, IO[bytes] | None]]:
    entries = archive.infolist()
    # zipfile does not compare its entries with their number in the end record.
    file.seek(-12 - len(archive.comment), os.SEEK_END)
    if int.from_bytes(file.read(2), "little") != min(len(entries), 0xFFFF):
        raise zipfile.BadZipFile("members are missing in the directory")
    for entry in sorted(entries, key=lambda entry: entry.header_offset):
        if not entry.is_dir():
            with archive.open(entry) as content:
                yield entry.filename, content


def _tar_members(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    with tarfile.open(fileobj=stream, mode="r:", tarinfo=_CheckedHeader) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # a corpus has 400,000
            if not member.isdir():
                yield member.name, archive.extractfile(member) if member.isfile() else None
    # tarfile has read one zero block, at which it ends.
    zeros = 0
    while block := stream.read(_PIECE):
        if block.count(0) < len(block):
            raise tarfile.ReadError("data after the end of the archive")
        zeros += len(block)
    if zeros < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the end of the archive is missing")


class _Named(io.RawIOBase):
    """A stream whose errors name it."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream = stream
        self._where = where

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with damage_named(self._where):
            if self._stream is None:
                raise tarfile.ReadError("a link or a device (tar --dereference packs files)")
            data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _named(stream: Any, where: str) -> IO[bytes]:
    return io.BufferedReader(_Named(stream, where), 1 << 16)


class _CheckedHeader(tarfile.TarInfo):
    """A header; `tarfile` would take an invalid one for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _CheckedHeader:
        if len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("the end of the archive is missing")
        if not any(buf):
            return super().frombuf(buf, encoding, errors)  # raises
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"invalid header ({error})") from error
        if header.type in _EXTENDED_HEADERS and not 0 <= header.size <= _MAX_HEADER:
            raise tarfile.ReadError(f"header of {header.size:,} bytes")
        return header
