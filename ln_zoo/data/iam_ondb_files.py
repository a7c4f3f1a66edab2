"""The official distribution of IAM-OnDB, and its conversion to the compact form.

The owners give archives of two trees, ``lineStrokes`` (an XML file for each line of a form) and
``ascii`` (the transcription of a form), and the four lists of forms of their benchmark. Files go by
their names: ``a01-000u-03.xml`` is line 3 of the form ``a01-000u``, ``a01-000u.txt`` its text.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import shutil
import tarfile
import xml.etree.ElementTree as ET
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from gzip import BadGzipFile
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from ln_zoo.data.pen_lines import PenLines, pack
from ln_zoo.files import read_regular

LISTS = {
    "trainset.txt": "train",
    "testset_v.txt": "valid1",
    "testset_t.txt": "valid2",
    "testset_f.txt": "test",
}
"""The official lists of forms, and what the compact form calls their lines."""

MOST_DAMAGED = 0.01
"""Share of stroke files that may be damaged; beyond it the copy is not to be trusted."""

MOST_BYTES = 10_000_000
"""The most that a file of the distribution may have, in an archive or not: 150,000 pen points."""

_STROKES = re.compile(r"([a-z]\d\d-\d{3}[a-z]?)-(\d{2,})\.xml")
_TEXT = re.compile(r"([a-z]\d\d-\d{3}[a-z]?)\.txt")
_ARCHIVE = re.compile(r".*\.(tar|tar\.gz|tgz|tar\.bz2|tar\.xz|zip)", re.IGNORECASE)
_CSR = re.compile(r"^[ \t]*CSR:", re.MULTILINE)
_BREAK = re.compile(r"[\r\n]|%{2,}")
_WORK, _DONE = ".conversion", "conversion.json"
_FILES_OF_A_PART = 400
_NAMED = 20


@dataclass
class Conversion:
    """What a conversion found.

    Args:
        lines: number of lines of each set.
        points: number of pen points of each set.
        left_out: stroke files that give no line, and why.
        without_text: lines whose transcription is missing or does not fit the form's lines.
        unlisted: number of stroke files of forms that are in no list.
        missing_forms: listed forms without a stroke file.
    """

    lines: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    without_text: list[str] = field(default_factory=list)
    unlisted: int = 0
    missing_forms: list[str] = field(default_factory=list)


def convert(
    source: Path, target: Path, progress: Callable[[int, int], None] | None = None
) -> Conversion:
    """Converts the official distribution to the compact form, once.

    What is done so far lies in ``.conversion`` of the target folder until all is: an interrupted
    conversion goes on where it was when it is run again. Stroke files that changed since are read
    again. The sets appear whole or not at all, and ``conversion.json``, which holds what is
    returned, last of all; where it exists, nothing is done.

    Args:
        source: a folder with ``lineStrokes``, ``ascii`` and the four lists, at any depth, as files
            or in archives (tar, compressed or not, and zip); or such an archive. No file of more
            than 10 MB is read, and no pipe or device: they count as damaged.
        target: folder to write, made if need be. For each list a folder of mapped arrays, and
            ``lines.tsv``.
        progress: called with the number of stroke files read and of all, now and then.

    Returns:
        What was found.

    Raises:
        OSError: files cannot be read or written, or none of a kind are there.
        ValueError: an archive is damaged, files contradict each other, a set has no line, or more
            than 1 % of the stroke files are damaged.
    """
    done = target / _DONE
    if done.exists():
        found = _read_conversion(done)
        shutil.rmtree(target / _WORK, ignore_errors=True)
        return found
    _check_target(target)
    with ExitStack() as stack:
        files = _find(source, stack)
        sets = _read_lists(files)
        texts = {_form(file.name): transcription(file.read()) for file in files["ascii"]}
        listed = [file for file in files["lineStrokes"] if _form(file.name) in sets]
        lines, damaged = _read_parts(listed, target / _WORK, progress)
    if len(damaged) > MOST_DAMAGED * len(listed):
        raise ValueError(
            f"{len(damaged):,} of {len(listed):,} stroke files are damaged, more than "
            f"{MOST_DAMAGED:.0%}: {_some([f'{name} ({why})' for name, why in damaged.items()])}. "
            "The copy is incomplete: get it again, then run this once more"
        )
    found = Conversion(
        left_out=damaged,
        unlisted=len(files["lineStrokes"]) - len(listed),
        missing_forms=sorted(set(sets) - {_form(file.name) for file in listed}),
    )
    text = _match([file.name for file in listed], texts)
    lines.text = tuple(text[name] for name in lines.line_id)
    found.without_text = sorted(name for name in lines.line_id if not text[name])
    chosen = {split: _lines_of(split, lines, sets) for split in LISTS.values()}
    empty = [file for file, split in LISTS.items() if not len(chosen[split])]
    if empty:
        raise ValueError(f"{source}: no stroke file is of a form in {', '.join(empty)}")
    table = ["line_id\tsplit\tn_points\tn_strokes\ttext"]
    for split, part in chosen.items():
        _save(part, target, split)
        found.lines[split], found.points[split] = len(part), int(part.points.sum())
        for i, (name, words) in enumerate(zip(part.line_id, part.text, strict=True)):
            strokes = int(part.steps(i)[:, 2].sum())
            table.append(f"{name}\t{split}\t{part.points[i]}\t{strokes}\t{words}")
    _replace(target / "lines.tsv", "\n".join([*table, ""]).encode())
    _replace(done, json.dumps(asdict(found), indent=1).encode())
    shutil.rmtree(target / _WORK)
    return found


def holds_official_files(folder: Path) -> bool:
    """Whether a folder looks like the official distribution, by its names."""
    names = {path.name for path in folder.iterdir()}
    return bool(names & {"lineStrokes", "ascii", *LISTS}) or any(
        name.startswith(("lineStrokes", "ascii")) for name in names
    )


def read_strokes(content: bytes) -> np.ndarray:
    """Reads the pen points of one ``lineStrokes`` file.

    Args:
        content: of the file: one ``StrokeSet`` of ``Stroke`` elements with ``Point x= y=``, in the
            encoding that it states. Strokes without points are passed over.

    Returns:
        Steps (P, 3), float64: dx, dy (downwards), 1 on the last point of a stroke; the first step
        is the position.

    Raises:
        ValueError: malformed, without strokes, or with coordinates that are not finite numbers.

    Example:
        >>> points = b'<Point x="5" y="9"/><Point x="7" y="8"/>'
        >>> read_strokes(b"<W><StrokeSet><Stroke>" + points + b"</Stroke></StrokeSet></W>").tolist()
        [[5.0, 9.0, 0.0], [2.0, -1.0, 1.0]]
    """
    try:
        strokes = ET.fromstring(content).find("StrokeSet")
        if strokes is None:
            raise ValueError("no StrokeSet")
        rows = []
        for stroke in strokes.iter("Stroke"):
            points = [
                (float(p.attrib["x"]), float(p.attrib["y"]), 0.0) for p in stroke.iter("Point")
            ]
            if points:
                points[-1] = (*points[-1][:2], 1.0)
                rows += points
    except (ET.ParseError, LookupError, ValueError) as error:
        told = f"a Point without {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"malformed XML: {told}") from error
    if not rows:
        raise ValueError("no strokes")
    table = np.array(rows)
    if not np.isfinite(table).all():
        raise ValueError("coordinates that are not finite")
    table[1:, :2] = np.diff(table[:, :2], axis=0)
    return table


def transcription(content: bytes) -> list[str]:
    """Reads the lines of a form out of its ``ascii`` file.

    Args:
        content: of the file, in ISO-8859-1: the block ``OCR:`` and the block ``CSR:``, of which the
            latter is meant, with a line of text for each line of the form. Two or more ``%`` break
            a line too.

    Returns:
        The lines that are not blank; none if there is no ``CSR:``.

    Example:
        >>> transcription(b"OCR:\\n\\nA MOVE\\n\\nCSR:\\n\\nA MOVE to \\r\\nstop%%%%%Mr.\\n")
        ['A MOVE to', 'stop', 'Mr.']
    """
    text = content.decode("latin-1").replace("\t", " ")
    _, *block = _CSR.split(text, maxsplit=1)
    return [line.strip() for part in block for line in _BREAK.split(part) if line.strip()]


class _File(NamedTuple):
    """A file of the distribution, in a folder or an archive."""

    name: str
    place: str
    stamp: str
    """Changes when the file does."""
    read: Callable[[], bytes]


def _find(source: Path, stack: ExitStack) -> dict[str, list[_File]]:
    """The files by kind: ``lineStrokes``, ``ascii`` and the names of the lists.

    Kinds that lie in folders are not looked for in archives, of which a folder may have both.
    """
    if not source.exists():
        raise FileNotFoundError(f"no {source}: give the folder with the official distribution")
    kinds = ("lineStrokes", "ascii", *LISTS)
    found: dict[str, list[_File]] = {kind: [] for kind in kinds}
    archives = [] if source.is_dir() else [source]
    for folder, _, names in os.walk(source, followlinks=True):
        for name in sorted(names):
            path = Path(folder, name)
            if kind := _kind(name):
                status = path.stat()
                stamp = f"{status.st_size} {status.st_mtime_ns}"
                found[kind].append(_File(name, str(path), stamp, partial(_read_file, path)))
            elif _ARCHIVE.fullmatch(name):
                archives.append(path)
    packed = [kind for kind in kinds if not found[kind]]
    for archive in sorted(archives) if packed else []:
        for file in _members(archive, stack):
            kind = _kind(file.name)
            if kind in packed:
                found[kind].append(file)
    missing = [kind for kind in kinds if not found[kind]]
    if missing:
        raise FileNotFoundError(
            f"{source} lacks {', '.join(missing)}: expected the trees or archives lineStrokes "
            f"(a01-000u-01.xml, ...) and ascii (a01-000u.txt, ...) and the lists {', '.join(LISTS)}"
        )
    for files in found.values():
        places: dict[str, str] = {}
        for file in files:
            if file.name in places:
                raise ValueError(
                    f"{file.name} appears twice, {places[file.name]} and {file.place}: leave one "
                    "of them"
                )
            places[file.name] = file.place
    return found


def _kind(name: str) -> str | None:
    if _STROKES.fullmatch(name):
        return "lineStrokes"
    if _TEXT.fullmatch(name):
        return "ascii"
    return name if name in LISTS else None


def _members(archive: Path, stack: ExitStack) -> Iterator[_File]:
    """The files of an archive in its order, in which reading is quick; none is unpacked."""
    with _readable(archive):
        if archive.suffix.lower() == ".zip":
            opened = stack.enter_context(zipfile.ZipFile(archive))
            members = {
                entry.filename: (
                    f"{entry.file_size} {entry.CRC}",
                    partial(_read_zip_member, opened, entry),
                )
                for entry in opened.infolist()
            }
        else:
            tar = stack.enter_context(tarfile.open(archive))  # noqa: SIM115 (the stack closes it)
            members = {
                entry.name: (f"{entry.size} {entry.mtime}", partial(_read_member, tar, entry))
                for entry in tar
                if entry.isfile()
            }

    def guarded(read: Callable[[], bytes]) -> bytes:
        with _readable(archive):
            return read()

    for path, (stamp, read) in members.items():
        name = path.rpartition("/")[2]
        yield _File(name, f"{archive}/{path}", stamp, partial(guarded, read))


def _read_file(path: Path) -> bytes:
    try:
        return read_regular(path, MOST_BYTES)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_zip_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    with archive.open(entry) as file:
        return _bounded(file, entry.filename)


def _read_member(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(entry)
    assert file is not None
    return _bounded(file, entry.name)


def _bounded(file: IO[bytes], name: str) -> bytes:
    """The content of a member: what an archive says of its size need not be true."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is longer than {MOST_BYTES:,} bytes")
    return content


def _read_conversion(path: Path) -> Conversion:
    """What a conversion that was done before found.

    Raises:
        ValueError: if the file is not what `convert` writes.
    """
    try:
        found = Conversion(**json.loads(_read_file(path)))
        for name, default in vars(Conversion()).items():
            if not isinstance(getattr(found, name), type(default)):
                raise ValueError(f"{name} is of another type")
        if found.lines.keys() != found.points.keys():
            raise ValueError("lines and points are of different sets")
        if not all(isinstance(n, int) for n in (*found.lines.values(), *found.points.values())):
            raise ValueError("lines or points are not whole numbers")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not what a conversion writes ({error}): remove it to convert into this "
            "folder anew, or give an empty folder"
        ) from error
    return found


@contextmanager
def _readable(archive: Path) -> Iterator[None]:
    """Says which archive is damaged if one is."""
    try:
        yield
    except (
        *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, BadGzipFile),
        *(RuntimeError, NotImplementedError),  # encrypted, or compressed in a way of its own
    ) as error:
        raise ValueError(
            f"{archive} is truncated, damaged or not an archive ({error}): get it again"
        ) from error


def _form(name: str) -> str:
    """The form that a stroke file, a transcription or a line belongs to."""
    return name.partition(".")[0][: 8 if name[7:8].isalpha() else 7]


def _read_lists(files: Mapping[str, list[_File]]) -> dict[str, str]:
    """The set of each listed form."""
    sets: dict[str, str] = {}
    for list_name, split in LISTS.items():
        (file,) = files[list_name]
        for form in file.read().decode("latin-1").split():
            if not _TEXT.fullmatch(f"{form}.txt"):
                raise ValueError(f"{file.place} is not a list of forms: it has {form!r}")
            if sets.setdefault(form, split) != split:
                raise ValueError(f"form {form} is in two of the lists {', '.join(LISTS)}")
    return sets


def _read_parts(
    files: Sequence[_File], work: Path, progress: Callable[[int, int], None] | None
) -> tuple[PenLines, dict[str, str]]:
    """All lines, without texts, and the damaged files with what is wrong with them.

    Some hundred files at a time are read and kept in the work folder.
    """
    work.mkdir(parents=True, exist_ok=True)
    lines = PenLines.from_steps([], [], [])
    damaged: dict[str, str] = {}
    for start in range(0, len(files), _FILES_OF_A_PART):
        part = files[start : start + _FILES_OF_A_PART]
        path = work / f"{start:06}.npz"
        key = [f"{file.name} {file.stamp}" for file in part]
        stored = _stored(path, key)
        if stored is None:
            steps: dict[str, np.ndarray] = {}
            why: dict[str, str] = {}
            for number, file in enumerate(part):
                try:
                    steps[file.name.removesuffix(".xml")] = read_strokes(file.read())
                except ValueError as error:
                    why[file.name] = str(error)
                if progress is not None:
                    progress(start + number, len(files))
            stored = pack(list(steps.values()), list(steps), [""] * len(steps)) | {
                "key": np.array(key),
                "damaged": np.array(list(why), np.str_),
                "why": np.array(list(why.values()), np.str_),
            }
            content = io.BytesIO()
            np.savez(content, allow_pickle=False, **stored)
            _replace(path, content.getvalue())
        lines += PenLines.of(stored, str(path))
        damaged |= dict(zip(stored["damaged"].tolist(), stored["why"].tolist(), strict=True))
        if progress is not None:
            progress(start + len(part), len(files))
    return lines, damaged


def _stored(path: Path, key: list[str]) -> dict[str, np.ndarray] | None:
    """What was read before of the same files."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            return dict(archive) if archive["key"].tolist() == key else None
    except (ValueError, LookupError, EOFError, zipfile.BadZipFile, zlib.error):
        return None  # damaged: read again


def _match(names: Sequence[str], texts: Mapping[str, list[str]]) -> dict[str, str]:
    """The text of each line, by number; none for the lines of a form that has more than its text.

    Where a text line is missing, it is not known which.
    """
    lines = [name.removesuffix(".xml") for name in names]
    numbers = {line: int(line.rpartition("-")[2]) for line in lines}
    last: dict[str, int] = {}
    for line, number in numbers.items():
        last[_form(line)] = max(last.get(_form(line), 0), number)
    text = {}
    for line, number in numbers.items():
        known = texts.get(_form(line), [])
        text[line] = known[number - 1] if 1 <= number <= last[_form(line)] <= len(known) else ""
    return text


def _lines_of(split: str, lines: PenLines, sets: Mapping[str, str]) -> PenLines:
    """The lines of a set, by name."""
    mine = [i for i, name in enumerate(lines.line_id) if sets[_form(name)] == split]
    return lines.pick(sorted(mine, key=lines.line_id.__getitem__))


def _check_target(target: Path) -> None:
    """Refuses to write over sets that no interrupted conversion has left."""
    there = [
        f"strokes_{split}" for split in LISTS.values() if (target / f"strokes_{split}").exists()
    ]
    if there and not (target / _WORK).is_dir():
        raise FileExistsError(f"{target} has {', '.join(there)} already: give an empty folder")


def _save(lines: PenLines, target: Path, split: str) -> None:
    """Writes a set, which appears whole or not at all."""
    written, final = target / _WORK / split, target / f"strokes_{split}"
    for left in (written, final):
        if left.exists():
            shutil.rmtree(left)
    lines.save(written)
    written.replace(final)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file, which appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
