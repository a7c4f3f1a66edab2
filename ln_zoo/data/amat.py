"""Text matrices of zeros and ones (``.amat``), read as bits that are mapped into memory.

A line of the text is an image: its pixels row by row, ``0`` or ``1``, with blanks between. Parsing
is done once. Every later start reads the text as it lies on the disk, and hashes it to find the
bits kept of it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import re
import time
import uuid
import zlib
from pathlib import Path

import numpy as np

from ln_zoo.data.cache import cache_folders
from ln_zoo.data.sources import GZIP

_LINES = 1000
"""Lines looked at together: as many as a processor's cache holds."""
_VERSION = 2
"""To be raised when the form of what is kept changes."""
_DAY = 24 * 60 * 60.0
"""Seconds."""


def load_bits(path: Path, columns: int) -> np.ndarray:
    """Parses a text matrix of zeros and ones once, and maps the bits kept of it from then on.

    They are kept in ``LN_ZOO_CACHE`` if that is set, else in a folder ``.cache`` beside the file,
    or in ``~/.cache/ln_zoo`` where that folder is another user's or cannot be written, under a name
    made of the digest of the file's content: one that changed is parsed anew, and takes the place
    of what was kept of it before. Where nothing can be kept, the text is parsed each time.

    What is kept appears whole or not at all, so that processes may read the same file at the same
    time, and has a digest of its own: bits damaged since are not taken, but parsed again.

    Args:
        path: the text, gzipped or not, whatever its name says.
        columns: values P of a line.

    Returns:
        uint8 (N, ceil(P / 8)), eight values to a byte, the first in the highest bit, as
        ``numpy.packbits`` packs them; read-only where it is mapped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or holds something else; with the line.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{path.name}-{columns}-v{_VERSION}-{digest}.bits"
    for folder in cache_folders(path.parent):
        kept = _map(folder / name, columns)
        if kept is not None:
            return kept
    bits = parse(content, columns, str(path))
    for folder in cache_folders(path.parent):
        # A cache that cannot be written costs time, not the run.
        with contextlib.suppress(OSError):
            _keep(folder / name, bits)
            _remove_others(folder / name, path.name)
        kept = _map(folder / name, columns)
        if kept is not None:
            return kept
    return bits


def parse(content: bytes, columns: int, where: str) -> np.ndarray:
    """Reads a text matrix of zeros and ones.

    The standard form, one blank between values and a newline after each line, is read at once. Any
    other blanks and ends of lines are read line by line; empty lines are passed over.

    Args:
        content: of the file, gzipped or not.
        columns: values P of a line.
        where: what error messages call the file.

    Returns:
        Bits, as `load_bits`.

    Raises:
        ValueError: truncated, another number of values in a line, or a value that is neither.

    Example:
        >>> bits = parse(b"0 1 1\\n1 0 0\\n", 3, "these")
        >>> np.unpackbits(bits, axis=1, count=3).tolist()
        [[0, 1, 1], [1, 0, 0]]
    """
    text = _unpack(content, where) if content.startswith(GZIP) else content
    bits = _standard_form(text, columns)
    return _line_by_line(text, columns, where) if bits is None else bits


def _unpack(content: bytes, where: str) -> bytes:
    pieces = []
    try:
        with gzip.open(io.BytesIO(content)) as file:
            # In pieces, so that what comes before the damage says in which line it is.
            while piece := file.read1(1 << 20):
                pieces.append(piece)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        whole_lines = sum(piece.count(b"\n") for piece in pieces)
        raise ValueError(
            f"{where}, line {whole_lines + 1:,}: the compressed file cannot be read further "
            f"({error}): it is truncated or damaged, copy it again"
        ) from error
    return b"".join(pieces)


def _standard_form(text: bytes, columns: int) -> np.ndarray | None:
    """The bits, if each line is ``columns`` digits with one blank between and a newline."""
    width = 2 * columns
    if not text or len(text) % width:
        return None
    lines = np.frombuffer(text, np.uint8).reshape(-1, width)
    between = np.frombuffer(b" " * (columns - 1) + b"\n", np.uint8)
    bits = np.empty((len(lines), -(-columns // 8)), np.uint8)
    for start in range(0, len(lines), _LINES):
        block = lines[start : start + _LINES]
        values = block[:, ::2]
        if not ((block[:, 1::2] == between).all() and ((values | 1) == ord("1")).all()):
            return None
        bits[start : start + _LINES] = np.packbits(values & 1, axis=1)
    return bits


def _line_by_line(text: bytes, columns: int, where: str) -> np.ndarray:
    rows: list[np.ndarray] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        values = line.split()
        if not values:
            continue
        digits = b"".join(values)
        if len(values) != columns:
            ends = number == len(lines) and not text.endswith((b"\n", b"\r"))
            raise ValueError(
                f"{where}, line {number:,}: found {len(values):,} values ({_begin(line)}), "
                f"expected {columns:,} of 0 or 1: {_why(len(values) < columns and ends, rows)}"
            )
        if len(digits) != columns or digits.translate(None, b"01"):
            place, value = next((i, v) for i, v in enumerate(values, 1) if v not in (b"0", b"1"))
            raise ValueError(
                f"{where}, line {number:,}: value {place:,} is {_begin(value)}, expected 0 or 1: "
                "the file is damaged (copy it again) or not binarized"
            )
        rows.append(np.packbits(np.frombuffer(digits, np.uint8) & 1))
    if not rows:
        raise ValueError(f"{where}, line 1: found nothing, expected {columns:,} values of 0 or 1")
    return np.stack(rows)


def _why(breaks_off: bool, rows: list[np.ndarray]) -> str:
    """What a wrong number of values in a line comes of, and what to do."""
    if breaks_off:
        return "the file breaks off there, it is truncated; copy it again"
    if rows:
        return "the file is damaged there, copy it again"
    return "these are images of another size, labels are among them, or it is another file"


def _begin(found: bytes) -> str:
    """The beginning of what was found, to be shown."""
    shown = found[:20].decode("latin-1")
    return repr(f"{shown}..." if len(found) > len(shown) else shown)


def _map(path: Path, columns: int) -> np.ndarray | None:
    """The bits kept in a file; ``None`` where there is none, or not as it was written."""
    try:
        content = np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError):  # ValueError: an empty file
        return None
    size = hashlib.sha256().digest_size
    digest, bits = content[:size], content[size:]
    whole = digest.tobytes() == _digest(path, bits)
    return bits.reshape(-1, -(-columns // 8)) if whole else None


def _keep(path: Path, bits: np.ndarray) -> None:
    """Writes bits to a file, behind their digest; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_digest(path, bits))
            file.write(bits.data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _digest(path: Path, bits: np.ndarray) -> bytes:
    """SHA-256 of bits and of the name they are kept under, which says of which text they are."""
    digest = hashlib.sha256(os.fsencode(path.name))
    digest.update(bits.data)
    return digest.digest()


def _remove_others(path: Path, text: str) -> None:
    """Removes what else is kept of a text, and what killed processes left half written.

    Processes that have mapped such a file keep it. One that is about to, having read the text
    before it changed, parses that again.
    """
    kept = rf"{re.escape(text)}-\d+-v\d+-[0-9a-f]{{64}}\.bits"
    half_written = rf"\.{kept}\.[0-9a-f]{{32}}\.tmp"
    for file in path.parent.iterdir():
        if file == path or not re.fullmatch(f"{kept}|{half_written}", file.name):
            continue
        with contextlib.suppress(OSError):  # another process may have removed it
            # What is being written now is younger than a day.
            if file.suffix == ".bits" or file.stat().st_mtime < time.time() - _DAY:
                file.unlink()
