"""Handwriting on the way: the same texts, written every few epochs or updates of a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer

from ln_zoo.callbacks.updates import UpdateCallback
from ln_zoo.callbacks.whole_set import evaluating
from ln_zoo.plots.logged import log_picture
from ln_zoo.plots.pen import save, sheet
from ln_zoo.plots.pen_maps import plot_window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: All letters, in lines as long as those of IAM-OnDB.
_TEXTS = (
    "The quick brown fox jumps over",
    "the lazy dog. Pack my box with",
    "five dozen liquor jugs, will you?",
)


class HandwritingSamples(UpdateCallback):
    """Writes a few texts during training, to see when writing can be read.

    With the same random numbers each time, so that what changes is the model. At the updates asked
    for two pictures go to ``samples`` in the log directory, named by the number of updates done:
    ``step-000500.png``, the lines, and ``step-000500-window.png``, what the window showed while the
    first was written. A `TensorBoardLogger` has them as images, ``samples`` and ``window``.

    The training is not touched: modes and random numbers are put back. With several processes all
    write the same, and the first one keeps it. A first point is written when training starts, so
    that a model that cannot write, or a text it cannot read, is told then.

    The model must have ``write(texts, bias=..., max_points=..., generator=...)``, as
    `ln_zoo.models.Handwriting` with ``text=True``.

    Args:
        texts: what to write, a line each.
        every_n_epochs: epochs between two pictures; ``None``: none at the end of epochs.
        every_n_steps: updates between two pictures; ``None``: none within epochs.
        bias: how far to keep to what is likeliest, at least 0.
        seed: of the random numbers.
        max_points: the most points of a line; default: as the model has it, 40 for each character.

    Raises:
        ValueError: without texts, for numbers below 1, and if both numbers are ``None``; when
            training starts, for a model that cannot write, texts it refuses, a negative bias.
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
        for name, number in (
            ("every_n_epochs", every_n_epochs),
            ("every_n_steps", every_n_steps),
            ("max_points", max_points),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, or None; got {number}")
        if every_n_epochs is None and every_n_steps is None:
            raise ValueError("nothing would be written: give every_n_epochs or every_n_steps")
        self.texts = list(texts)
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        self.bias = bias
        self.seed = seed
        self.max_points = max_points
        self.written: list[Path] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not callable(getattr(pl_module, "write", None)):
            raise ValueError(
                f"HandwritingSamples needs a model that writes, such as ln_zoo.models.Handwriting; "
                f"{type(pl_module).__name__} does not"
            )
        self._write(trainer, max_points=1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._drawn = trainer.global_step

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            self._draw(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer)

    def _write(self, trainer: Trainer, max_points: int | None) -> list[Any]:
        module = trainer.lightning_module
        generator = torch.Generator(module.device).manual_seed(self.seed)
        with evaluating(module), trainer.precision_plugin.val_step_context():
            lines: list[Any] = module.write(  # type: ignore[operator]
                self.texts, bias=self.bias, max_points=max_points, generator=generator
            )
        return lines

    def _draw(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step == self._drawn:  # an update that ends an epoch may be asked for twice
            return
        self._drawn = step
        folder = Path(trainer.log_dir or ".") / "samples"  # asks every process
        lines = self._write(trainer, self.max_points)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        title = f"update {step}, epoch {trainer.current_epoch + 1}, bias {self.bias:g}"
        labels = [
            line.text if line.finished else f"{line.text}  (cut at {len(line.offsets)} points)"
            for line in lines
        ]
        drawn = sheet([line.offsets for line in lines], labels, title).figure()
        self._keep(trainer, "samples", drawn, folder / f"step-{step:06d}.png")
        first = lines[0]
        window = plot_window(first.offsets, first.phi, first.text, title)
        self._keep(trainer, "window", window, folder / f"step-{step:06d}-window.png")

    def _keep(self, trainer: Trainer, name: str, figure: Figure, picture: Path) -> None:
        save(figure, picture)
        self.written.append(picture)
        log_picture(trainer, name, picture)
