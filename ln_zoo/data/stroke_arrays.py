"""The pair ``strokes.npy`` and ``sentences.txt`` in which handwriting data are often passed on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy

from ln_zoo.data.pen_lines import PenLines

STROKES, SENTENCES = "strokes.npy", "sentences.txt"

#: All that an array of arrays needs: by the names that NumPy 1 and NumPy 2 wrote.
_ADMITTED = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


def read_pair(root: Path, y_axis: Literal["up", "down"] = "up") -> PenLines:
    """Reads ``strokes.npy``, an object array of L arrays (P, 3), and ``sentences.txt``, L texts.

    Which of the three columns says that a stroke ends is found out: it is the one that holds
    nothing but 0 and 1. The other two are dx and dy in this order. Offsets may be raw or scaled.

    Args:
        root: the folder with both files.
        y_axis: direction in which the offsets' y grows.

    Returns:
        Lines named by their numbers, from ``strokes-00000``.

    Raises:
        OSError: a file cannot be read.
        ValueError: not such a file, no column or more than one is binary, or another number of
            texts than of lines.
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
    texts = (root / SENTENCES).read_text(encoding="utf-8").removesuffix("\n").split("\n")
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
        # A row is told by its coordinates: the flag is stored as a whole number.
        moves[~finite] = np.nan
        steps.append(np.column_stack([moves, np.where(finite, line[:, ends], 0)]))
    names = [f"strokes-{number:05}" for number in range(len(lines))]
    return PenLines.from_steps(steps, names, [text.strip() for text in texts])


def end_of_stroke_column(lines: list[np.ndarray], where: str) -> int:
    """Which of the three columns holds nothing but 0 and 1, and both of them.

    Args:
        lines: arrays (P, 3); numbers that are not finite are passed over.
        where: what an error calls them.

    Raises:
        ValueError: none does, or more than one.

    Example:
        >>> end_of_stroke_column([np.array([[0.0, 3.5, 1.0], [1.0, 2.0, -4.0]])], "these")
        0
    """
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
            f"{where}: one of the three columns, and only one, must hold 0 and 1 (the end of a "
            f"stroke) and nothing else; here {which} such: the file is of another form or damaged"
        )
    return found[0]


def load_objects(path: Path) -> np.ndarray:
    """Reads an ``.npy`` that may be an array of arrays, without running anything it says to run.

    Such files are pickles, which ``np.load(..., allow_pickle=True)`` obeys whatever they ask for.
    Here nothing is admitted but what arrays are made of.

    Raises:
        OSError: the file cannot be read.
        ValueError: it asks for anything else, or is damaged.
    """
    with path.open("rb") as file:
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
                f"{path} asks for {refused}, which no array of strokes needs: it may be meant to "
                "do harm; get the file elsewhere"
            ) from None
        except Exception as error:  # a damaged pickle can fail in any way
            raise ValueError(f"{path} cannot be read ({error}): it is damaged") from error
    if not isinstance(loaded, np.ndarray):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, expected an array of arrays")
    return loaded


class _Refused(Exception):
    """A pickle asks for something that arrays do not need."""


class _ArraysOnly(pickle.Unpickler):
    """Makes arrays, and refuses to look up anything else."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="latin1")  # which arrays pickled by Python 2 need

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _encode  # how Python 3 writes bytes in old protocols
        if (module, name) not in _ADMITTED:
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)


def _encode(text: str, encoding: str) -> bytes:
    """What ``_codecs.encode`` is used for, without the codecs that can be reached by it."""
    if encoding != "latin1":
        raise _Refused(f"the codec {encoding}")
    return text.encode(encoding)
