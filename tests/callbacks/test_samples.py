"""Pictures of what a network draws or writes: those asked for; training does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from handwriting_support import Waves
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from matplotlib.figure import Figure
from matplotlib.image import imread
from refusals import refuses
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from training import logged_trainer as trainer

from ln_zoo.callbacks import DRAWPictures, DRAWSamples, HandwritingSamples
from ln_zoo.models import DRAW, Handwriting, MLPClassifier
from ln_zoo.norms import BatchNorm, LayerNorm, Norm
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
from ln_zoo.plots.pen import sheet
from ln_zoo.plots.pen_maps import plot_window
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

    def loader(self, name: str, batch_size: int = 5, **options) -> DataLoader:
        """Plain loaders take a number from the global generator each time."""
        return DataLoader(TensorDataset(self.sets[name]), batch_size=batch_size, **options)

    train_dataloader = partialmethod(loader, "train", 3, shuffle=True)
    train_eval_dataloader = partialmethod(loader, "train")
    val_dataloader = partialmethod(loader, "val")
    predict_dataloader = partialmethod(loader, "test")


class Drawer(DRAW):
    """Takes numbers from the global generator where it draws; training needs batch statistics."""

    def generate_samples(self, *arguments: Any, **options: Any) -> Any:
        torch.rand(3)
        return super().generate_samples(*arguments, **options)

    def reconstruct(self, *arguments: Any, **options: Any) -> Any:
        torch.rand(3)
        return super().reconstruct(*arguments, **options)


class Pictures(Logger):
    """Takes pictures as the logger of Weights & Biases does."""

    name, version = "pictures", 0

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, list[str], int]] = []

    def log_image(self, key: str, images: list[str], step: int | None = None) -> None:
        self.taken.append((key, images, step))

    log_metrics = log_hyperparams = lambda *_, **__: None


def make(read_size: int | None = 2, write_size: int | None = 3) -> Drawer:
    torch.manual_seed(0)
    options = {"norm": BatchNorm(), "lr": 0.05, "importance_samples": 0}
    return Drawer((SIZE, SIZE), GLIMPSES, 6, 4, read_size, write_size, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".yaml")


def pictures(*steps: int, kinds: Sequence[str] = STILL) -> list[str]:
    ends = [f"-{kind}.png" if kind else ".png" for kind in kinds]
    return sorted(f"step-{step:06d}{end}" for step in steps for end in ends)


def expected(
    model: Drawer, images: Tensor, rows: int, seed: int, when: str = "", earlier: dict | None = None
) -> dict:
    """The pictures by name, as one would make them by hand."""
    model.eval()
    with torch.no_grad():
        made_up = model.generate_samples(rows**2, seed, trace=True)
        again = model.reconstruct(images, seed, trace=True)
    p = made_up.logits.double().sigmoid()
    pairs = rows * ((rows + 1) // 2)
    found = nearest_images(p[:pairs], Images().sets["train"][:, 0])
    kl = model.kl_by_glimpse(again).double().mean(1)
    epochs = [*(earlier or {}), len(earlier or {}) + 1 if when else 0]
    nats = torch.stack([*map(torch.tensor, (earlier or {}).values()), kl])
    count = min(rows, len(images))
    spread = [i * len(images) // count for i in range(count)]
    steps = [made_up.trace.canvases[:, :rows], again.trace.canvases[:, spread]]
    windows = Windows(made_up.trace.write[:, :rows], 3), Windows(again.trace.read[:, spread], 2)
    titles = {
        "filmstrip": "samples after t glimpses",
        "kl": f"KL at each glimpse, {len(images)} images",
        "nearest": "nearest training images",
        "reading": "reconstructions after t glimpses",
        "reconstructions": "images and reconstructions",
        "samples": "samples",
    }
    plots = {
        "filmstrip": partial(plot_filmstrip, steps[0], windows[0]),
        "kl": partial(plot_divergence, nats, epochs),
        "nearest": partial(plot_nearest, p[:pairs], found, (rows + 1) // 2),
        "reading": partial(plot_filmstrip, steps[1], windows[1], images=images[spread, 0]),
        "reconstructions": partial(plot_pairs, images[:, 0], again.logits.sigmoid(), rows),
        "samples": partial(plot_grid, p, rows),
    }
    return {name: plot(title=titles[name] + when) for name, plot in plots.items()}


def assert_drawn(path: Path, figure: Figure) -> None:
    """Assert that a file is this picture, byte for byte."""
    save_figure(figure, path.with_name("expected.png"))
    wanted = path.with_name("expected.png").read_bytes()
    path.with_name("expected.png").unlink()
    assert path.read_bytes() == wanted, path.name


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"every_n_epochs": 2}, (8,)),
        ({"every_n_epochs": None, "every_n_steps": 3}, (3, 6)),
        ({"every_n_steps": 6}, (4, 6, 8)),
    ],
)
@pytest.mark.parametrize("kind", ["draw", "handwriting"])
def test_pictures_at_the_updates_asked_for(
    tmp_path: Path, kind: str, arguments: dict, steps: tuple[int, ...]
) -> None:
    if kind == "draw":
        samples, model, data = DRAWSamples(rows=1, **arguments), make(), Images()
        expected = pictures(*steps)
    else:
        samples, model = HandwritingSamples(TEXTS, max_points=6, **arguments), make_writer()
        data, expected = Waves(4), pictures(*steps, kinds=("", "window"))
    trainer(tmp_path, samples, max_epochs=2).fit(model, datamodule=data)
    assert names(tmp_path / "run/version_0/samples") == expected
    assert sorted(path.name for path in samples.written) == expected
    if kind == "draw":
        assert list(samples.divergences) == [step / 4 for step in steps]


def test_pictures_are_of_the_model_at_that_update(tmp_path: Path) -> None:
    """In evaluation mode, with numbers of their own, of images spread over the validation set."""
    samples, model = DRAWSamples(rows=3, seed=7, animate=True), make()
    trainer(tmp_path, samples, max_epochs=2).fit(model, datamodule=Images())
    images = Images().sets["val"][[0, 4, 8]]  # three rows hold one row of pairs
    first = {1: samples.divergences[1]}
    figures = expected(model, images, 3, 7, " (update 8, epoch 2)", first)
    folder = tmp_path / "run/version_0/samples"
    for name, figure in figures.items():
        assert_drawn(folder / f"step-000008-{name}.png", figure)
    with torch.no_grad():
        trace = model.eval().generate_samples(9, 7, trace=True).trace
    moving, title = tmp_path / "drawing.gif", "samples (update 8, epoch 2)"
    save_animation(trace.canvases, moving, Windows(trace.write, 3), columns=3, title=title)
    found = folder / "step-000008-drawing.gif"
    assert found.read_bytes() == moving.read_bytes()
    assert samples.written[-1] == found


def test_drawn_pixels(tmp_path: Path) -> None:
    samples, model = DRAWSamples(every_n_epochs=1, rows=2, seed=3, binary=True), make()
    trainer(tmp_path, samples, max_epochs=1).fit(model, datamodule=Images())
    with torch.no_grad():
        p = model.eval().generate_samples(4, 3).logits.double().sigmoid()
    drawn = plot_grid(bernoulli(p, 3), 2, title="samples (update 4, epoch 1)")
    assert_drawn(tmp_path / "run/version_0/samples/step-000004-samples.png", drawn)


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
    trainer(tmp_path, samples).fit(make(None, None), datamodule=Images())
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
    trainer(tmp_path, drawn).predict(model, datamodule=Images())
    assert names(where) == sorted([*(f"{name}.png" for name in STILL), "drawing.gif"])
    assert sorted(path.name for path in drawn.written) == names(where)
    images = Images().sets["test"][[0, 1, 3, 4, 6, 7, 9, 10]]  # 8 of 12
    for name, figure in expected(model, images, 4, 5).items():
        assert_drawn(where / f"{name}.png", figure)


def test_prediction_about_fewer_images_than_there_is_room_for(tmp_path: Path) -> None:
    drawn = DRAWPictures(str(tmp_path / "mine"), rows=6, animate=False)
    trainer(tmp_path, drawn).predict(make(), datamodule=Images())
    figures = expected(make(), Images().sets["test"], 6, 0)
    assert_drawn(tmp_path / "mine/reconstructions.png", figures["reconstructions"])


class TestDRAWSamples(CallbackCase):
    """Model and loaders use the global random state."""

    needs = True
    numbers = ("every_n_epochs", "every_n_steps", "rows")
    invalid: ClassVar[dict[str, Any]] = dict.fromkeys(numbers, (0, -1))
    # Of four updates, the last one follows the pictures.
    options: ClassVar[dict[str, Any]] = {"every_n_epochs": None, "every_n_steps": 3, "rows": 1}
    callback = staticmethod(partial(DRAWSamples, **options))
    model = staticmethod(make)
    data = Images


class TestDRAWPictures(TestDRAWSamples):
    stage = "predict"
    invalid: ClassVar[dict[str, Any]] = {"rows": (0, -1)}
    callback = staticmethod(partial(DRAWPictures, rows=1, animate=False))


def test_no_pictures_at_all() -> None:
    refuses("every_n_epochs and every_n_steps", DRAWSamples, every_n_epochs=None)


# Lines that a network writes

TEXTS = ["on it", "go"]


class Kept(HandwritingSamples):
    def draw(self, trainer, *place) -> None:
        super().draw(trainer, *place)
        self.weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}


def make_writer(norm: Norm | None = None, **arguments) -> Handwriting:
    torch.manual_seed(0)
    return Handwriting(
        **{"hidden_size": 8, "num_layers": 2, "mixture_components": 2, "window_components": 2}
        | {"norm": norm or LayerNorm()} | arguments
    )  # fmt: skip


def test_lines_are_of_the_model_at_that_update(tmp_path: Path) -> None:
    """As it writes in evaluation mode, with numbers of its own."""
    samples = Kept(TEXTS, every_n_epochs=3, bias=0.4, seed=7, max_points=40)
    model = make_writer()
    trainer(tmp_path, samples).fit(model, datamodule=Waves(4))
    again = make_writer()
    again.load_state_dict(samples.weights)
    generator = torch.Generator().manual_seed(7)
    lines = again.eval().write(TEXTS, bias=0.4, max_points=40, generator=generator)
    title = "update 12, epoch 3, bias 0.4"
    labels = [
        line.text if line.finished else f"{line.text}  (cut at {len(line.offsets)} points)"
        for line in lines
    ]
    expected = sheet([line.offsets for line in lines], labels, title)
    expected.save(tmp_path / "lines.png")
    first = lines[0]
    save_figure(plot_window(first.offsets, first.phi, first.text, title), tmp_path / "window.png")
    found, window = samples.written
    assert found.read_bytes() == (tmp_path / "lines.png").read_bytes()
    assert window.read_bytes() == (tmp_path / "window.png").read_bytes()


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (lambda: make_writer(text=False), {}, "this network reads no text"),
        (lambda: MLPClassifier(4, [2]), {}, "HandwritingSamples .*MLPClassifier"),
        (make_writer, {"bias": -1.0}, "bias must be at least 0"),
        (make_writer, {"texts": ["a", ""]}, "text 1 of 2 is empty"),
        (lambda: make_writer(strict_text=True), {"texts": ["a", "ü"]}, "has no 'ü'"),
    ],
)
def test_models_and_texts_that_cannot_be_written(
    tmp_path: Path, model, arguments: dict, message: str
) -> None:
    samples = HandwritingSamples(**{"texts": TEXTS} | arguments)
    runner = trainer(tmp_path, samples)
    refuses(message, runner.fit, model(), datamodule=Waves(4))
    assert runner.global_step == 0


class TestHandwritingSamples(CallbackCase):
    needs = True
    invalid: ClassVar[dict[str, Any]] = {
        "texts": ([], "one"),
        **dict.fromkeys(("every_n_epochs", "every_n_steps", "max_points"), (0, -1)),
    }
    callback = staticmethod(partial(HandwritingSamples, texts=TEXTS, max_points=5))
    model = staticmethod(partial(make_writer, BatchNorm(), weight_noise=0.05))
    data = staticmethod(partial(Waves, 4))
