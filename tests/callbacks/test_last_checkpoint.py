"""A run that is told to stop keeps the step it has come to, and goes on from there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_support import load, same
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from training import quiet_trainer

from ln_zoo.callbacks import EpochEvaluation, LastCheckpoint
from ln_zoo.callbacks.last_checkpoint import Interrupted
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import BatchNorm


class Sender(Callback):
    """Sends signals to its own process, in the middle of an update or of validation."""

    def __init__(self, step: int, *numbers: int, validation: bool = False) -> None:
        self.step, self.numbers, self.validation = step, numbers, validation

    def on_before_optimizer_step(self, trainer: Trainer, *_: object) -> None:
        self.send(not self.validation and trainer.global_step == self.step)

    def on_validation_start(self, trainer: Trainer, *_: object) -> None:
        self.send(self.validation and trainer.global_step >= self.step)

    def send(self, now: bool) -> None:
        for number in self.numbers if now else ():
            os.kill(os.getpid(), number)


def fit(folder: Path, *callbacks: Callback, resume: Path | None = None, **options: object) -> dict:
    """Ten batches an epoch, three epochs; the last checkpoint."""
    seed_everything(0, verbose=False)
    options = {"default_root_dir": folder, "max_epochs": 3, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(*callbacks, LastCheckpoint(), **options)
    data = Digits(batch_size=20, train_size=200, val_size=20)
    trainer.fit(MLPClassifier(64, [8], norm=BatchNorm()), datamodule=data, ckpt_path=resume)
    return newest(folder)


def newest(folder: Path) -> dict:
    return load(folder / "checkpoints/last.ckpt")


#: Last checkpoints of runs that nothing stopped, by their options.
WHOLE: dict[str, dict] = {}


@pytest.mark.parametrize(
    ("options", "sender", "code", "stopped_at"),
    [
        ({}, Sender(13, signal.SIGTERM), 143, 14),
        ({}, Sender(13, signal.SIGINT), 130, 14),
        ({}, Sender(13, signal.SIGTERM, signal.SIGTERM), 143, 14),
        # The last batch of an epoch: what is due at its end is done before.
        ({}, Sender(19, signal.SIGTERM), 143, 20),
        ({}, Sender(20, signal.SIGTERM, validation=True), 143, 20),
        ({}, Sender(29, signal.SIGTERM), 143, 30),
        # Four updates an epoch, of three batches each but the last.
        ({"accumulate_grad_batches": 3}, Sender(5, signal.SIGTERM), 143, 6),
        # Validation in the middle of an epoch.
        ({"val_check_interval": 4}, Sender(13, signal.SIGTERM), 143, 15),
        ({"val_check_interval": 4}, Sender(13, signal.SIGTERM, validation=True), 143, 15),
    ],
    ids=["term", "int", "twice", "last", "validation", "end", "accumulated", "due", "within"],
)
def test_goes_on_where_it_stopped(
    tmp_path: Path, options: dict, sender: Sender, code: int, stopped_at: int
) -> None:
    if str(options) not in WHOLE:
        WHOLE[str(options)] = fit(tmp_path / "whole", EpochEvaluation(), **options)
    whole = WHOLE[str(options)]
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted) as stopped:
        fit(tmp_path / "broken", EpochEvaluation(), sender, **options)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    written = tmp_path / "broken/checkpoints/last.ckpt"
    assert (stopped.value.code, stopped.value.checkpoint) == (code, written)
    assert stopped.value.on_all_processes
    assert newest(tmp_path / "broken")["global_step"] == stopped_at
    if stopped_at < whole["global_step"]:
        resumed = fit(tmp_path / "resumed", EpochEvaluation(), resume=written, **options)
        assert same(resumed, whole)


def test_the_best_checkpoint_is_kept_when_its_folder_was_moved(tmp_path: Path) -> None:
    """The first epoch is the best of all: loss is compared as if larger were better."""

    def best() -> ModelCheckpoint:
        return ModelCheckpoint(monitor="val_nll", mode="max")

    first = best()
    with pytest.raises(Interrupted):
        fit(tmp_path / "here", first, Sender(13, signal.SIGTERM))
    (tmp_path / "here").rename(tmp_path / "there")
    resumed = best()
    fit(tmp_path / "there", resumed, resume=tmp_path / "there/checkpoints/last.ckpt")
    assert resumed.best_model_score == first.best_model_score
    there = tmp_path / "there/checkpoints" / Path(first.best_model_path).name
    assert list(resumed.best_k_models) == [resumed.best_model_path] == [str(there)]
    assert [a.name for a in there.parent.glob("epoch*")] == [there.name]


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    twice = signal.SIGINT, signal.SIGINT
    with pytest.raises(Interrupted) as stopped:
        fit(tmp_path / "first", Sender(13, *twice))
    assert (stopped.value.code, stopped.value.on_all_processes) == (130, False)
    assert newest(tmp_path / "first")["global_step"] == 10
    # Before the first update of a resumed run.
    first = tmp_path / "first/checkpoints/last.ckpt"
    with pytest.raises(Interrupted) as stopped:
        fit(tmp_path / "second", Sender(10, *twice), resume=first)
    assert stopped.value.checkpoint == first
