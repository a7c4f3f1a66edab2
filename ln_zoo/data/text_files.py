"""Text files line by line: in a folder, compressed or in archives, checked while they are read."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

_LONGEST = 10_000_000
"""Bytes of the longest line that may be text."""
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError)


class TextFile(NamedTuple):
    """A text: a file, or a member of an archive.

    Args:
        path: the file, or the archive.
        member: its name in the archive; empty for a file.
    """

    path: str
    member: str = ""

    @property
    def name(self) -> str:
        """The file's own name, without folders and endings."""
        last = Path(self.member or self.path).name
        return last.removesuffix(".gz").removesuffix(".txt")

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else self.path


def find_texts(root: Path) -> list[TextFile]:
    """The texts of a folder and its subfolders, or of a file.

    They are in the order of their names, those of an archive in its own.

    Texts are files, and members of archives (``.tar``, ``.tar.gz``, ``.tgz``), that end in ``.txt``
    or ``.txt.gz``. Hidden ones are passed over.

    Args:
        root: the folder, or one text or archive.

    Raises:
        FileNotFoundError: there is no such folder or file, or no text in it.
        ValueError: an archive that cannot be read.
    """
    if not root.exists():
        raise FileNotFoundError(f"no folder or file {root}: give the one with the texts")
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    found: list[TextFile] = []
    for path in paths:
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if hidden or not path.is_file():
            continue
        if path.name.endswith(_ARCHIVES):
            found += [TextFile(str(path), member) for member in dict.fromkeys(_members(path))]
        elif path == root or path.name.endswith((".txt", ".txt.gz")):
            found.append(TextFile(str(path)))
    if not found:
        raise FileNotFoundError(
            f"{root} has no text: expected files that end in .txt, .txt.gz, "
            f"{' or '.join(_ARCHIVES)}"
        )
    return found


def read_texts(texts: Sequence[TextFile]) -> Iterator[tuple[int, str]]:
    """The lines of texts, one after the other: the number of the text and the line.

    Lines are without white space at their ends, which leaves some empty. An archive is passed
    through once, so its members must follow one another as `find_texts` has them.

    Raises:
        OSError: a file cannot be read.
        ValueError: a text is not UTF-8 (with the byte), has a line of 10 MB, or is damaged.
    """
    numbers = {text: number for number, text in enumerate(texts)}
    for path in dict.fromkeys(text.path for text in texts):
        if TextFile(path) in numbers:
            with _damage_named(path), open(path, "rb") as file, _unpacked(file, path) as stream:
                number = numbers[TextFile(path)]
                yield from ((number, line) for line in _lines(stream, path))
            continue
        with _damage_named(path), tarfile.open(path) as archive:
            for member in archive:
                number = numbers.pop(TextFile(path, member.name), -1)  # once, if it appears twice
                packed = archive.extractfile(member) if number >= 0 else None
                if packed is not None:
                    with _unpacked(packed, member.name) as stream:
                        yield from ((number, line) for line in _lines(stream, str(texts[number])))


def _members(path: Path) -> list[str]:
    with _damage_named(str(path)), tarfile.open(path) as archive:
        return [
            member.name
            for member in archive
            if member.isfile()
            and member.name.endswith((".txt", ".txt.gz"))
            and not Path(member.name).name.startswith(".")
        ]


def _unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    return gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file  # type: ignore[return-value]


def _lines(stream: IO[bytes], name: str) -> Iterator[str]:
    start = 0
    while raw := stream.readline(_LONGEST):
        if len(raw) == _LONGEST:
            raise ValueError(
                f"{name} has a line of {_LONGEST:,} bytes or more, from byte {start:,} on: "
                "expected text, one sentence or paragraph per line"
            )
        try:
            # Some editors mark UTF-8 at the beginning of a file.
            line = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name} must be text in UTF-8, but byte {start + error.start:,} is not: convert "
                "the file, or leave it out"
            ) from None
        start += len(raw)
        yield line.strip()


@contextmanager
def _damage_named(path: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(
            f"{path} cannot be read further ({error}): it is truncated or damaged, copy it again"
        ) from error
