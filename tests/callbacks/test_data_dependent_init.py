"""Scales and biases from training data, before training: once, the same on every process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from cli_support import same
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from refusals import refuses
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from training import quiet_trainer

from ln_zoo.callbacks import DataDependentInit
from ln_zoo.data import Digits
from ln_zoo.layers import data_dependent_init
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import LayerNorm, WeightNorm


class Start(Callback):
    """How the model looked after the callbacks before it were set up."""

    def setup(self, trainer, pl_module, stage) -> None:
        self.state = {k: v.clone() for k, v in pl_module.state_dict().items()}
        self.random = torch.get_rng_state()


digits = partial(Digits, batch_size=20, train_size=101, val_size=20)


def new_model() -> MLPClassifier:
    torch.manual_seed(0)
    return MLPClassifier(64, [8, 7], norm=WeightNorm())


def scales(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith("scale")}


def fit(
    model: MLPClassifier, folder: Path, *callbacks: Callback, epochs: int = 1, data=None, **resumed
) -> None:
    callbacks = (*callbacks, ModelCheckpoint(folder, filename="last"))
    trainer = quiet_trainer(*callbacks, max_epochs=epochs, limit_val_batches=0)
    trainer.fit(model, datamodule=data or digits(), **resumed)


def test_a_fit_starts_from_the_first_examples(tmp_path: Path) -> None:
    model, start = new_model(), Start()
    fresh = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    fit(model, tmp_path, DataDependentInit(50), start)

    data, expected = digits(), new_model()
    data.setup()
    images = data.train_dataloader().dataset[torch.arange(50)][0]
    assert data_dependent_init(expected, images) == ["network.1", "network.3"]
    assert same(start.state, dict(expected.state_dict()))
    assert torch.equal(start.random, random)
    for name, value in scales(fresh).items():
        assert not torch.isclose(start.state[name], value).any(), name
    # And training went on from there.
    for name, value in scales(model.state_dict()).items():
        assert not torch.equal(value, start.state[name]), name


def test_more_examples_than_there_are(tmp_path: Path) -> None:
    starts = Start(), Start()
    for start, given in zip(starts, ([101], []), strict=True):
        fit(new_model(), tmp_path, DataDependentInit(*given), start)
    assert same(starts[0].state, starts[1].state)


@pytest.mark.parametrize("trained", [False, True])
def test_a_resumed_run_continues_exactly(tmp_path: Path, trained: bool, caplog) -> None:
    whole, half = new_model(), new_model()
    fit(whole, tmp_path / "whole", DataDependentInit(50), epochs=2)
    fit(half, tmp_path / "half", DataDependentInit(50), epochs=1)
    caplog.clear()
    # The model it is resumed with: a new one, or the very one, whose scales are trained.
    model = half if trained else new_model()
    last = tmp_path / "half" / "last.ckpt"
    fit(model, tmp_path / "half", DataDependentInit(50), epochs=2, ckpt_path=last)
    assert same(dict(model.state_dict()), dict(whole.state_dict()))
    assert "data-dependent" not in caplog.text


def test_it_acts_on_fits_alone(tmp_path: Path) -> None:
    model, start = new_model(), Start()
    fresh = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = quiet_trainer(DataDependentInit(50), start, limit_val_batches=1)
    trainer.validate(model, datamodule=digits(), verbose=False)
    assert same(start.state, fresh)


class Pairs(LightningDataModule):
    """A user's data: plain torch, shuffled, no loader for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.rand(60, 64, generator=generator)

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.inputs, torch.arange(60) % 10), 20, shuffle=True)


def test_data_of_ones_own(tmp_path: Path) -> None:
    data, start, expected = Pairs(), Start(), new_model()
    fit(new_model(), tmp_path, DataDependentInit(40), start, data=data)
    data_dependent_init(expected, data.inputs[:40])
    assert same(start.state, dict(expected.state_dict()))


def test_weights_that_were_trained_are_not_overwritten(tmp_path: Path) -> None:
    model = new_model()
    fit(model, tmp_path)
    trained = {k: v.clone() for k, v in model.state_dict().items()}
    message = r"DataDependentInit .*network\.1, network\.3"
    refuses(message, fit, model, tmp_path, DataDependentInit())
    assert same(dict(model.state_dict()), trained)


def test_what_cannot_be_done_is_told(tmp_path: Path) -> None:
    message = "looks for Linear and Conv2d layers with norm=WeightNorm"
    model = MLPClassifier(64, [8], norm=LayerNorm())
    refuses(message, fit, model, tmp_path, DataDependentInit())
    refuses(r"batch_size .*1", DataDependentInit, 1)
    trainer = quiet_trainer(DataDependentInit())
    message = "DataDependentInit .*train_dataloader.*none"
    refuses(message, trainer.fit, new_model(), Pairs().train_dataloader())
