"""Pictures of DRAW: during training, or by ``predict``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ln_zoo.callbacks.evaluation_loop import check_model, data_module, evaluating
from ln_zoo.callbacks.pictures_during_training import PicturesDuringTraining
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
from ln_zoo.plots.figures import save_figure
from ln_zoo.utils.checks import check_at_least

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Maximum images per side of an animation.
_ANIMATED = 5


class _Drawn(NamedTuple):
    samples: Tensor  # generated images, pixel probabilities (M, B, A)
    writing: DRAWTrace  # trace of the samples
    nearest: Nearest  # nearest training images of the first samples
    images: Tensor  # images of the data, (N, B, A)
    reconstructions: Tensor
    reading: DRAWTrace  # trace of the reconstructions
    divergence: Tensor  # mean KL of the images at each glimpse, nats, (T,)


class _Pictures(Callback):
    def __init__(self, rows: int, seed: int, animate: bool, binary: bool) -> None:
        check_at_least(1, rows=rows)
        self.rows = rows
        self.seed = seed
        self.animate = animate
        self.binary = binary
        self.written: list[Path] = []

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        needed = ("generate_samples", "reconstruct", "kl_by_glimpse", "network")
        check_model(self, module, "DRAW", *needed)
        data_module(trainer, self, "evaluation_set", "train_eval_dataloader")

    def _images(self, trainer: Trainer, name: str) -> Tensor:
        """Images (N, C, B, A) evenly spread over a set, which may be sorted by class.

        Not from the loader, which is a share of the set under several processes.
        """
        with evaluating(trainer.lightning_module):  # sets may use the global random state
            images = data_module(trainer, self).evaluation_set(name)
            number = min(self.rows * max(1, self.rows // 2), len(images))
            chosen = images[torch.arange(number) * len(images) // number][0]
        moved: Tensor = trainer.strategy.batch_to_device(
            trainer.precision_plugin.convert_input(chosen)
        )
        return moved

    def _contents(self, trainer: Trainer, images: Tensor) -> _Drawn:
        """Generate and reconstruct on all processes; each searches its share of the images."""
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
        samples, rows, network = drawn.samples, self.rows, module.network
        first, number = slice(rows), min(rows, len(drawn.images))
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
                drawn.images, drawn.reconstructions, rows, title=f"images and reconstructions{when}"
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


class DRAWSamples(PicturesDuringTraining, _Pictures):
    """Draw pictures during training, with the same random numbers and images each time.

    Pictures are written to ``samples`` in the log directory, such as ``step-000500-samples.png``,
    and logged by the `TensorBoardLogger` and loggers with ``log_image``, such as `WandbLogger`:

    - ``samples``: generated images, as pixel probabilities;
    - ``filmstrip``: the first samples after some glimpses, with red write windows;
    - ``reconstructions``: validation images and their reconstructions;
    - ``reading``: reconstructions after some glimpses, with red read windows;
    - ``nearest``: samples with their nearest training images in Euclidean distance;
    - ``kl``: KL of the validation images at each glimpse, and its history;
    - with ``animate``, ``drawing.gif``: samples while they are drawn (not logged).

    Windows need a network with attention. Pictures do not depend on the number of processes.

    The model must have, as `ln_zoo.models.DRAW`, ``generate_samples(number, seed=..., trace=True)``
    and ``reconstruct(images, seed=..., trace=True)``, which return a `ln_zoo.layers.DRAWOutput`;
    ``kl_by_glimpse(output)``, (T, N); and ``network.read_size`` and ``network.write_size``. The
    data module must have, as `ln_zoo.data.BinarizedMNIST`, ``evaluation_set("val")``, indexed by an
    int64 tensor, and ``train_eval_dataloader``. Batches begin with images (N, 1, B, A).

    Args:
        every_n_epochs: epochs between pictures; None: none at the end of epochs.
        every_n_steps: updates between pictures; None: none within epochs.
        rows: rows of pictures, and columns of samples.
        seed: seed of samples and reconstructions.
        animate: write the animation, which takes some seconds.
        binary: sample the pixels of the grid of samples.
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
        PicturesDuringTraining.__init__(self, every_n_epochs, every_n_steps)
        _Pictures.__init__(self, rows, seed, animate, binary)
        #: KL at each glimpse, by epoch.
        self.divergences: dict[float, list[float]] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._check(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._watched = self._images(trainer, "val")

    def state_dict(self) -> dict[str, Any]:
        return {"divergences": self.divergences}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.divergences = dict(state_dict["divergences"])

    def draw(self, trainer: Trainer, folder: Path, epochs: float) -> None:
        drawn = self._contents(trainer, self._watched)
        self.divergences[epochs] = drawn.divergence.tolist()
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step = trainer.global_step
        when = f" (update {step}, epoch {trainer.current_epoch + 1})"
        module = trainer.lightning_module
        for name, figure in self._figures(module, drawn, self.divergences, when).items():
            self.keep(trainer, name, figure, folder / f"step-{step:06d}-{name}.png")
        if self.animate:
            picture = folder / f"step-{step:06d}-drawing.gif"
            self._save_animation(module, drawn, picture, when)


class DRAWPictures(_Pictures):
    """Draw the pictures of `DRAWSamples` with test images when ``predict`` starts.

    Model and data module must have the same attributes, with ``evaluation_set("test")``.

    Args:
        folder: folder to write to; default: the log directory.
        rows: rows of pictures, and columns of samples.
        seed: seed of samples and reconstructions.
        animate: write the animation, which takes some seconds.
        binary: sample the pixels of the grid of samples.
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
        folder = Path(self.folder or trainer.log_dir or ".")  # collective
        drawn = self._contents(trainer, self._images(trainer, "test"))
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.written = []
        history = {0.0: drawn.divergence.tolist()}
        for name, figure in self._figures(pl_module, drawn, history, "").items():
            self.written.append(folder / f"{name}.png")
            save_figure(figure, self.written[-1])
        if self.animate:
            self._save_animation(pl_module, drawn, folder / "drawing.gif", "")


def windows_of(places: Tensor | None, size: int | None, chosen: slice | Tensor) -> Windows | None:
    """Windows of some images, or None without attention."""
    return None if places is None or size is None else Windows(places[:, chosen], size)


def _nearest_of_all(found: Nearest) -> Nearest:
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, found)
    return closest(shares)
