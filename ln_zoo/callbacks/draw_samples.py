"""What a network draws, as pictures: every few epochs or updates of a training, or by predict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ln_zoo.callbacks.updates import UpdateCallback
from ln_zoo.callbacks.whole_set import data_module, evaluating
from ln_zoo.layers import DRAWTrace
from ln_zoo.plots.draw import (
    Nearest,
    Windows,
    bernoulli,
    closest,
    nearest_images,
    plot_divergence,
    plot_filmstrip,
    plot_grid,
    plot_nearest,
    plot_pairs,
    save_animation,
)
from ln_zoo.plots.logged import log_picture
from ln_zoo.plots.pen import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: What a model must have.
_NEEDED = ("generate_samples", "reconstruct", "kl_by_glimpse", "network")
#: The most images on a side of an animation.
_ANIMATED = 5


class _Drawn(NamedTuple):
    """What there is to show.

    Attributes:
        samples: generated images, (M, B, A), each pixel's probability.
        writing: how they were drawn.
        nearest: to the first of them, of all training images.
        images: of the data, (N, B, A).
        reconstructions: these images as the model draws them.
        reading: how they were drawn.
        divergence: KL at each glimpse of these, nats, (T,).
    """

    samples: Tensor
    writing: DRAWTrace
    nearest: Nearest
    images: Tensor
    reconstructions: Tensor
    reading: DRAWTrace
    divergence: Tensor


class _Pictures(Callback):
    """What the callbacks below share.

    Args:
        rows: rows of pictures; of samples there are as many columns.
        seed: of the random numbers.
        animate: whether to write the animation.
        binary: whether pixels of samples in the grid are drawn by their probabilities.

    Raises:
        ValueError: for ``rows`` below 1.
    """

    def __init__(self, rows: int, seed: int, animate: bool, binary: bool) -> None:
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        self.rows = rows
        self.seed = seed
        self.animate = animate
        self.binary = binary
        self.written: list[Path] = []

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        """Raises ValueError unless model and data have what pictures are made from."""
        missing = [name for name in _NEEDED if not hasattr(module, name)]
        if missing:
            raise ValueError(
                f"{type(self).__name__} needs a model that draws, such as ln_zoo.models.DRAW; "
                f"{type(module).__name__} lacks {', '.join(missing)}"
            )
        data_module(trainer, self, "evaluation_set", "train_eval_dataloader")

    def _images(self, trainer: Trainer, name: str) -> Tensor:
        """As many images as there is room for, (N, C, B, A), evenly spread over a set.

        Not the first: sets may be in the order of their classes. Not of the loader: of several
        processes each would have a share of the set.
        """
        with evaluating(trainer.lightning_module):  # sets may draw random numbers
            images = data_module(trainer, self).evaluation_set(name)
            number = min(self.rows * max(1, self.rows // 2), len(images))
            chosen = images[torch.arange(number) * len(images) // number][0]
        moved: Tensor = trainer.strategy.batch_to_device(
            trainer.precision_plugin.convert_input(chosen)
        )
        return moved

    def _drawn(self, trainer: Trainer, images: Tensor) -> _Drawn:
        """Asks the model; all processes do the same, but each searches its share of the set."""
        module: Any = trainer.lightning_module
        loader = data_module(trainer, self).train_eval_dataloader()
        with evaluating(module):
            with trainer.precision_plugin.val_step_context():
                made_up = module.generate_samples(self.rows**2, seed=self.seed, trace=True)
                again = module.reconstruct(images, seed=self.seed, trace=True)
            samples = made_up.logits.double().sigmoid().cpu()
            pairs = self.rows * ((self.rows + 1) // 2)
            nearest = nearest_images(samples[:pairs], (batch[0][:, 0] for batch in loader))
            divergence = module.kl_by_glimpse(again).double().mean(1).cpu()
        if trainer.world_size > 1:
            nearest = _nearest_of_all(nearest)
        return _Drawn(
            samples=samples,
            writing=made_up.trace,
            nearest=nearest,
            images=images[:, 0],
            reconstructions=again.logits.double().sigmoid(),
            reading=again.trace,
            divergence=divergence,
        )

    def _figures(
        self, module: Any, drawn: _Drawn, history: dict[float, list[float]], when: str
    ) -> dict[str, Figure]:
        """By name."""
        samples, rows, network = drawn.samples, self.rows, module.network
        first, number = slice(rows), min(rows, len(drawn.images))
        # Sets may be in the order of their classes: here too, not the first.
        spread = torch.arange(number) * len(drawn.images) // number
        return {
            "samples": plot_grid(
                bernoulli(samples, self.seed) if self.binary else samples,
                rows,
                title=f"samples{when}",
            ),
            "filmstrip": plot_filmstrip(
                drawn.writing.canvases[:, first],
                windows_of(drawn.writing.write, network.write_size, first),
                title=f"samples after t glimpses{when}",
            ),
            "reconstructions": plot_pairs(
                drawn.images,
                drawn.reconstructions,
                rows,
                title=f"images and reconstructions{when}",
            ),
            "reading": plot_filmstrip(
                drawn.reading.canvases[:, spread],
                windows_of(drawn.reading.read, network.read_size, spread),
                images=drawn.images[spread],
                title=f"reconstructions after t glimpses{when}",
            ),
            "nearest": plot_nearest(
                samples[: len(drawn.nearest.images)],
                drawn.nearest,
                (rows + 1) // 2,
                title=f"nearest training images{when}",
            ),
            "kl": plot_divergence(
                torch.tensor(list(history.values()), dtype=torch.float64),
                list(history),
                title=f"KL at each glimpse, {len(drawn.images)} images{when}",
            ),
        }

    def _save_animation(self, module: Any, drawn: _Drawn, picture: Path, when: str) -> None:
        columns = min(self.rows, _ANIMATED)
        writing, first = drawn.writing, slice(columns**2)
        save_animation(
            writing.canvases[:, first],
            picture,
            windows_of(writing.write, module.network.write_size, first),
            columns=columns,
            title=f"samples{when}",
        )
        self.written.append(picture)


class DRAWSamples(UpdateCallback, _Pictures):
    """Draws what the network draws during training, to see when its images can be recognised.

    With the same random numbers and images each time, so that what changes is the model. At the
    updates asked for these go to ``samples`` in the log directory, named by the number of updates
    done, as ``step-000500-samples.png``:

    - ``samples``: generated images, the probability of each pixel;
    - ``filmstrip``: the first after some of the glimpses, with red windows where these wrote;
    - ``reconstructions``: validation images, and what the network makes of them;
    - ``reading``: the same after some of the glimpses, with red windows where these read;
    - ``nearest``: samples beside the nearest training images, in Euclidean distance;
    - ``kl``: the divergence of these validation images at each glimpse, and its history so far;
    - with ``animate`` also ``drawing.gif``, samples while they are drawn.

    Windows are not drawn of a network without attention. Loggers that take pictures have those that
    do not move, under these names (`ln_zoo.plots.logged.log_picture`).

    The training is not touched: modes and random numbers are put back. With several processes all
    draw the same, of the whole validation set; each searches its share of the training images, and
    the first one keeps the pictures. They are those that one process would draw of the model.

    The model must have, as `ln_zoo.models.DRAW`, ``generate_samples(number, seed=..., trace=True)``
    and ``reconstruct(images, seed=..., trace=True)``, images as in a batch, that give a
    `ln_zoo.layers.DRAWOutput`; ``kl_by_glimpse`` of such an output, (T, N); and a ``network`` with
    ``read_size`` and ``write_size``, filters on a side. The data module must have, as
    `ln_zoo.data.BinarizedMNIST`, ``evaluation_set("val")``, the whole validation set on every
    process, which has a length and gives a batch for an int64 tensor of N indices; and
    ``train_eval_dataloader``, each process its share. Batches begin with images (N, 1, B, A).

    Args:
        every_n_epochs: epochs between two pictures; ``None``: none at the end of epochs.
        every_n_steps: updates between two pictures; ``None``: none within epochs.
        rows: rows of pictures; of samples there are as many columns.
        seed: of the random numbers.
        animate: whether to write the animation, which takes some seconds.
        binary: whether pixels of samples in the grid are drawn by their probabilities.

    Raises:
        ValueError: for numbers below 1, and if both numbers are ``None``; before training starts,
            for a model or a data module without these.
    """

    def __init__(
        self,
        every_n_epochs: int | None = 1,
        every_n_steps: int | None = None,
        rows: int = 10,
        seed: int = 0,
        animate: bool = False,
        binary: bool = False,
    ) -> None:
        for name, number in (("every_n_epochs", every_n_epochs), ("every_n_steps", every_n_steps)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, or None; got {number}")
        if every_n_epochs is None and every_n_steps is None:
            raise ValueError("nothing would be drawn: give every_n_epochs or every_n_steps")
        super().__init__(rows, seed, animate, binary)
        self.every_n_epochs = every_n_epochs
        self.every_n_steps = every_n_steps
        #: KL at each glimpse, by the number of epochs done.
        self.divergences: dict[float, list[float]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._check(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._seen = trainer.global_step
        self._watched = self._images(trainer, "val")

    def on_update(self, trainer: Trainer, batch_idx: int) -> None:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            done = (batch_idx + 1) / trainer.num_training_batches
            self._draw(trainer, trainer.current_epoch + done)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._draw(trainer, trainer.current_epoch + 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"divergences": self.divergences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.divergences = dict(state_dict["divergences"])

    def _draw(self, trainer: Trainer, epochs: float) -> None:
        step = trainer.global_step
        if step == self._seen:  # an update that ends an epoch may be asked for twice
            return
        self._seen = step
        folder = Path(trainer.log_dir or ".") / "samples"  # asks every process
        drawn = self._drawn(trainer, self._watched)
        self.divergences[epochs] = drawn.divergence.tolist()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        when = f" (update {step}, epoch {trainer.current_epoch + 1})"
        module = trainer.lightning_module
        for name, figure in self._figures(module, drawn, self.divergences, when).items():
            picture = folder / f"step-{step:06d}-{name}.png"
            save(figure, picture)
            self.written.append(picture)
            log_picture(trainer, name, picture)
        if self.animate:
            picture = folder / f"step-{step:06d}-drawing.gif"
            self._save_animation(module, drawn, picture, when)


class DRAWPictures(_Pictures):
    """Draws what the network draws when ``predict`` starts.

    The pictures are those of `DRAWSamples`, ``samples.png``, ``filmstrip.png``, ``nearest.png``,
    ``drawing.gif``, and of images evenly spread over the test set ``reconstructions.png``,
    ``reading.png`` and ``kl.png``. Model and data module must have the same as there, but
    ``evaluation_set("test")`` for ``evaluation_set("val")``.

    Args:
        folder: where to write; default: the log directory.
        rows: rows of pictures; of samples there are as many columns.
        seed: of the random numbers.
        animate: whether to write the animation, which takes some seconds.
        binary: whether pixels of samples in the grid are drawn by their probabilities.

    Raises:
        ValueError: for ``rows`` below 1; before the prediction, for a model or a data module
            without these.

    Example:
        On the command line::

            ln-zoo predict --weights draw.layernorm --data BinarizedMNIST \\
                --trainer.callbacks DRAWPictures
    """

    def __init__(
        self,
        folder: str | None = None,
        rows: int = 10,
        seed: int = 0,
        animate: bool = True,
        binary: bool = False,
    ) -> None:
        super().__init__(rows, seed, animate, binary)
        self.folder = folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict":
            self._check(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(self.folder or trainer.log_dir or ".")  # asks every process
        drawn = self._drawn(trainer, self._images(trainer, "test"))
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.written = []
        history = {0.0: drawn.divergence.tolist()}
        for name, figure in self._figures(pl_module, drawn, history, "").items():
            self.written.append(folder / f"{name}.png")
            save(figure, self.written[-1])
        if self.animate:
            self._save_animation(pl_module, drawn, folder / "drawing.gif", "")


def windows_of(places: Tensor | None, size: int | None, chosen: slice | Tensor) -> Windows | None:
    """Of some images, if there was attention."""
    return None if places is None or size is None else Windows(places[:, chosen], size)


def _nearest_of_all(found: Nearest) -> Nearest:
    """The nearest of what all processes found in their shares."""
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, found)
    return closest(shares)
