"""Samples during training: the pictures asked for, and a training that does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from training import quiet_trainer

from ln_zoo.callbacks import HandwritingSamples
from ln_zoo.models import Handwriting, MLPClassifier
from ln_zoo.norms import BatchNorm, LayerNorm, Norm
from ln_zoo.plots.figures import save_figure
from ln_zoo.plots.pen import sheet
from ln_zoo.plots.pen_maps import plot_window
from ln_zoo.testing import CallbackCase

TEXTS = ["on it", "go"]


class Lines(LightningDataModule):
    """Four batches of random lines."""

    offset_statistics = torch.tensor([8.0, 0.0]), torch.tensor([40.0, 30.0])

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        batches = []
        for _ in range(4):
            moves = torch.randn(3, 21, 2, generator=generator) * 30
            lifts = torch.rand(3, 21, 1, generator=generator) < 0.1
            offsets = torch.cat([moves, lifts.float()], -1)
            offsets[:, 0] = 0
            batches.append((offsets, torch.tensor([20, 20, 15]), ("abc", "a b", "no"), True))
        return DataLoader(batches, batch_size=None)


class Drawn(HandwritingSamples):
    def draw(self, trainer, *place) -> None:
        super().draw(trainer, *place)
        self.weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}


def make(norm: Norm | None = None, **arguments) -> Handwriting:
    torch.manual_seed(0)
    return Handwriting(
        **{"hidden_size": 8, "num_layers": 2, "mixture_components": 2, "window_components": 2}
        | {"norm": norm or LayerNorm()} | arguments
    )  # fmt: skip


def trainer(folder: Path, *callbacks: Callback, **options) -> Trainer:
    given = {"logger": CSVLogger(folder, name="run", version=0), "max_epochs": 3} | options
    return quiet_trainer(*callbacks, **given, log_every_n_steps=1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run/version_0/samples").iterdir())


def pictures(*steps: int) -> list[str]:
    return sorted(f"step-{step:06d}{end}.png" for step in steps for end in ("", "-window"))


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"every_n_epochs": 2}, (8,)),
        ({"every_n_steps": 6}, (4, 6, 8, 12)),
    ],
)
def test_pictures_at_the_updates_asked_for(
    tmp_path: Path, arguments: dict, steps: tuple[int, ...]
) -> None:
    samples = HandwritingSamples(TEXTS, max_points=6, **arguments)
    trainer(tmp_path, samples).fit(make(), datamodule=Lines())
    assert names(tmp_path) == pictures(*steps)
    assert sorted(path.name for path in samples.written) == pictures(*steps)


def test_pictures_are_of_the_model_at_that_update(tmp_path: Path) -> None:
    """As it writes in evaluation mode, with numbers of its own."""
    samples = Drawn(TEXTS, every_n_epochs=3, bias=0.4, seed=7, max_points=40)
    model = make()
    trainer(tmp_path, samples).fit(model, datamodule=Lines())
    again = make()
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
        (lambda: make(text=False), {}, "this network reads no text"),
        (lambda: MLPClassifier(4, [2]), {}, "HandwritingSamples .*MLPClassifier"),
        (make, {"bias": -1.0}, "bias must be at least 0"),
        (make, {"texts": ["a", ""]}, "text 1 of 2 is empty"),
        (lambda: make(strict_text=True), {"texts": ["a", "ü"]}, "has no 'ü'"),
    ],
)
def test_models_and_texts_that_cannot_be_written(
    tmp_path: Path, model, arguments: dict, message: str
) -> None:
    samples = HandwritingSamples(**{"texts": TEXTS} | arguments)
    runner = trainer(tmp_path, samples)
    with pytest.raises(ValueError, match=message):
        runner.fit(model(), datamodule=Lines())
    assert runner.global_step == 0


class TestHandwritingSamples(CallbackCase):
    needs = True
    invalid: ClassVar[dict[str, Any]] = {
        "texts": ([], "one"),
        **dict.fromkeys(("every_n_epochs", "every_n_steps", "max_points"), (0, -1)),
    }

    def callback(self, **arguments: Any) -> HandwritingSamples:
        return HandwritingSamples(**{"texts": TEXTS, "max_points": 5, **arguments})

    def model(self) -> Handwriting:
        return make(BatchNorm(), weight_noise=0.05)

    def data(self) -> Lines:
        return Lines()
