"""Nearest images of captions, and nearest captions of images."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ln_zoo.plots.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours of correct and of other answers.
_RIGHT, _OTHER = "#1a8f3c", "#9a9a9a"
#: Side of an image, inches, and letters per line of captions.
_SIDE, _LETTERS = 1.15, 58


@dataclass(frozen=True)
class Found:
    """Answers to one query, nearest first."""

    query: str  #: caption, or name of an image
    answers: Sequence[str]  #: names of images, or captions
    right: Sequence[bool]  #: whether each answer belongs to the query
    rank: int  #: rank of the best correct answer, from 1; ties do not count as better


def plot_retrieval(
    images: Sequence[Found],
    captions: Sequence[Found],
    picture: Callable[[str], np.ndarray | None],
    title: str = "",
) -> Figure:
    """Draw a row per query: a caption with its images, or an image with its captions.

    ``images`` are answers to captions, ``captions`` to images. ``picture`` returns an image's
    pixels, uint8 (B, A, 3), by name, or None to print the name.
    """
    rows = len(images) + len(captions)
    columns = max((len(found.answers) for found in images), default=4)
    figure = new_figure((columns + 2.6) * _SIDE, rows * 1.12 * _SIDE)
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
    axis.set(xticks=[], yticks=[])
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
