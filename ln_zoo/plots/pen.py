"""Pictures of handwriting: pages, and sheets of lines with labels, as PNG, SVG or PDF.

Offsets are (T, 3): dx, dy (upwards), 1 if the pen is lifted after the point, in the units of the
data. The first offset starts at the first point of the line, with the pen down.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ln_zoo.plots.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Offsets = Tensor | np.ndarray

#: Colours of written and of given strokes.
INK, GIVEN = "#000000", "#9a9a9a"
#: Width of pen lines, points (1/72 inch).
THICKNESS = 1.2

#: Median pen steps per inch, which gives letters their natural size.
_STEPS_PER_INCH = 45.0
#: Maximum size of a page, inches; longer lines are scaled down.
_WIDEST, _TALLEST = 16.0, 300.0
#: Heights in inches: margin, gap between lines, label of a line, title.
_MARGIN, _GAP, _LABEL, _TITLE = 0.25, 0.12, 0.24, 0.35
#: Font sizes, points, and the approximate width of a letter, inches per point.
_SMALL, _LARGE, _LETTER = 8, 11, 0.0095


def strokes(offsets: Offsets, pen_down: bool = True) -> list[np.ndarray]:
    """Split a line (T, 3) into strokes: cumulative sums of offsets from (0, 0).

    ``pen_down``: whether the pen is down at the start; False after a completed stroke.

    Returns:
        Points (P, 2) of each stroke, in the units of the offsets; a single point is a dot. Empty
        for a line without offsets.

    Example:
        >>> line = np.array([[2.0, 1.0, 1], [3, 0, 0], [0, -1, 0]])
        >>> [stroke.tolist() for stroke in strokes(line)]
        [[[0.0, 0.0], [2.0, 1.0]], [[5.0, 1.0], [5.0, 0.0]]]
    """
    moves = as_array(offsets)
    if moves.ndim != 2 or moves.shape[1] != 3:
        raise ValueError(f"offsets must be (T, 3): dx, dy, lift; got {moves.shape}")
    wrong = np.flatnonzero(~np.isfinite(moves).all(1))
    if len(wrong):
        raise ValueError(
            f"{len(wrong)} of {len(moves)} offsets are not finite, first number {wrong[0]}, "
            f"{moves[wrong[0]].tolist()}: remove them"
        )
    if not len(moves):
        return []
    points = np.concatenate([np.zeros((1, 2)), np.cumsum(moves[:, :2], axis=0)])
    lifted = np.concatenate([[not pen_down], moves[:, 2] > 0.5])
    parts = np.split(points, np.flatnonzero(lifted) + 1)
    return [part for part in parts[0 if pen_down else 1 :] if len(part)]


class Stroke(NamedTuple):
    """A stroke: points (P, 2), on a `Page` in inches from its lower left corner, and colour."""

    points: np.ndarray
    colour: str


class Words(NamedTuple):
    """Text on a page: start of its baseline, inches, and font size, points."""

    x: float
    y: float
    text: str
    size: float


@dataclass(frozen=True)
class Page:
    """A layout of handwritten lines, in inches.

    Attributes:
        strokes: strokes in the order of writing.
        words: labels.
        units_per_inch: units of the data per inch.
        title: title in the metadata of the file.
    """

    width: float
    height: float
    strokes: tuple[Stroke, ...]
    words: tuple[Words, ...]
    units_per_inch: float
    title: str = ""

    def save(self, picture: Path, thickness: float = THICKNESS) -> None:
        """Write the page in a format of matplotlib; ``thickness`` of the pen in points."""
        save_figure(self.figure(thickness), picture, title=printable(self.title))

    def figure(self, thickness: float = THICKNESS) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(self.width, self.height))
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_axis_off()
        axis.set(xlim=(0, self.width), ylim=(0, self.height))
        draw(axis, self.strokes, thickness)
        for words in self.words:
            text = printable(words.text)
            axis.text(words.x, words.y, text, size=words.size, parse_math=False)
        return figure


def page(
    lines: Sequence[Offsets | None],
    *,
    given: Offsets | None = None,
    show_given: bool = False,
    title: str = "",
) -> Page:
    """A page of left-aligned lines at the smallest distance at which they do not touch.

    Args:
        lines: offsets (T, 3) of each line; None is a blank line.
        given: offsets (T, 3) of the strokes that primed each line.
        show_given: draw the priming strokes, in another colour.
        title: title in the metadata of the file; it is not printed.

    Example:
        >>> line = np.array([[2.0, 1.0, 1], [3, 0, 0], [0, -1, 1]])
        >>> len(page([line, None, line]).strokes)
        4
    """
    return _lay_out([[inks(line, given, show_given) for line in lines]], title=title)


def sheet(
    columns: Mapping[str, Sequence[Offsets | None]] | Sequence[Offsets | None],
    labels: Sequence[str],
    title: str = "",
) -> Page:
    """A sheet of labelled lines in one or more columns.

    ``columns`` are offsets (T, 3) of the lines, or a mapping from headings to columns, such as
    ``{"real": ..., "sample": ...}``; ``labels`` belong to the rows, such as their texts.
    """
    named = columns if isinstance(columns, Mapping) else {"": columns}
    drawn = [[inks(line) for line in lines] for lines in named.values()]
    return _lay_out(drawn, list(named), labels, title)


def as_array(numbers: Offsets | Sequence[float]) -> np.ndarray:
    """Convert to a float64 array on the CPU."""
    return torch.as_tensor(numbers).detach().cpu().double().numpy()


def inks(
    line: Offsets | None, given: Offsets | None = None, show_given: bool = False
) -> list[Stroke]:
    """Strokes of a line, in its units, after the given ones."""
    if line is None:
        return []
    if given is None:
        return [Stroke(points, INK) for points in strokes(line)]
    before = [Stroke(points, GIVEN) for points in strokes(given)]
    moves = as_array(given)
    pen_down = not len(moves) or moves[-1, 2] <= 0.5
    end = moves[:, :2].sum(0)
    written = [Stroke(points + end, INK) for points in strokes(line, pen_down)]
    return [*(before if show_given else []), *written]


def extent(drawn: Sequence[Stroke]) -> tuple[np.ndarray, np.ndarray]:
    """Lower left and upper right corner of at least one stroke."""
    points = np.concatenate([stroke.points for stroke in drawn])
    return points.min(0), points.max(0)


def draw(axis: Axes, drawn: Sequence[Stroke], thickness: float) -> None:
    """Draw strokes into an axis with fixed limits."""
    from matplotlib.collections import LineCollection

    axis.set_aspect("equal")
    # Renderers omit lines of length zero.
    long = [bool(np.ptp(stroke.points, axis=0).any()) for stroke in drawn]
    lines = list(itertools.compress(drawn, long))
    axis.add_collection(
        LineCollection(
            [stroke.points for stroke in lines],
            colors=[stroke.colour for stroke in lines],
            linewidths=thickness,
            capstyle="round",
            joinstyle="round",
        ),
        autolim=False,
    )
    if dots := [stroke for stroke, is_line in zip(drawn, long, strict=True) if not is_line]:
        x, y = np.stack([stroke.points[0] for stroke in dots]).T
        colours = [stroke.colour for stroke in dots]
        axis.scatter(x, y, s=thickness**2, c=colours, linewidths=0)


def printable(text: str) -> str:
    """Replace control characters, which XML forbids, by blanks."""
    return "".join(c if c.isprintable() else " " for c in text)


# Layout


class _Box(NamedTuple):
    origin: np.ndarray
    width: float
    above: float
    below: float


def _lay_out(
    columns: Sequence[Sequence[list[Stroke]]],
    headings: Sequence[str] = ("",),
    labels: Sequence[str] = (),
    title: str = "",
) -> Page:
    """Place lines, in units of the data, on a page; the title is printed if there are labels."""
    units = _units_per_inch([line for column in columns for line in column if line])
    boxes = [[_box(line, units) for line in column] for column in columns]
    printed = title if labels else ""
    # From the top: title, headings, and then a label and a line in each row.
    rows = list(zip(*boxes, strict=True))
    above = [max(box.above for box in row) for row in rows] or [0.0]
    below = [max(box.below for box in row) for row in rows] or [0.0]
    label = _LABEL if labels else 0.0
    touching = max((a + b for a, b in zip(below, above[1:], strict=False)), default=0.0)
    pitch = (touching or _LABEL) + label + _GAP
    head = _TITLE * (bool(printed) + any(headings))
    first = _MARGIN + head + label + above[0]
    height = first + pitch * (len(above) - 1) + below[-1] + _MARGIN
    # From the left.
    widths = [max((box.width for box in column), default=0.0) for column in boxes]
    if labels:
        widths[0] = max(widths[0], _SMALL * _LETTER * max(map(len, labels)))
    lefts = [_MARGIN + sum(widths[:i]) + 2 * _MARGIN * i for i in range(len(widths))]
    width = max(lefts[-1] + widths[-1], _MARGIN + _LARGE * _LETTER * len(printed)) + _MARGIN

    placed: list[Stroke] = []
    words = [Words(_MARGIN, height - _MARGIN - 0.15, printed, _LARGE)] if printed else []
    for left, heading, lines, column in zip(lefts, headings, columns, boxes, strict=True):
        if heading:
            words.append(Words(left, height - _MARGIN - head + 0.15, heading, _LARGE))
        for row, (line, box) in enumerate(zip(lines, column, strict=True)):
            place = np.array([left, height - first - row * pitch]) - box.origin
            placed += [Stroke(s.points / units + place, s.colour) for s in line]
    for row, text in enumerate(labels):
        top = height - first - row * pitch + above[row]
        words.append(Words(_MARGIN, top + 0.07, text, _SMALL))
    return Page(width, height, tuple(placed), tuple(words), units, title)


def _box(line: list[Stroke], units: float) -> _Box:
    if not line:
        return _Box(np.zeros(2), 0.0, 0.0, 0.0)
    low, high = (corner / units for corner in extent(line))
    # The median is robust: most points belong to lower-case letters.
    middle = float(np.median(np.concatenate([s.points[:, 1] for s in line]))) / units
    return _Box(np.array([low[0], middle]), high[0] - low[0], high[1] - middle, middle - low[1])


def _units_per_inch(lines: Sequence[list[Stroke]]) -> float:
    """Scale that gives letters their natural size, or fits the lines on a page."""
    moves = [np.diff(stroke.points, axis=0) for line in lines for stroke in line]
    lengths = np.hypot(*np.concatenate([np.zeros((0, 2)), *moves]).T)
    lengths = lengths[lengths > 0]
    natural = _STEPS_PER_INCH * float(np.median(lengths)) if len(lengths) else 1.0
    sizes = [high - low for low, high in map(extent, lines)] or [np.zeros(2)]
    wide, tall = max(size[0] for size in sizes), sum(size[1] for size in sizes)
    return float(max(natural, wide / _WIDEST, tall / _TALLEST))
