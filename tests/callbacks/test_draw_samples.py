"""Pictures of what a network draws: those asked for, and a training that does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import quiet_trainer

from ln_zoo.callbacks import DRAWPictures, DRAWSamples
from ln_zoo.layers import DRAWOutput, DRAWTrace
from ln_zoo.plots.draw import (
    Windows,
    bernoulli,
    nearest_images,
    plot_divergence,
    plot_filmstrip,
    plot_grid,
    plot_nearest,
    plot_pairs,
    save_animation,
)
from ln_zoo.plots.figures import save_figure
from ln_zoo.testing import CallbackCase

STILL = ["filmstrip", "kl", "nearest", "reading", "reconstructions", "samples"]
GLIMPSES, SIZE = 3, 6


class Images(LightningDataModule):
    """Twelve random images of two shades for each set; of training four batches of three."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.sets = {
            name: torch.rand(12, 1, SIZE, SIZE, generator=generator).round()
            for name in ("train", "val", "test")
        }

    def evaluation_set(self, name: str) -> TensorDataset:
        torch.rand(3)  # of the global generator
        return TensorDataset(self.sets[name])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.sets["train"]), batch_size=3, shuffle=True)

    # Plain loaders take a number from the global generator each time.
    def train_eval_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.sets["train"]), batch_size=5)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.sets["val"]), batch_size=5)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(self.sets["test"]), batch_size=5)


class Drawer(LightningModule):
    """A network of one layer with the outputs of one that draws; training needs random numbers."""

    def __init__(self, attention: bool = True) -> None:
        super().__init__()
        sizes = {"read_size": 2, "write_size": 3} if attention else dict.fromkeys(
            ("read_size", "write_size")
        )  # fmt: skip
        self.network = nn.Module()
        self.network.__dict__.update(sizes)
        self.network.line = nn.Linear(4, SIZE * SIZE)
        self.network.dropout = nn.Dropout()
        self.attention = attention

    def _output(self, z: Tensor, means: Tensor | None, trace: bool) -> DRAWOutput:
        """z (T, N, 4)."""
        torch.rand(3)  # of the global generator
        steps = self.network.line(self.network.dropout(z)).unflatten(-1, (SIZE, SIZE))
        canvases = torch.cat([torch.zeros_like(steps[:1]), steps.cumsum(0)])
        places = torch.cat([2 + z, z.new_ones(*z.shape[:2], 1)], -1).detach().abs()
        read = places if means is not None and self.attention else None
        did = DRAWTrace(canvases.detach(), read, places + 1 if self.attention else None)
        stds = None if means is None else torch.zeros_like(means)
        clamped = torch.zeros((), dtype=torch.int64)
        return DRAWOutput(canvases[-1], means, stds, clamped, did if trace else None)

    def generate_samples(self, number: int, seed: int, trace: bool = False) -> DRAWOutput:
        generator = torch.Generator().manual_seed(seed)
        return self._output(torch.randn(GLIMPSES, number, 4, generator=generator), None, trace)

    def reconstruct(self, images: Tensor, seed: int, trace: bool = False) -> DRAWOutput:
        generator = torch.Generator().manual_seed(seed)
        means = images[:, 0, :2, :2].flatten(1).expand(GLIMPSES, -1, -1)
        noise = torch.randn(means.shape, generator=generator)
        return self._output(means + noise, means, trace)

    @staticmethod
    def kl_by_glimpse(output: DRAWOutput) -> Tensor:
        return 0.5 * output.means.square().sum(-1)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self._output(torch.randn(1, 3, 4), None, False).logits.square().mean()

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        pass

    def predict_step(self, batch: tuple[Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"ones": batch[0].sum((1, 2, 3))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Pictures(Logger):
    """Takes pictures as the logger of Weights & Biases does."""

    name, version = "pictures", 0

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, list[str], int]] = []

    def log_image(self, key: str, images: list[str], step: int | None = None) -> None:
        self.taken.append((key, images, step))

    def log_metrics(self, metrics, step=None) -> None:
        pass

    def log_hyperparams(self, params, *_) -> None:
        pass


def make(**arguments) -> Drawer:
    torch.manual_seed(0)
    return Drawer(**arguments)


def trainer(folder: Path, *callbacks: Callback, **options) -> Trainer:
    given = {"logger": CSVLogger(folder, name="run", version=0), "max_epochs": 3} | options
    return quiet_trainer(*callbacks, **given, log_every_n_steps=1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pictures(*steps: int) -> list[str]:
    return sorted(f"step-{step:06d}-{name}.png" for step in steps for name in STILL)


def expected(model: Drawer, images: Tensor, rows: int, seed: int, when: str, epochs) -> dict:
    """The pictures by name, as one would make them by hand."""
    model.eval()
    with torch.no_grad():
        made_up = model.generate_samples(rows**2, seed, trace=True)
        again = model.reconstruct(images, seed, trace=True)
    p = made_up.logits.double().sigmoid()
    pairs = rows * ((rows + 1) // 2)
    found = nearest_images(p[:pairs], Images().sets["train"][:, 0])
    kl = model.kl_by_glimpse(again).double().mean(1)
    nats = torch.stack([kl] * len(epochs))  # the same in all epochs: it depends on images alone
    written = Windows(made_up.trace.write[:, :rows], 3)
    count = min(rows, len(images))
    spread = [i * len(images) // count for i in range(count)]
    read = Windows(again.trace.read[:, spread], 2)
    return {
        "filmstrip": plot_filmstrip(
            made_up.trace.canvases[:, :rows], written, title=f"samples after t glimpses{when}"
        ),
        "kl": plot_divergence(
            nats, epochs, title=f"KL at each glimpse, {len(images)} images{when}"
        ),
        "nearest": plot_nearest(
            p[:pairs], found, (rows + 1) // 2, title=f"nearest training images{when}"
        ),
        "reading": plot_filmstrip(
            again.trace.canvases[:, spread],
            read,
            images=images[spread, 0],
            title=f"reconstructions after t glimpses{when}",
        ),
        "reconstructions": plot_pairs(
            images[:, 0], again.logits.sigmoid(), rows, title=f"images and reconstructions{when}"
        ),
        "samples": plot_grid(p, rows, title=f"samples{when}"),
    }


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"every_n_epochs": 2}, (8,)),
        ({"every_n_epochs": None, "every_n_steps": 3}, (3, 6)),
        ({"every_n_steps": 6}, (4, 6, 8)),
    ],
)
def test_pictures_at_the_updates_asked_for(
    tmp_path: Path, arguments: dict, steps: tuple[int, ...]
) -> None:
    samples = DRAWSamples(rows=1, **arguments)
    trainer(tmp_path, samples, max_epochs=2).fit(make(), datamodule=Images())
    assert names(tmp_path / "run/version_0/samples") == pictures(*steps)
    assert sorted(path.name for path in samples.written) == pictures(*steps)
    assert list(samples.divergences) == [step / 4 for step in steps]


def test_pictures_are_of_the_model_at_that_update(tmp_path: Path) -> None:
    """In evaluation mode, with numbers of their own, of images spread over the validation set."""
    samples, model = DRAWSamples(rows=3, seed=7, animate=True), make()
    trainer(tmp_path, samples, max_epochs=2).fit(model, datamodule=Images())
    images = Images().sets["val"][[0, 4, 8]]  # three rows hold one row of pairs
    figures = expected(model, images, 3, 7, " (update 8, epoch 2)", [1, 2])
    folder = tmp_path / "run/version_0/samples"
    for name, figure in figures.items():
        save_figure(figure, tmp_path / f"{name}.png")
        found = folder / f"step-000008-{name}.png"
        assert found.read_bytes() == (tmp_path / f"{name}.png").read_bytes(), name
    with torch.no_grad():
        trace = model.eval().generate_samples(9, 7, trace=True).trace
    save_animation(
        trace.canvases,
        tmp_path / "drawing.gif",
        Windows(trace.write, 3),
        columns=3,
        title="samples (update 8, epoch 2)",
    )
    found = folder / "step-000008-drawing.gif"
    assert found.read_bytes() == (tmp_path / "drawing.gif").read_bytes()
    assert samples.written[-1] == found


def test_drawn_pixels(tmp_path: Path) -> None:
    samples, model = DRAWSamples(every_n_epochs=1, rows=2, seed=3, binary=True), make()
    trainer(tmp_path, samples, max_epochs=1).fit(model, datamodule=Images())
    with torch.no_grad():
        p = model.eval().generate_samples(4, 3).logits.double().sigmoid()
    title = "samples (update 4, epoch 1)"
    save_figure(plot_grid(bernoulli(p, 3), 2, title=title), tmp_path / "drawn.png")
    found = tmp_path / "run/version_0/samples/step-000004-samples.png"
    assert found.read_bytes() == (tmp_path / "drawn.png").read_bytes()


def test_divergences_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    first, second = DRAWSamples(rows=1), DRAWSamples(rows=1)
    runner = trainer(tmp_path, first, max_epochs=2)
    runner.fit(make(), datamodule=Images())
    runner.save_checkpoint(tmp_path / "last.ckpt")
    trainer(tmp_path, second).fit(make(), datamodule=Images(), ckpt_path=tmp_path / "last.ckpt")
    assert list(first.divergences) == [1, 2]
    assert list(second.divergences) == [1, 2, 3]
    assert second.divergences[1] == first.divergences[1] != [0.0] * GLIMPSES


def test_loggers_that_take_pictures_have_them(tmp_path: Path) -> None:
    board, other = TensorBoardLogger(tmp_path, name="run", version=0), Pictures()
    samples = DRAWSamples(every_n_epochs=3, rows=2, animate=True)
    trainer(tmp_path, samples, logger=[board, other]).fit(make(), datamodule=Images())
    events = EventAccumulator(board.log_dir, size_guidance={"images": 0}).Reload()
    assert sorted(events.Tags()["images"]) == STILL
    *still, moving = samples.written
    assert moving.suffix == ".gif"
    for path in still:
        name = path.stem.rpartition("-")[2]
        (image,) = events.Images(name)
        (tmp_path / "tb.png").write_bytes(image.encoded_image_string)
        assert image.step == 12
        assert (imread(tmp_path / "tb.png")[..., :3] == imread(path)[..., :3]).all()
    assert other.taken == [(path.stem.rpartition("-")[2], [str(path)], 12) for path in still]


def test_without_attention(tmp_path: Path) -> None:
    """No window is red."""
    samples = DRAWSamples(every_n_epochs=3, rows=2)
    trainer(tmp_path, samples).fit(make(attention=False), datamodule=Images())
    for name in ("filmstrip", "reading"):
        picture = imread(tmp_path / f"run/version_0/samples/step-000012-{name}.png")
        assert (picture[..., 0] == picture[..., 1]).all()


def test_two_processes_search_all_training_images(tmp_path: Path) -> None:
    """The first alone writes, and what it writes is what one process would have."""
    for devices in (1, 2):
        samples = DRAWPictures(str(tmp_path / str(devices)), rows=3, animate=False)
        options = {"strategy": "ddp_fork", "devices": 2} if devices == 2 else {}
        runner = trainer(tmp_path, samples, logger=False, **options)
        runner.predict(make(), datamodule=Shares(), return_predictions=False)
    one, two = ((tmp_path / n / "nearest.png").read_bytes() for n in "12")
    assert one == two
    assert names(tmp_path / "1") == names(tmp_path / "2") == [f"{name}.png" for name in STILL]


class Shares(Images):
    """Each of two processes has every other training image."""

    def train_eval_dataloader(self) -> DataLoader:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(TensorDataset(self.sets["train"][rank::world]), batch_size=5)


def test_prediction_draws_once(tmp_path: Path) -> None:
    where = tmp_path / "run/version_0"
    drawn = DRAWPictures(rows=4, seed=5)
    model = make()
    runner = trainer(tmp_path, drawn)
    runner.predict(model, datamodule=Images())
    assert names(where) == sorted([*(f"{name}.png" for name in STILL), "drawing.gif"])
    assert sorted(path.name for path in drawn.written) == names(where)
    images = Images().sets["test"][[0, 1, 3, 4, 6, 7, 9, 10]]  # 8 of 12
    for name, figure in expected(model, images, 4, 5, "", [0]).items():
        save_figure(figure, tmp_path / f"{name}.png")
        assert (where / f"{name}.png").read_bytes() == (tmp_path / f"{name}.png").read_bytes()


def test_prediction_about_fewer_images_than_there_is_room_for(tmp_path: Path) -> None:
    drawn = DRAWPictures(str(tmp_path / "mine"), rows=6, animate=False)
    trainer(tmp_path, drawn).predict(make(), datamodule=Images())
    images = Images().sets["test"]
    save_figure(
        expected(make(), images, 6, 0, "", [0])["reconstructions"], tmp_path / "expected.png"
    )
    found = tmp_path / "mine/reconstructions.png"
    assert found.read_bytes() == (tmp_path / "expected.png").read_bytes()


class TestDRAWSamples(CallbackCase):
    """Model and loaders use the global random state."""

    needs = True
    invalid: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("every_n_epochs", "every_n_steps", "rows"), (0, -1)
    )

    def callback(self, **arguments: Any) -> Any:
        return DRAWSamples(**{"every_n_steps": 3, "rows": 1, **arguments})

    def model(self) -> Drawer:
        return make()

    def data(self) -> Images:
        return Images()


class TestDRAWPictures(TestDRAWSamples):
    stage = "predict"
    invalid: ClassVar[dict[str, Any]] = {"rows": (0, -1)}

    def callback(self, **arguments: Any) -> Any:
        return DRAWPictures(**{"rows": 1, "animate": False, **arguments})


def test_no_pictures_at_all() -> None:
    with pytest.raises(ValueError, match="every_n_epochs and every_n_steps"):
        DRAWSamples(every_n_epochs=None)
