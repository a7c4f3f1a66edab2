"""Handwritten lines as pen trajectories with texts, in memory or mapped from files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ln_zoo.data.array_files import map_array, read_npz
from ln_zoo.data.ragged import check_offsets

LongSteps = Literal["drop", "clip"]

ARRAYS = ("dx", "dy", "pen_up", "offsets", "line_id", "text")
"""The arrays of a set of lines in the compact form."""


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
