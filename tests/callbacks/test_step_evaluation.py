"""Curves between epochs: numbers of the part that is scored, at the updates asked for."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cli_support import rows_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from training import Weights, mean_scores, quiet_trainer

from ln_zoo.callbacks import StepEvaluation
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import BatchNorm, LayerNorm, Norm
from ln_zoo.testing import CallbackCase


class Noisy(MLPClassifier):
    def forward(self, inputs):
        return super().forward(inputs + 0.1 * torch.randn_like(inputs))


data = partial(Digits, batch_size=20, train_size=100, eval_batch_size=7)


def trainer(folder: Path, *callbacks: Callback, **options) -> Trainer:
    logger = CSVLogger(folder, name="run", version=str(len(list(folder.glob("run/*")))))
    options = {"max_epochs": 2, "log_every_n_steps": 2, **options}
    return quiet_trainer(*callbacks, logger=logger, **options)


def make(norm: Norm, cls: type = MLPClassifier) -> MLPClassifier:
    torch.manual_seed(0)
    return cls(64, [8], norm=norm)


def logged(folder: Path, run: int = 0) -> dict[int, dict[str, float]]:
    rows = [row for row in rows_of(folder / f"run/{run}/metrics.csv") if row["step_train_nll"]]
    names = ("epoch", "step_train_nll", "step_train_error")
    scores = {int(row["step"]): {name: float(row[name]) for name in names} for row in rows}
    assert len(scores) == len(rows), "no update twice"
    return scores


def means(model: MLPClassifier, state: dict, batch: list[Tensor]) -> dict[str, float]:
    """Mean scores of weights, example by example in evaluation mode."""
    model.load_state_dict(state)
    return mean_scores(model, zip(*(part.split(1) for part in batch), strict=True))


@pytest.mark.parametrize("norm", [BatchNorm(), LayerNorm()])
def test_scores_are_those_of_the_first_examples(tmp_path: Path, norm: Norm) -> None:
    model, digits, weights = make(norm), data(), Weights()
    runner = trainer(tmp_path, weights, StepEvaluation(every_n_steps=4, examples=31))
    runner.fit(model, datamodule=digits)
    scores = logged(tmp_path)
    assert {step: row["epoch"] for step, row in scores.items()} == {0: 0, 4: 0, 8: 1}
    batch = [part[:31] for part in next(iter(digits.train_eval_dataloader(100)))]
    for step, row in scores.items():
        expected = means(model, weights.states[step], batch)
        for name in ("nll", "error"):
            assert row[f"step_train_{name}"] == pytest.approx(expected[name], rel=1e-6)


def test_validation_examples_and_early_steps(tmp_path: Path) -> None:
    model, digits, weights = make(LayerNorm()), data(), Weights()
    callback = StepEvaluation(every_n_steps=6, examples=13, validation=True, early=True)
    trainer(tmp_path, weights, callback).fit(model, datamodule=digits)
    assert list(logged(tmp_path)) == [0, 1, 2, 5, 6]
    logged_rows = rows_of(tmp_path / "run/0/metrics.csv")
    rows = {int(row["step"]): row for row in logged_rows if row["step_val_nll"]}
    batch = [part[:13] for part in next(iter(digits.val_eval_dataloader(100)))]
    assert list(rows) == [0, 1, 2, 5, 6]
    for step, row in rows.items():
        expected = means(model, weights.states[step], batch)["nll"]
        assert float(row["step_val_nll"]) == pytest.approx(expected, rel=1e-6)


def test_a_set_smaller_than_asked_for_is_scored_whole(tmp_path: Path) -> None:
    for examples in (10_000, 100):
        callback = StepEvaluation(every_n_steps=5, examples=examples)
        trainer(tmp_path, callback).fit(make(LayerNorm()), datamodule=data())
    assert logged(tmp_path, 0) == logged(tmp_path, 1)


def test_accumulated_batches_are_one_update(tmp_path: Path) -> None:
    callback = StepEvaluation(every_n_steps=2, examples=5)
    runner = trainer(tmp_path, callback, accumulate_grad_batches=2, max_epochs=3)
    runner.fit(make(LayerNorm()), datamodule=data())
    assert runner.global_step == 9
    assert list(logged(tmp_path)) == [0, 2, 4, 6, 8]


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """From the middle of an epoch; the update of the checkpoint was logged by the run before."""

    def fit(*callbacks: Callback, ckpt_path: Path | None = None, **options) -> None:
        runner = trainer(tmp_path, StepEvaluation(2, 20), *callbacks, **options)
        runner.fit(make(LayerNorm()), datamodule=data(), ckpt_path=ckpt_path)

    fit()
    saving = ModelCheckpoint(tmp_path, "half", every_n_train_steps=4, save_top_k=-1)
    fit(saving, max_epochs=1)
    fit(ckpt_path=tmp_path / "half.ckpt")
    expected, resumed = logged(tmp_path, 0), logged(tmp_path, 2)
    assert list(expected) == [0, 2, 4, 6, 8, 10]
    assert resumed == {step: expected[step] for step in (6, 8, 10)}


class Slow(MLPClassifier):
    """Moves a clock on: by a second for an update, by ten for what is no training."""

    clock = 0.0

    def training_step(self, batch, batch_idx):
        Slow.clock += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        Slow.clock += 10

    def per_example(self, batch):
        Slow.clock += 10
        return super().per_example(batch)


def test_seconds_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: Slow.clock)

    def seconds(*callbacks: Callback, ckpt_path: Path | None = None) -> list[float]:
        run = len(list(tmp_path.glob("run/*")))
        options: dict = {"limit_val_batches": 1, "num_sanity_val_steps": 1, "val_check_interval": 2}
        callback = StepEvaluation(every_n_steps=2, examples=5)
        runner = trainer(tmp_path, callback, *callbacks, **options)
        runner.fit(make(LayerNorm(), Slow), datamodule=data(), ckpt_path=ckpt_path)
        rows = rows_of(tmp_path / f"run/{run}/metrics.csv")
        return [float(row["step_seconds"]) for row in rows if row["step_seconds"]]

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    assert seconds(saving) == [0, 2, 4, 6, 8, 10]
    assert seconds(ckpt_path=tmp_path / "step=4.ckpt") == [6, 8, 10]


class TestStepEvaluation(CallbackCase):
    needs = True
    invalid: ClassVar[dict[str, Any]] = dict.fromkeys(("every_n_steps", "examples"), (0, -1))
    callback = staticmethod(partial(StepEvaluation, every_n_steps=1, examples=30))
    model = staticmethod(partial(make, BatchNorm(), Noisy))
    data = staticmethod(data)
