"""Text in UTF-8, line by line: from files, compressed files and members of archives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from ln_zoo.data.archives import ARCHIVES, gunzip, open_file, read_archive

MAX_LINE = 10_000_000
"""Bytes of the longest line that is read as text."""
_TEXTS = (".txt", ".txt.gz")


class TextFile(NamedTuple):
    """A text file, or a named member of an archive."""

    path: str
    member: str = ""

    @property
    def name(self) -> str:
        last = Path(self.member or self.path).name
        return last.removesuffix(".gz").removesuffix(".txt")

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else self.path


def find_texts(root: Path) -> list[TextFile]:
    """List the texts of a folder and its subfolders, or of one file.

    Texts end in ``.txt`` or ``.txt.gz`` and are files or members of archives. Files are sorted by
    name, members keep the archive's order. Hidden files are skipped.
    """
    if not root.exists():
        raise FileNotFoundError(f"no folder or file {root}: give the one with the texts")
    found: list[TextFile] = []
    for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if hidden or not path.is_file():
            continue
        if path.name.endswith(ARCHIVES):
            names = dict.fromkeys(name for name, _ in read_archive(path) if name.endswith(_TEXTS))
            found += [TextFile(str(path), n) for n in names if not Path(n).name.startswith(".")]
        elif path == root or path.name.endswith(_TEXTS):
            found.append(TextFile(str(path)))
    if not found:
        raise FileNotFoundError(
            f"{root} has no text: expected files that end in {', '.join(_TEXTS)}, or such members "
            f"of {', '.join(ARCHIVES)}"
        )
    return found


def read_texts(texts: Sequence[TextFile]) -> Iterator[tuple[int, str]]:
    """Iterate over the stripped lines of texts, with the index of the text.

    ``texts`` are in the order of `find_texts`: each archive is read once.
    """
    numbers = {text: number for number, text in enumerate(texts)}
    for path in dict.fromkeys(text.path for text in texts):
        if (number := numbers.get(TextFile(path), -1)) >= 0:
            with open_file(path) as stream:
                yield from ((number, line.strip()) for line in read_lines(stream, path))
            continue
        for name, stream in read_archive(path):
            number = numbers.pop(TextFile(path, name), -1)  # popped: a name may occur twice
            if number >= 0:
                where = str(texts[number])
                content = gunzip(stream, where) if name.endswith(".gz") else stream
                yield from ((number, line.strip()) for line in read_lines(content, where))


def read_lines(stream: IO[bytes], where: str | Path, most: int = MAX_LINE) -> Iterator[str]:
    """Iterate over lines of fewer than ``most`` bytes in UTF-8, with or without BOM."""
    start = 0
    while raw := stream.readline(most):
        if len(raw) == most:
            raise ValueError(
                f"{where} has a line of {most:,} bytes or more, from byte {start:,} on: expected "
                "text with shorter lines"
            )
        line = decode(raw, where, start, "utf-8-sig" if start == 0 else "utf-8")
        start += len(raw)
        yield line.removesuffix("\n").removesuffix("\r")


def decode(content: bytes, where: str | Path, start: int = 0, encoding: str = "utf-8") -> str:
    """Decode the content from byte ``start`` of a file; ValueError with the place if damaged."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} must be text in UTF-8, but byte {start + error.start:,} is not: convert "
            "the file, or leave it out"
        ) from None
