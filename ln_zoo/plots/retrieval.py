"""What captions and images find: the nearest images of some captions, and back."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours of right and of other answers.
_RIGHT, _OTHER = "#1a8f3c", "#9a9a9a"
#: Inches of a picture, and letters in a line of captions.
_SIDE, _LETTERS = 1.15, 58


@dataclass(frozen=True)
class Found:
    """The answers to one query, the nearest first.

    Attributes:
        query: the caption, or the name of the image.
        answers: names of images, or captions.
        right: whether each answer belongs to the query.
        rank: of the best right answer, from 1; equal penalties do not count as ahead.
    """

    query: str
    answers: Sequence[str]
    right: Sequence[bool]
    rank: int


def plot_retrieval(
    images: Sequence[Found],
    captions: Sequence[Found],
    picture: Callable[[str], np.ndarray | None],
    title: str = "",
) -> Figure:
    """A row for each query: a caption with the images found, or an image with the captions found.

    Args:
        images: found for captions.
        captions: found for images.
        picture: of an image, uint8 (B, A, 3), by its name; ``None``: the name is printed.
        title: above all.

    Raises:
        ValueError: without a query.
    """
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

    rows = len(images) + len(captions)
    if not rows:
        raise ValueError("there is nothing to draw: give at least one query")
    columns = max((len(found.answers) for found in images), default=4)
    figure = Figure(figsize=((columns + 2.6) * _SIDE, rows * 1.12 * _SIDE), layout="constrained")
    grid = figure.add_gridspec(rows, columns + 1, width_ratios=[2.6] + [1.0] * columns)
    for row, found in enumerate(images):
        _print(figure.add_subplot(grid[row, 0]), [(f"{found.query}\n(rank {found.rank})", "black")])
        for column, (name, right) in enumerate(zip(found.answers, found.right, strict=True), 1):
            _show(figure.add_subplot(grid[row, column]), name, picture(name), right)
    for row, found in enumerate(captions, len(images)):
        _show(figure.add_subplot(grid[row, 0]), found.query, picture(found.query), None)
        answers = zip(found.answers, found.right, strict=True)
        lines = [(text, _RIGHT if right else "black") for text, right in answers]
        _print(figure.add_subplot(grid[row, 1:]), [*lines, (f"(rank {found.rank})", "black")])
    if title:
        figure.suptitle(title, fontsize=9)
    return figure


def _show(axis: Axes, name: str, picture: np.ndarray | None, right: bool | None) -> None:
    """An image, framed as the answer that it is."""
    axis.set_xticks([])
    axis.set_yticks([])
    if picture is None:
        axis.text(0.5, 0.5, textwrap.fill(name, 12), ha="center", va="center", fontsize=6)
    else:
        axis.imshow(picture)
    for side in axis.spines.values():
        side.set_color(_RIGHT if right else _OTHER)
        side.set_linewidth(3.0 if right else 0.5)


def _print(axis: Axes, lines: Sequence[tuple[str, str]]) -> None:
    axis.axis("off")
    single = len(lines) == 1
    for number, (text, colour) in enumerate(lines):
        width = 34 if single else _LETTERS * 2
        shown = "\n".join(textwrap.fill(part, width) for part in text.splitlines())
        height = 0.5 if single else 1 - (number + 0.5) / len(lines)
        axis.text(0.0, height, shown, va="center", fontsize=7, color=colour)
