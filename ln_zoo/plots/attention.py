"""Attention of a reader over the words of a passage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Letters per line of a monospaced font, and the size of a letter, inches.
_LETTERS = 110
_WIDTH, _HEIGHT = 0.0755, 0.19
_MARGIN, _SIZE, _FONT = 0.2, 9, "DejaVu Sans Mono"
_RIGHT, _WRONG = "#00703c", "#c00000"


class Attended(NamedTuple):
    """A question with the attention and prediction of a reader; passage and query are words."""

    passage: Sequence[str]
    attention: Sequence[float]  #: weight of each word of the passage, nonnegative
    query: Sequence[str]
    answer: str  #: the correct answer
    prediction: str  #: the predicted answer


def plot_attention(questions: Sequence[Attended], title: str = "") -> Figure:
    """Draw passages with words shaded by attention, relative to the largest weight of the passage.

    The answer is green, a wrong prediction red. Query, answer and prediction precede each passage.
    """
    from matplotlib.figure import Figure

    lines = [_layout(question) for question in questions]
    rows = sum(len(part) + 1 for part in lines) + bool(title)
    size = (2 * _MARGIN + _LETTERS * _WIDTH, 2 * _MARGIN + rows * _HEIGHT)
    figure = Figure(figsize=size)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    axis.set(xlim=(0, size[0]), ylim=(size[1], 0))
    row = 0
    if title:
        _write(axis, 0, 0, title, weight="bold")
        row = 1
    for part in lines:
        for line in part:
            for word in line:
                _draw(axis, row, word)
            row += 1
        row += 1
    return figure


class _Word(NamedTuple):
    """A placed word: column in letters, and shade from 0 to 1."""

    column: int
    text: str
    shade: float
    colour: str


def _layout(question: Attended) -> list[list[_Word]]:
    right = question.prediction == question.answer
    head = [*question.query, "|", question.answer, "|", "read:", question.prediction]
    last = _RIGHT if right else _WRONG
    colours = {len(head) - 4: _RIGHT, len(head) - 1: last}
    most = max(question.attention) or 1.0
    marks = {question.prediction: _WRONG, question.answer: _RIGHT}
    query = _lines([(word, 0.0, colours.get(i, "black")) for i, word in enumerate(head)])
    passage = _lines(
        [
            (word, weight / most, marks.get(word, "black"))
            for word, weight in zip(question.passage, question.attention, strict=True)
        ]
    )
    return query + passage


def _lines(words: Sequence[tuple[str, float, str]]) -> list[list[_Word]]:
    lines: list[list[_Word]] = [[]]
    column = 0
    for text, shade, colour in words:
        if column and column + len(text) > _LETTERS:
            lines.append([])
            column = 0
        lines[-1].append(_Word(column, text[:_LETTERS], shade, colour))
        column += len(text) + 1
    return lines


def _draw(axis: Axes, row: int, word: _Word) -> None:
    from matplotlib.patches import Rectangle

    if word.shade > 0:
        corner = (_MARGIN + (word.column - 0.3) * _WIDTH, _MARGIN + row * _HEIGHT)
        box = Rectangle(
            corner,
            (len(word.text) + 0.6) * _WIDTH,
            0.92 * _HEIGHT,
            facecolor="#f28e2b",
            alpha=word.shade,
            linewidth=0,
        )
        axis.add_patch(box)
    weight = "normal" if word.colour == "black" else "bold"
    _write(axis, row, word.column, word.text, color=word.colour, weight=weight)


def _write(axis: Axes, row: int, column: int, text: str, **options: Any) -> None:
    axis.text(
        _MARGIN + column * _WIDTH,
        _MARGIN + (row + 0.7) * _HEIGHT,
        text,
        size=_SIZE,
        family=_FONT,
        parse_math=False,
        **options,
    )
