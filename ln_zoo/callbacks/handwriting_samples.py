"""Handwriting samples during training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.evaluation_loop import check_model, evaluating
from ln_zoo.callbacks.pictures_during_training import PicturesDuringTraining
from ln_zoo.plots.pen import sheet
from ln_zoo.plots.pen_maps import plot_window
from ln_zoo.utils.checks import check_optional

#: All letters, in lines of the length of IAM-OnDB's.
_TEXTS = (
    "The quick brown fox jumps over",
    "the lazy dog. Pack my box with",
    "five dozen liquor jugs, will you?",
)


class HandwritingSamples(PicturesDuringTraining):
    """Write texts during training, with the same random numbers each time.

    Pictures are written to ``samples`` in the log directory: ``step-000500.png``, the lines, and
    ``step-000500-window.png``, the window weights of the first line. Loggers that accept images log
    them as ``samples`` and ``window``. One point is written when training starts, so that invalid
    texts and models fail early.

    The model must have ``write(texts, bias=..., max_points=..., generator=...)``, as
    `ln_zoo.models.Handwriting` with ``text=True``.

    Args:
        texts: texts to write, a line each.
        every_n_epochs: epochs between pictures; None: none at the end of epochs.
        every_n_steps: updates between pictures; None: none within epochs.
        bias: sampling bias, at least 0.
        seed: seed of the samples.
        max_points: maximum points of a line; default: 40 per character.
    """

    def __init__(
        self,
        texts: Sequence[str] = _TEXTS,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        bias: float = 0.5,
        seed: int = 0,
        max_points: int | None = None,
    ) -> None:
        if isinstance(texts, str) or not texts:
            raise ValueError(f"texts must be a list of at least one text, got {texts!r}")
        check_optional(1, max_points=max_points)
        super().__init__(every_n_epochs, every_n_steps)
        self.texts = list(texts)
        self.bias = bias
        self.seed = seed
        self.max_points = max_points

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_model(self, pl_module, "Handwriting", "write")
        self._write(trainer, max_points=1)

    def _write(self, trainer: Trainer, max_points: int | None) -> list[Any]:
        module = trainer.lightning_module
        generator = torch.Generator(module.device).manual_seed(self.seed)
        with evaluating(module), trainer.precision_plugin.val_step_context():
            lines: list[Any] = module.write(  # type: ignore[operator]
                self.texts, bias=self.bias, max_points=max_points, generator=generator
            )
        return lines

    def draw(self, trainer: Trainer, folder: Path, epochs: float) -> None:
        step = trainer.global_step
        lines = self._write(trainer, self.max_points)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        title = f"update {step}, epoch {trainer.current_epoch + 1}, bias {self.bias:g}"
        labels = [
            line.text if line.finished else f"{line.text}  (cut at {len(line.offsets)} points)"
            for line in lines
        ]
        drawn = sheet([line.offsets for line in lines], labels, title).figure()
        self.keep(trainer, "samples", drawn, folder / f"step-{step:06d}.png")
        first = lines[0]
        window = plot_window(first.offsets, first.phi, first.text, title)
        self.keep(trainer, "window", window, folder / f"step-{step:06d}-window.png")
