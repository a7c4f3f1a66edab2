"""Handwriting in a common pair of files, ``strokes.npy`` and ``sentences.txt``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.lib import format as npy

from ln_zoo.data.archives import damage_named, damaged, open_file
from ln_zoo.data.array_files import map_array, read_npz
from ln_zoo.data.pen.files import PenLines, first_names
from ln_zoo.data.text_files import read_lines
from ln_zoo.utils.files import open_regular

STROKES, SENTENCES = "strokes.npy", "sentences.txt"

#: The globals of a pickled array of arrays, under NumPy 1 and NumPy 2.
_ADMITTED = {
    *(("numpy", name) for name in ("ndarray", "dtype")),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.multiarray", "scalar") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}


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
