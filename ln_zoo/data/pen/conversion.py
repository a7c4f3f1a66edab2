"""Convert the official distribution of IAM-OnDB to the compact form.

The distribution has archives of two trees, ``lineStrokes`` (an XML file per line) and ``ascii``
(the transcription of a form), and four lists of forms. Files are identified by name:
``a01-000u-03.xml`` is line 3 of form ``a01-000u``, and ``a01-000u.txt`` its text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ln_zoo.data.archives import ARCHIVES, read_archive, read_file, read_rest
from ln_zoo.data.pen.files import PenLines, first_names
from ln_zoo.utils import schema
from ln_zoo.utils.files import atomic_write_text, check_output_folder

LISTS = {
    "trainset.txt": "train",
    "testset_v.txt": "valid1",
    "testset_t.txt": "valid2",
    "testset_f.txt": "test",
}
"""The official lists of forms and their sets, in the order of the random split."""

MOST_DAMAGED = 0.01
"""Maximum fraction of damaged stroke files."""

MAX_BYTES = 10_000_000
"""Bytes of the largest file of the distribution; enough for 150,000 pen points."""

_STROKES = re.compile(r"([a-z]\d\d-\d{3}[a-z]?)-(\d{2,})\.xml")
_TEXT = re.compile(r"([a-z]\d\d-\d{3}[a-z]?)\.txt")
_CSR = re.compile(r"^[ \t]*CSR:", re.MULTILINE)
_BREAK = re.compile(r"[\r\n]|%{2,}")
_KINDS = ("lineStrokes", "ascii", *LISTS)
_WORK, _DONE = ".conversion", "conversion.json"


@dataclass
class Conversion:
    """Result of a conversion, with lines and pen points of each set."""

    lines: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # damaged stroke files, with reasons
    without_text: list[str] = field(default_factory=list)  # transcription missing or not matching
    unlisted: int = 0  # stroke files of forms in no list
    missing_forms: list[str] = field(default_factory=list)  # listed forms without a stroke file


def convert(
    source: Path, target: Path, progress: Callable[[int, int], None] | None = None
) -> Conversion:
    """Convert the official distribution to the compact form.

    ``source`` has ``lineStrokes``, ``ascii`` and the four lists, at any depth, as files or in
    archives (tar or zip), or is such an archive. Each set becomes a folder of arrays in ``target``;
    ``lines.tsv`` lists the lines. ``progress`` gets the numbers of stroke files read and in total.

    An interrupted conversion can be restarted: sets are written to ``.conversion`` and renamed, and
    ``conversion.json`` is written last. If it exists, this is a no-op.
    """
    done = target / _DONE
    if done.exists():
        return _read_conversion(done)
    _check_target(target)
    places = _find(source)
    sets = _read_lists(places)
    check_output_folder(target, "give another folder to write")
    texts = {_form(n): transcription(read()) for n, read in _contents(places["ascii"])}
    listed = {name: p for name, p in places["lineStrokes"].items() if _form(name) in sets}
    lines, damaged = _read_lines(listed, progress)
    found = Conversion(
        left_out=damaged,
        unlisted=len(places["lineStrokes"]) - len(listed),
        missing_forms=sorted(set(sets) - {_form(name) for name in listed}),
    )
    text = _match(list(listed), texts)
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
    atomic_write_text(target / "lines.tsv", "\n".join([*table, ""]))
    atomic_write_text(done, json.dumps(asdict(found), indent=1))
    shutil.rmtree(target / _WORK)
    return found


def holds_official_files(folder: Path) -> bool:
    """Whether a folder looks like the official distribution."""
    names = {path.name for path in folder.iterdir()}
    return bool(names & {"lineStrokes", "ascii", *LISTS}) or any(
        name.startswith(("lineStrokes", "ascii")) for name in names
    )


def read_strokes(content: bytes) -> np.ndarray:
    """Parse a ``lineStrokes`` file: one ``StrokeSet`` of ``Stroke`` elements with ``Point x= y=``.

    Returns steps (P, 3), float64: dx, dy (downwards), 1 on the last point of a stroke. The first
    step is the position. Empty strokes are skipped.
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
        raise ValueError(f"malformed XML: {str(told)[:100]}") from error
    if not rows:
        raise ValueError("no strokes")
    table = np.array(rows)
    with np.errstate(over="ignore", invalid="ignore"):
        table[1:, :2] = np.diff(table[:, :2], axis=0)
        finite = np.isfinite(table.astype(np.float32)).all()
    if not finite:
        raise ValueError("coordinates or steps that are not finite in float32")
    return table


def transcription(content: bytes) -> list[str]:
    """Parse the lines of a form from its ``ascii`` file, in ISO-8859-1.

    The block after ``CSR:`` has a line per line of the form; two or more ``%`` end a line too.
    """
    text = content.decode("latin-1").replace("\t", " ")
    _, *block = _CSR.split(text, maxsplit=1)
    return [line.strip() for part in block for line in _BREAK.split(part) if line.strip()]


class _Place(NamedTuple):
    path: Path
    member: str = ""

    def __str__(self) -> str:
        return f"{self.path}/{self.member}" if self.member else str(self.path)


def _find(source: Path) -> dict[str, dict[str, _Place]]:
    if not source.exists():
        raise FileNotFoundError(f"no {source}: give the folder with the official distribution")
    found: dict[str, dict[str, _Place]] = {kind: {} for kind in _KINDS}
    archives = [] if source.is_dir() else [source]
    visited = set()
    for folder, folders, names in os.walk(source, followlinks=True):
        if (real := os.path.realpath(folder)) in visited:  # a link to a parent folder
            folders.clear()
            continue
        visited.add(real)
        for name in sorted(names):
            if _kind(name):
                _add(found, name, _Place(Path(folder, name)))
            elif name.lower().endswith(ARCHIVES):
                archives.append(Path(folder, name))
    packed = [kind for kind in _KINDS if not found[kind]]
    for archive in sorted(archives) if packed else []:
        for member, _ in read_archive(archive):
            name = member.rpartition("/")[2]
            if _kind(name) in packed:
                _add(found, name, _Place(archive, member))
    missing = [kind for kind in _KINDS if not found[kind]]
    if missing:
        raise FileNotFoundError(
            f"{source} lacks {', '.join(missing)}: expected the trees or archives lineStrokes "
            f"(a01-000u-01.xml, ...) and ascii (a01-000u.txt, ...) and the lists {', '.join(LISTS)}"
        )
    return found


def _add(found: Mapping[str, dict[str, _Place]], name: str, place: _Place) -> None:
    kind = _kind(name)
    assert kind is not None
    if name in found[kind]:
        raise ValueError(f"{name} appears twice, {found[kind][name]} and {place}: remove one")
    found[kind][name] = place


def _kind(name: str) -> str | None:
    if _STROKES.fullmatch(name):
        return "lineStrokes"
    if _TEXT.fullmatch(name):
        return "ascii"
    return name if name in LISTS else None


def _contents(places: Mapping[str, _Place]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for name, place in places.items():
        if not place.member:
            yield name, partial(read_file, place.path, MAX_BYTES)
    names = {place: name for name, place in places.items() if place.member}
    for archive in dict.fromkeys(place.path for place in names):
        for member, content in read_archive(archive):
            if (name := names.get(_Place(archive, member), "")) != "":
                yield name, partial(read_rest, content, MAX_BYTES, f"{archive}/{member}")


def _read_conversion(path: Path) -> Conversion:
    try:
        found = schema.read(Conversion, json.loads(read_file(path, MAX_BYTES)), "it")
        if found.lines.keys() != found.points.keys():
            raise ValueError("lines and points are of different sets")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the result of a conversion ({error}): remove it to convert into this "
            "folder again, or give an empty folder"
        ) from error
    return found


def _form(name: str) -> str:
    return name.partition(".")[0][: 8 if name[7:8].isalpha() else 7]


def _read_lists(places: Mapping[str, Mapping[str, _Place]]) -> dict[str, str]:
    sets: dict[str, str] = {}
    for list_name, split in LISTS.items():
        content = b"".join(read() for _, read in _contents(places[list_name]))
        for form in content.decode("latin-1").split():
            if not _TEXT.fullmatch(f"{form}.txt"):
                place = places[list_name][list_name]
                raise ValueError(f"{place} is not a list of forms: it has {form[:60]!r}")
            if sets.setdefault(form, split) != split:
                raise ValueError(f"form {form} is in two of the lists {', '.join(LISTS)}")
    return sets


def _read_lines(
    places: Mapping[str, _Place], progress: Callable[[int, int], None] | None
) -> tuple[PenLines, dict[str, str]]:
    steps: dict[str, np.ndarray] = {}
    damaged: dict[str, str] = {}
    for number, (name, read) in enumerate(_contents(places), 1):
        try:
            steps[name.removesuffix(".xml")] = read_strokes(read())
        except ValueError as error:
            damaged[name] = str(error)
        if progress is not None:
            progress(number, len(places))
    if len(damaged) > MOST_DAMAGED * len(places):
        named = first_names([f"{name} ({why})" for name, why in damaged.items()])
        raise ValueError(
            f"{len(damaged):,} of {len(places):,} stroke files are damaged, more than "
            f"{MOST_DAMAGED:.0%}: {named}. "
            "The copy is incomplete: get it again, then run this once more"
        )
    names = sorted(steps)
    return PenLines.from_steps([steps[n] for n in names], names, [""] * len(names)), damaged


def _match(names: Sequence[str], texts: Mapping[str, list[str]]) -> dict[str, str]:
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
    mine = [i for i, name in enumerate(lines.line_id) if sets[_form(name)] == split]
    return lines.pick(sorted(mine, key=lines.line_id.__getitem__))


def _check_target(target: Path) -> None:
    """Raise if the target has other sets than an interrupted conversion left."""
    there = [
        f"strokes_{split}" for split in LISTS.values() if (target / f"strokes_{split}").exists()
    ]
    if there and not (target / _WORK).is_dir():
        raise FileExistsError(f"{target} has {', '.join(there)} already: give an empty folder")


def _save(lines: PenLines, target: Path, split: str) -> None:
    written, final = target / _WORK / split, target / f"strokes_{split}"
    for left in (written, final):
        if left.exists():
            shutil.rmtree(left)
    lines.save(written)
    written.replace(final)
