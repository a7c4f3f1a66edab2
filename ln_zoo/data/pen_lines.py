"""Handwritten lines as pen trajectories with their texts: in memory, or mapped from files."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

LongSteps = Literal["drop", "clip"]

ARRAYS = ("dx", "dy", "pen_up", "offsets", "line_id", "text")
"""What the compact form holds of a set of lines, by the names of its arrays."""


class Points(NamedTuple):
    """The points of many lines, one after the other: three arrays (N,)."""

    dx: np.ndarray
    dy: np.ndarray
    pen_up: np.ndarray


class PenLines:
    """L lines: their pen points as steps from the point before, names and texts.

    As recorded on a whiteboard, x grows to the right and y **downwards**. The first step of a line
    is its absolute position, so that sums within the line give the coordinates back. Parts and
    unions share the points with the lines they were made of, which may be files mapped into memory.

    Args:
        sources: where points lie.
        source: for each line the number of its source, (L,).
        start: for each line its first point there, (L,).
        stop: for each line the point behind its last, (L,).
        line_id: L names.
        text: L transcriptions; empty where there is none.
    """

    def __init__(
        self,
        sources: Sequence[Points],
        source: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        line_id: Sequence[str],
        text: Sequence[str],
    ) -> None:
        self.sources = list(sources)
        self.source = source
        self.start = start
        self.stop = stop
        self.line_id = tuple(line_id)
        self.text = tuple(text)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], where: str = "these lines") -> PenLines:
        """Lines out of the six arrays of the compact form.

        Args:
            arrays: ``dx``, ``dy``: (N,) steps, whiteboard units; ``pen_up``: (N,) 1 on the last
                point of a stroke, else 0; ``offsets``: (L + 1,) line i is
                ``[offsets[i]:offsets[i + 1]]``; ``line_id``, ``text``: (L,) strings.
            where: what error messages call them.

        Raises:
            ValueError: an array is missing, or they contradict one another.

        Example:
            >>> lines = PenLines.from_steps([np.array([[5, 9, 0], [2, 1, 1]])], ["a-1"], ["I"])
            >>> len(lines), lines.text, lines.steps(0).tolist()
            (1, ('I',), [[5.0, 9.0, 0.0], [2.0, 1.0, 1.0]])
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
        ends = np.asarray(offsets)
        if ends.ndim != 1 or not np.issubdtype(ends.dtype, np.integer) or len(ends) < 1:
            raise ValueError(f"{where}: offsets must be integers (L + 1,), got {ends.dtype}")
        if ends[0] != 0 or ends[-1] != len(dx) or (np.diff(ends) < 0).any():
            raise ValueError(
                f"{where}: offsets must increase from 0 to the {len(dx):,} points, got "
                f"{ends[0]:,} to {ends[-1]:,}: files of different sets, or a damaged one"
            )
        count = len(ends) - 1
        if len(line_id) != count or len(text) != count:
            raise ValueError(
                f"{where}: offsets of {count:,} lines with {len(line_id):,} names and "
                f"{len(text):,} texts"
            )
        if len(pen_up) and not np.isin(pen_up, (0, 1)).all():
            raise ValueError(f"{where}: pen_up must be 0 or 1, got {np.unique(pen_up)[:5]}")
        return cls(
            [Points(dx, dy, pen_up)],
            np.zeros(count, np.int64),
            ends[:-1].astype(np.int64),
            ends[1:].astype(np.int64),
            [str(name) for name in line_id],
            [str(words) for words in text],
        )

    @classmethod
    def from_steps(
        cls, steps: Iterable[np.ndarray], line_id: Sequence[str], text: Sequence[str]
    ) -> PenLines:
        """Lines in memory out of their steps, as `steps` gives them back.

        Args:
            steps: for each line (P, 3): dx, dy (downwards), 1 on the last point of a stroke.
            line_id: names.
            text: transcriptions.
        """
        return cls.of(pack(steps, line_id, text))

    @classmethod
    def load(cls, path: Path) -> PenLines:
        """Reads the compact form: an ``.npz``, or a folder of its six arrays as ``.npy``.

        An ``.npz`` is compressed and is read into memory; the points of a folder are mapped, and
        processes on one machine share them.

        Raises:
            OSError: the file or folder cannot be read.
            ValueError: it is damaged or something else.
        """
        try:
            if path.is_dir():
                arrays = {
                    file.stem: np.load(file, mmap_mode="r", allow_pickle=False)
                    for file in sorted(path.glob("*.npy"))
                }
            else:
                with np.load(path, allow_pickle=False) as archive:
                    arrays = {name: archive[name] for name in archive.files}
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): it is damaged, or not a file of handwriting in "
                "the compact form"
            ) from error
        return cls.of(arrays, str(path))

    def save(self, folder: Path) -> None:
        """Writes the compact form that is mapped into memory: a folder of six ``.npy``."""
        folder.mkdir(parents=True, exist_ok=True)
        steps = (self.steps(i, np.float64) for i in range(len(self)))
        for name, array in pack(steps, self.line_id, self.text).items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    def __len__(self) -> int:
        return len(self.line_id)

    @property
    def points(self) -> np.ndarray:
        """Number of points of each line, int64 (L,)."""
        return self.stop - self.start

    def steps(self, i: int, dtype: type = np.float32) -> np.ndarray:
        """Line i: (P, 3), dx, dy (downwards) and 1 on the last point of each stroke.

        The first step is the line's absolute position.
        """
        arrays = self.sources[self.source[i]]
        span = slice(self.start[i], self.stop[i])
        steps = np.empty((self.stop[i] - self.start[i], 3), dtype)
        for column, array in enumerate(arrays):
            steps[:, column] = array[span]
        return steps

    def pick(self, indices: Sequence[int] | np.ndarray) -> PenLines:
        """Some of the lines, in the order given."""
        index = np.asarray(indices, np.int64)
        return PenLines(
            self.sources,
            self.source[index],
            self.start[index],
            self.stop[index],
            [self.line_id[i] for i in index],
            [self.text[i] for i in index],
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
        """Numbers of the lines that cannot be learnt from, by what is wrong with them."""
        found: dict[str, list[int]] = {}
        for i, points in enumerate(self.points):
            if points < 2:
                found.setdefault("fewer than two points", []).append(i)
            elif not np.isfinite(self.steps(i)).all():
                found.setdefault("coordinates that are not finite", []).append(i)
        return found

    def without_long_steps(self, longest: float, how: LongSteps) -> PenLines:
        """The lines without steps of more than ``longest`` units within a stroke.

        Such steps are jumps of the pen's sensor. Steps between strokes stay as they are: nearly
        all that are long carry the pen to the next word.

        Args:
            longest: length of the longest step that stays, whiteboard units.
            how: ``"drop"`` takes the step out (as Graves 2013, section 4), so that what follows
                moves back to where the pen was; a stroke that ended with it ends a point before.
                ``"clip"`` shortens it to the longest, in its direction.

        Returns:
            The lines; those that changed lie in memory.
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
                # The first point of a stroke always stays, so what is found is of the same stroke.
                steps[kept[np.searchsorted(kept, ends) - 1], 2] = 1
                steps = steps[kept]
            index[i] = len(self) + len(shortened)
            shortened.append(steps)
        changed = self.pick(np.flatnonzero(index >= len(self)))
        return (self + PenLines.from_steps(shortened, changed.line_id, changed.text)).pick(index)


def pack(
    steps: Iterable[np.ndarray], line_id: Sequence[str], text: Sequence[str]
) -> dict[str, np.ndarray]:
    """The six arrays of the compact form.

    Steps are stored as int16 where they are whole numbers that fit, as those of a whiteboard do,
    else as float32.

    Args:
        steps: for each line (P, 3), as `PenLines.steps`.
        line_id: names.
        text: transcriptions.
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
