"""Handwritten lines, in the compact form and as ``strokes.npy`` with ``sentences.txt``."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy

from ln_zoo.data.archives import damage_named, damaged, open_file
from ln_zoo.data.array_files import map_array, read_npz
from ln_zoo.data.ragged import check_offsets
from ln_zoo.data.text_files import read_lines
from ln_zoo.utils.files import open_regular

LongSteps = Literal["drop", "clip"]

ARRAYS = ("dx", "dy", "pen_up", "offsets", "line_id", "text")
"""The arrays of a set of lines in the compact form."""
STROKES, SENTENCES = "strokes.npy", "sentences.txt"
"""The files of a common pair of arrays and texts."""

#: The globals of a pickled array of arrays, under NumPy 1 and NumPy 2.
_ADMITTED = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


class Points(NamedTuple):
    """The points of many lines, concatenated: three arrays (N,)."""

    dx: np.ndarray
    dy: np.ndarray
    pen_up: np.ndarray


@dataclass(eq=False)
class PenLines:
    """L lines: pen points as steps from the previous point, names and texts.

    As on a whiteboard, y grows **downwards**. The first step of a line is its absolute position.
    Line i is ``start[i]`` to ``stop[i]`` of ``sources[source[i]]``, so subsets and unions share
    points. A text may be empty.
    """

    sources: list[Points]
    source: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    line_id: tuple[str, ...]
    text: tuple[str, ...]

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], where: str = "these lines") -> PenLines:
        """Create lines from the six arrays of the compact form; errors name them ``where``.

        ``dx``, ``dy``: (N,) steps, whiteboard units; ``pen_up``: (N,) 1 on the last point of a
        stroke, else 0; ``offsets``: (L + 1,) line i is ``[offsets[i]:offsets[i + 1]]``;
        ``line_id``, ``text``: (L,) strings.
        """
        missing = [name for name in ARRAYS if name not in arrays]
        if missing:
            raise ValueError(
                f"{where} lacks {', '.join(missing)}: the compact form has {', '.join(ARRAYS)}"
            )
        dx, dy, pen_up, offsets, line_id, text = (arrays[name] for name in ARRAYS)
        lengths = {name: arrays[name].shape for name in ("dx", "dy", "pen_up")}
        if len(set(lengths.values())) > 1 or dx.ndim != 1:
            raise ValueError(
                f"{where}: dx, dy and pen_up must be of one length, got "
                f"{', '.join(f'{name} {shape}' for name, shape in lengths.items())}"
            )
        if not all(np.issubdtype(a.dtype, np.number) and a.dtype.kind in "iuf" for a in (dx, dy)):
            raise ValueError(f"{where}: dx and dy must be real, got {dx.dtype} and {dy.dtype}")
        ends = np.asarray(offsets)
        check_offsets(ends, len(dx), where)
        count = len(ends) - 1
        if not line_id.shape == text.shape == (count,):
            raise ValueError(
                f"{where}: offsets of {count:,} lines with {line_id.shape} names and {text.shape} "
                "texts"
            )
        if len(pen_up) and not np.isin(pen_up, (0, 1)).all():
            raise ValueError(f"{where}: pen_up must be 0 or 1, got {np.unique(pen_up)[:5]}")
        return cls(
            [Points(dx, dy, pen_up)],
            np.zeros(count, np.int64),
            ends[:-1].astype(np.int64),
            ends[1:].astype(np.int64),
            tuple(map(str, line_id)),
            tuple(map(str, text)),
        )

    @classmethod
    def from_steps(
        cls, steps: Iterable[np.ndarray], line_id: Sequence[str], text: Sequence[str]
    ) -> PenLines:
        """Create lines in memory from steps (P, 3), as returned by `steps`."""
        return cls.of(pack(steps, line_id, text))

    @classmethod
    def load(cls, path: Path) -> PenLines:
        """Read the compact form: an ``.npz``, or a folder of six ``.npy`` mapped into memory."""
        if path.is_dir():
            arrays = {file.stem: map_array(file) for file in sorted(path.glob("*.npy"))}
        else:
            arrays = read_npz(path)
        lines = cls.of(arrays, str(path))
        if not len(lines):
            raise ValueError(f"{path} has no lines: get it again")
        return lines

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        steps = (self.steps(i, np.float64) for i in range(len(self)))
        for name, array in pack(steps, self.line_id, self.text).items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    def __len__(self) -> int:
        return len(self.line_id)

    @property
    def points(self) -> np.ndarray:
        return self.stop - self.start

    def steps(self, i: int, dtype: type = np.float32) -> np.ndarray:
        """Line i: (P, 3), dx, dy (downwards) and 1 on the last point of each stroke."""
        arrays = self.sources[self.source[i]]
        span = slice(self.start[i], self.stop[i])
        steps = np.empty((self.stop[i] - self.start[i], 3), dtype)
        for column, array in enumerate(arrays):
            steps[:, column] = array[span]
        return steps

    def pick(self, indices: Sequence[int] | np.ndarray) -> PenLines:
        index = np.asarray(indices, np.int64)
        return PenLines(
            self.sources,
            self.source[index],
            self.start[index],
            self.stop[index],
            tuple(self.line_id[i] for i in index),
            tuple(self.text[i] for i in index),
        )

    def __add__(self, other: PenLines) -> PenLines:
        return PenLines(
            self.sources + other.sources,
            np.concatenate([self.source, other.source + len(self.sources)]),
            np.concatenate([self.start, other.start]),
            np.concatenate([self.stop, other.stop]),
            self.line_id + other.line_id,
            self.text + other.text,
        )

    def damaged(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, points in enumerate(self.points):
            if points < 2:
                found.setdefault("fewer than two points", []).append(i)
            elif not np.isfinite(self.steps(i)).all():
                found.setdefault("coordinates that are not finite", []).append(i)
        return found

    def without_long_steps(self, longest: float, how: LongSteps) -> PenLines:
        """The lines without steps of more than ``longest`` units within a stroke.

        ``"drop"`` removes such a step (as Graves 2013, section 4), so that the following points
        move; ``"clip"`` shortens it. Steps between strokes are kept.
        """
        index = np.arange(len(self))
        shortened: list[np.ndarray] = []
        for i in range(len(self)):
            steps = self.steps(i, np.float64)
            length = np.hypot(steps[:, 0], steps[:, 1])
            long = length > longest
            long[:1] = False
            long[1:] &= steps[:-1, 2] == 0
            if not long.any():
                continue
            if how == "clip":
                steps[long, :2] *= (longest / length[long])[:, None]
            else:
                kept = np.flatnonzero(~long)
                ends = np.flatnonzero(long & (steps[:, 2] == 1))
                # The first point of a stroke is always kept, so the match is in the same stroke.
                steps[kept[np.searchsorted(kept, ends) - 1], 2] = 1
                steps = steps[kept]
            index[i] = len(self) + len(shortened)
            shortened.append(steps)
        changed = self.pick(np.flatnonzero(index >= len(self)))
        return (self + PenLines.from_steps(shortened, changed.line_id, changed.text)).pick(index)


def pack(
    steps: Iterable[np.ndarray], line_id: Sequence[str], text: Sequence[str]
) -> dict[str, np.ndarray]:
    """Convert steps (P, 3) to the six arrays of the compact form.

    Steps are stored as int16 if they are integers in range, as on a whiteboard, else as float32.
    """
    lines = [np.asarray(line, np.float64).reshape(-1, 3) for line in steps]
    table = np.concatenate(lines) if lines else np.empty((0, 3))
    limits = np.iinfo(np.int16)
    moves = table[:, :2]
    whole = (moves == np.rint(moves)).all() and (
        not len(moves) or (moves.min() >= limits.min and moves.max() <= limits.max)
    )
    dtype = np.int16 if whole else np.float32
    return {
        "dx": moves[:, 0].astype(dtype),
        "dy": moves[:, 1].astype(dtype),
        "pen_up": table[:, 2].astype(np.uint8),
        "offsets": np.cumsum([0, *map(len, lines)], dtype=np.int64),
        "line_id": np.array(line_id, dtype=np.str_),
        "text": np.array(text, dtype=np.str_),
    }


def first_names(names: Sequence[str], most: int = 20) -> str:
    """At most this many names, and the number of further ones."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def read_pair(root: Path, y_axis: Literal["up", "down"] = "up") -> PenLines:
    """Read ``strokes.npy``, an object array of L arrays (P, 3), and ``sentences.txt``, L texts.

    The column that ends strokes is detected; the others are dx and dy, where y grows in the
    direction ``y_axis``. Lines are named ``strokes-00000``, ...
    """
    path = root / STROKES
    strokes = load_objects(path)
    if strokes.ndim == 3:  # lines of one length
        strokes = np.fromiter(strokes.astype(np.float64), dtype=object)
    if strokes.ndim != 1 or not len(strokes):
        raise ValueError(f"{path}: expected an array of L arrays (P, 3), got shape {strokes.shape}")
    lines = []
    for number, line in enumerate(strokes):
        if not isinstance(line, np.ndarray) or line.dtype.kind not in "biuf" or line.ndim != 2:
            raise ValueError(f"{path}: line {number} must be an array of numbers (P, 3)")
        if line.shape[1] != 3:
            raise ValueError(f"{path}: line {number} must have three columns, got {line.shape}")
        lines.append(line.astype(np.float64))
    with open_file(root / SENTENCES) as file:
        texts = list(read_lines(file, root / SENTENCES))
    if len(texts) != len(lines):
        raise ValueError(
            f"{path} has {len(lines):,} lines, {root / SENTENCES} {len(texts):,} texts: "
            "they belong to different copies"
        )
    ends = end_of_stroke_column(lines, str(path))
    dx, dy = (column for column in range(3) if column != ends)
    sign = -1 if y_axis == "up" else 1
    steps = []
    for line in lines:
        finite = np.isfinite(line).all(axis=1)
        moves = np.column_stack([line[:, dx], sign * line[:, dy]])
        # Coordinates mark such rows; the flag is stored as an integer.
        moves[~finite] = np.nan
        steps.append(np.column_stack([moves, np.where(finite, line[:, ends], 0)]))
    names = [f"strokes-{number:05}" for number in range(len(lines))]
    return PenLines.from_steps(steps, names, [text.strip() for text in texts])


def end_of_stroke_column(lines: list[np.ndarray], where: str) -> int:
    """The column of arrays (P, 3) whose finite values are 0 and 1, both of them present."""
    table = np.concatenate(lines) if lines else np.empty((0, 3))
    found = []
    for column in range(3):
        values = table[:, column]
        values = np.unique(values[np.isfinite(values)])
        if np.array_equal(values, (0, 1)):
            found.append(column)
    if len(found) != 1:
        which = f"columns {' and '.join(map(str, found))} are" if found else "none is"
        raise ValueError(
            f"{where}: exactly one of the three columns must have 0 and 1 only (the end of a "
            f"stroke); {which} such: the file has another format or is damaged"
        )
    return found[0]


def load_objects(path: Path) -> np.ndarray:
    """Read an ``.npy`` that may be an array of arrays, without running code.

    Such files are pickles, which ``np.load(..., allow_pickle=True)`` executes; here only the
    globals of arrays are allowed.
    """
    with damage_named(path), open_regular(path) as file:
        try:
            read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
            _, _, dtype = read[npy.read_magic(file)](file)
            if dtype.hasobject:
                loaded = _ArraysOnly(file).load()
            else:
                file.seek(0)
                loaded = np.load(file, allow_pickle=False)
        except _Refused as refused:
            raise ValueError(
                f"{path} needs {refused}, which an array of strokes does not: it may be malicious; "
                "get the file elsewhere"
            ) from None
        except Exception as error:  # a damaged pickle can raise anything
            raise damaged(path, error) from error
    if not isinstance(loaded, np.ndarray):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected an array of arrays")
    return loaded


class _Refused(Exception):
    """A pickle needs a global that arrays do not."""


class _ArraysOnly(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="latin1")  # for arrays pickled by Python 2

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encode  # bytes in old protocols
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)


def _encode(text: str, encoding: str) -> bytes:
    """``_codecs.encode`` for the one codec that arrays use."""
    if encoding != "latin1":
        raise _Refused(f"the codec {encoding}")
    return text.encode(encoding)


def read_offsets(path: Path) -> torch.Tensor:
    """Read the offsets (T, 3) of one line from a ``.npy`` or ``.npz`` file.

    The end of strokes becomes the last column, and a null vector at the start is dropped.
    """
    arrays = read_npz(path) if path.suffix == ".npz" else {path.stem: map_array(path)}
    if len(arrays) != 1:
        raise ValueError(f"{path} must hold one array, it holds {first_names(list(arrays))}")
    (array,) = arrays.values()
    if array.dtype.kind not in "biuf" or array.ndim != 2 or array.shape[1] != 3:
        raise ValueError(f"{path} must hold offsets (T, 3), got {array.dtype} {array.shape}")
    with np.errstate(over="ignore"):
        line = array.astype(np.float32)
    if not np.isfinite(line).all():
        raise ValueError(f"{path} has offsets that are not finite in float32")
    lift = end_of_stroke_column([line], str(path))
    line = line[:, [*(column for column in range(3) if column != lift), lift]]
    return torch.from_numpy(line if line[0, :2].any() else line[1:])
