"""Runs of training are counted by the model, whatever saves it and whatever ends them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from training import quiet_trainer

from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.models.base import runs_of_checkpoint

DIGITS = {"dataset": "digits", "train_size": 100, "batch_size": 20}

digits = partial(Digits, batch_size=20, train_size=100, val_size=20)
trainer = partial(quiet_trainer, max_epochs=2)
model = partial(MLPClassifier, 64, [8])


def kept(path: Path) -> tuple[Any, ...]:
    return runs_of_checkpoint(torch.load(path, weights_only=True))


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_says_how_long_it_was_trained(tmp_path: Path, weights_only: bool) -> None:
    mine, ours = model(), trainer()
    assert mine.training_runs == ()
    ours.fit(mine, digits())
    assert mine.training_runs == (DIGITS | {"epochs": 2, "steps": 10},)
    ours.save_checkpoint(tmp_path / "it.ckpt", weights_only=weights_only)
    assert kept(tmp_path / "it.ckpt") == mine.training_runs
    again = MLPClassifier.load_from_checkpoint(tmp_path / "it.ckpt", map_location="cpu")
    assert again.training_runs == mine.training_runs
    # A run of its own from there.
    trainer(max_epochs=1).fit(again, digits())
    assert again.training_runs == (*mine.training_runs, DIGITS | {"epochs": 1, "steps": 5})


def test_an_epoch_counts_once_its_last_batch_is_done(tmp_path: Path) -> None:
    class Inside(ModelCheckpoint):
        """Keeps one after every batch, those at the end of an epoch before its validation."""

    every = Inside(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer(every).fit(model(), digits())
    for step in range(1, 11):
        (run,) = kept(tmp_path / f"step={step}.ckpt")
        assert (run["epochs"], run["steps"]) == (step // 5, step)
    # The checkpoint of a validation has its epoch.
    best = ModelCheckpoint(tmp_path, monitor="val_nll", mode="min")
    trainer(best, max_epochs=1).fit(model(), digits())
    assert kept(Path(best.best_model_path)) == (DIGITS | {"epochs": 1, "steps": 5},)


@pytest.mark.parametrize(
    ("limits", "counted"),
    [
        ({"max_steps": 7, "max_epochs": -1}, {"epochs": 1, "steps": 7}),
        ({"limit_train_batches": 2}, {"epochs": 0, "steps": 4}),
        ({"accumulate_grad_batches": 5}, {"batch_size": 100, "epochs": 2, "steps": 2}),
    ],
)
def test_whole_epochs_and_updates_count(limits: dict[str, Any], counted: dict[str, int]) -> None:
    mine = model()
    trainer(**limits).fit(mine, digits())
    assert mine.training_runs == (DIGITS | counted,)


def test_resuming_goes_on_with_the_run(tmp_path: Path) -> None:
    ours = trainer(max_steps=7, max_epochs=-1)
    ours.fit(model(), digits())
    ours.save_checkpoint(tmp_path / "seven.ckpt")
    same, other = model(), model()
    trainer(max_epochs=3).fit(same, digits(), ckpt_path=tmp_path / "seven.ckpt")
    (run,) = same.training_runs
    assert run == DIGITS | {"epochs": run["steps"] // 5, "steps": run["steps"]}
    # Batches of another size are a run of its own, whose epochs have 10 updates.
    ended = trainer(max_epochs=4)
    ended.fit(other, digits(batch_size=10), ckpt_path=tmp_path / "seven.ckpt")
    first, second = other.training_runs
    assert first == DIGITS | {"epochs": 1, "steps": 7}
    assert second["batch_size"] == 10
    assert first["steps"] + second["steps"] == ended.global_step
    assert second["epochs"] == second["steps"] // 10
    # And so it is when that is resumed.
    ended.save_checkpoint(tmp_path / "more.ckpt")
    third = trainer(max_epochs=5)
    third.fit(other, digits(batch_size=10), ckpt_path=tmp_path / "more.ckpt")
    assert sum(run["steps"] for run in other.training_runs) == third.global_step
    assert len(other.training_runs) == 2


def test_runs_that_cannot_be_known_are_unknown(tmp_path: Path) -> None:
    ours = trainer()
    ours.fit(model(), digits())
    ours.save_checkpoint(tmp_path / "it.ckpt")
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    before = ({"batches": None}, {"batches": 0, "steps": 0})
    for damaged in (None, [], {"runs": 3}, *({"runs": [3], "before": each} for each in before)):
        torch.save(checkpoint | {"training_runs": damaged}, tmp_path / "odd.ckpt")
        mine = MLPClassifier.load_from_checkpoint(tmp_path / "odd.ckpt", map_location="cpu")
        assert mine.training_runs == ({},)
        trainer(max_epochs=3).fit(mine, digits(), ckpt_path=tmp_path / "odd.ckpt")
        assert mine.training_runs == ({}, DIGITS | {"epochs": 1, "steps": 5})


def test_subclasses_and_data_of_the_user() -> None:
    class Quiet(MLPClassifier):
        def on_train_start(self) -> None:
            """Without ours."""

    class Mine(LightningDataModule):
        facts = None

        def train_dataloader(self) -> DataLoader:
            return DataLoader([(torch.zeros(1, 8, 8), 0)] * 4, batch_size=2)

    quiet, mine, loaders = Quiet(64, [8]), model(), model()
    trainer().fit(quiet, digits())
    assert quiet.training_runs == ({},)
    trainer().fit(mine, Mine())
    assert mine.training_runs == ({"dataset": "Mine", "epochs": 2, "steps": 4},)
    trainer().fit(loaders, Mine().train_dataloader())
    assert loaders.training_runs == ({"epochs": 2, "steps": 4},)
