"""What captions and images find, as a picture: the nearest images of some captions, and back."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ln_zoo.callbacks.pen_pictures import save
from ln_zoo.callbacks.whole_set import batches, data_module, evaluating
from ln_zoo.files import few_colours

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


class RetrievalPictures(Callback):
    """Draws what a model finds, when ``predict`` starts: ``retrieval.png``.

    Of some captions of the test set the images nearest to them, and of some images the nearest
    captions; their own are green. The queries are drawn at random, none is selected.

    The model must give embeddings of a batch, captions and images, and ``penalties`` of these, as
    `ln_zoo.models.OrderEmbedding`; the data module must have, as `ln_zoo.data.CaptionedImages`,
    ``captioned(name)`` and ``thumbnail(name)``. Thumbnails may be shown under the terms of their
    dataset only.

    Args:
        folder: where to write; default: the log directory.
        queries: captions, and images, whose answers are shown.
        answers: of each.
        seed: draws the queries.

    Raises:
        ValueError: for numbers below 1; before the prediction, for a model or a data module without
            these.

    Example:
        On the command line::

            ln-zoo predict --weights order_embedding.layernorm --data CaptionedImages \\
                --data.dataset flickr8k --trainer.callbacks RetrievalPictures
    """

    def __init__(
        self, folder: str | None = None, queries: int = 3, answers: int = 5, seed: int = 0
    ) -> None:
        for name, number in (("queries", queries), ("answers", answers)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.folder = folder
        self.queries = queries
        self.answers = answers
        self.seed = seed
        self.written: list[Path] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        if not callable(getattr(pl_module, "penalties", None)):
            raise ValueError(
                "RetrievalPictures needs a model that ranks, such as ln_zoo.models.OrderEmbedding; "
                f"{type(pl_module).__name__} has no penalties"
            )
        data_module(trainer, self, "captioned", "thumbnail", "test_dataloader")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.folder or trainer.log_dir or ".")  # asks every process
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = data_module(trainer, self)
        images, captions = self._found(trainer, pl_module)
        count = len(data.captioned("test").names)
        title = f"nearest of {count:,} images, and of their captions; own in green"
        path = folder / "retrieval.png"
        save(plot_retrieval(images, captions, data.thumbnail, title), path)
        few_colours(path)
        self.written = [path]

    def _found(self, trainer: Trainer, module: Any) -> tuple[list[Found], list[Found]]:
        read = data_module(trainer, self).captioned("test")
        words = [" ".join(caption) for caption in read.captions]
        parts = []
        with evaluating(module):
            # Not the loader of the test: of several processes each would have a share of the set.
            loader = data_module(trainer, self).predict_dataloader()
            for batch in batches(trainer, loader):
                with trainer.precision_plugin.predict_step_context():
                    parts.append(module(batch))
            s, v = (torch.cat(each) for each in zip(*parts, strict=True))
            each = len(s) // len(v)
            generator = torch.Generator().manual_seed(self.seed)
            rows = torch.randperm(len(s), generator=generator)[: self.queries]
            columns = torch.randperm(len(v), generator=generator)[: self.queries]
            of_images = module.penalties(s[rows], v)
            of_captions = module.penalties(s, v[columns]).T
        images = [
            self._answers(e, words[row], read.names, [int(row) // each])
            for e, row in zip(of_images, rows.tolist(), strict=True)
        ]
        captions = [
            self._answers(e, read.names[i], words, range(each * i, each * (i + 1)))
            for e, i in zip(of_captions, columns.tolist(), strict=True)
        ]
        return images, captions

    def _answers(
        self, penalties: Tensor, query: str, names: Sequence[str], right: Sequence[int]
    ) -> Found:
        nearest = penalties.argsort()[: self.answers].tolist()
        best = penalties[list(right)].min()
        return Found(
            query,
            [names[i] for i in nearest],
            [i in right for i in nearest],
            1 + int((penalties < best).sum()),
        )
