"""Whole-set curves: the numbers of the whole sets, and nothing of the training is touched."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from refusals import refuses
from training import mean_scores, quiet_trainer

from ln_zoo.callbacks import EpochEvaluation
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.norms import BatchNorm, LayerNorm, Norm
from ln_zoo.testing import CallbackCase


class Witness(Callback):
    """Keeps what was logged."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        assert all(module.training for module in pl_module.network.modules())
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def fit(
    norm: Norm, callback: EpochEvaluation, epochs: int = 2, precision: str = "32-true", **sizes: int
):
    data = Digits(**{"batch_size": 20, "train_size": 101, "eval_batch_size": 5, **sizes})
    torch.manual_seed(0)
    model = MLPClassifier(64, [8], norm=norm)
    witness = Witness()
    trainer = quiet_trainer(callback, witness, max_epochs=epochs, precision=precision)
    trainer.fit(model, datamodule=data)
    return model, data, witness


@pytest.mark.parametrize(("precision", "rounding"), [("32-true", 1e-6), ("64-true", 1e-7)])
def test_scores_are_those_of_the_whole_sets(precision: str, rounding: float) -> None:
    """Batches are converted as Lightning's own loops convert them; float32 is what is logged."""
    model, data, witness = fit(BatchNorm(), EpochEvaluation(), precision=precision)
    last, dtype = witness.logged[-1], torch.float64 if precision == "64-true" else torch.float32
    model = model.to(dtype)
    train, test = (
        [(images.to(dtype), labels) for images, labels in loader]
        for loader in (data.train_eval_dataloader(), data.test_dataloader())
    )
    for prefix, expected in {
        "epoch_train": mean_scores(model, train),
        # 101 images in batches of 5: the last one, alone, has no variance and is left out.
        "epoch_train_batch": mean_scores(model, train, train=True),
        "epoch_test": mean_scores(model, test),
    }.items():
        for name, value in expected.items():
            assert last[f"{prefix}_{name}"] == pytest.approx(value, rel=rounding)
    # Statistics of five examples are not those of the set.
    assert last["epoch_train_nll"] != pytest.approx(last["epoch_train_batch_nll"], rel=1e-2)
    assert last["epoch_seconds"] > 0


@pytest.mark.filterwarnings("ignore:no validation batch has 2 examples")
@pytest.mark.parametrize(
    ("norm", "sizes"),
    [(LayerNorm(), {}), (BatchNorm(), {"train_size": 20, "eval_batch_size": 1})],
    ids=["no mixing", "batches of one"],
)
def test_batch_statistics_are_scored_only_where_examples_mix(
    norm: Norm, sizes: dict[str, int]
) -> None:
    _, _, witness = fit(norm, EpochEvaluation(), epochs=1, **sizes)
    scored = [name for name in witness.logged[0] if name.startswith("epoch")]
    assert not [name for name in scored if "batch" in name]
    assert "epoch_train_nll" in witness.logged[0]


def test_modes_differ_from_module_to_module() -> None:
    modes: list[bool] = []

    def note(_: Trainer, model: MLPClassifier) -> None:
        modes.extend(module.training for module in model.network.modules())

    freeze = LambdaCallback(on_train_epoch_start=lambda _, model: model.network[1].eval())
    callbacks = freeze, EpochEvaluation(), LambdaCallback(on_train_epoch_end=note)
    model = MLPClassifier(64, [8], norm=BatchNorm())
    runner = quiet_trainer(*callbacks, max_epochs=1, limit_val_batches=0)
    runner.fit(model, datamodule=Digits(batch_size=50, train_size=100))
    frozen = {id(m) for m in model.network[1].modules()}
    assert modes == [id(m) not in frozen for m in model.network.modules()]


def test_sets_and_epochs() -> None:
    _, _, witness = fit(LayerNorm(), EpochEvaluation(sets=["test"], every_n_epochs=2), epochs=3)
    assert [("epoch_test_nll" in logged) for logged in witness.logged] == [False, True, True]
    assert witness.logged[2]["epoch_test_nll"] == witness.logged[1]["epoch_test_nll"]
    assert not [name for name in witness.logged[1] if name.startswith("epoch_train")]


class Shuffled(LightningDataModule):
    """A data module that gives its training set in no other order."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = Digits(batch_size=20, train_size=100)
        self.digits.setup()
        self.train_dataloader = self.digits.train_dataloader
        self.test_dataloader = self.digits.test_dataloader


def test_without_the_data_module_it_needs() -> None:
    """Told before the first update; for the sets that are scored, and no others."""

    def run(callback: EpochEvaluation, **given) -> Trainer:
        runner = quiet_trainer(callback, max_epochs=1)
        runs.append(runner)
        runner.fit(MLPClassifier(64, [8]), **given)
        return runner

    runs: list[Trainer] = []
    bare = {"train_dataloaders": Shuffled().train_dataloader()}
    both = "EpochEvaluation .*train_eval_dataloader and test_dataloader"
    refuses(f"{both}.*none", run, EpochEvaluation(), **bare)
    message = f"{both}.*Shuffled without train_eval_dataloader"
    refuses(message, run, EpochEvaluation(), datamodule=Shuffled())
    assert [runner.global_step for runner in runs] == [0, 0]
    scored = run(EpochEvaluation(["test"]), datamodule=Shuffled()).callback_metrics
    assert "epoch_test_nll" in scored
    assert run(EpochEvaluation([]), **bare).global_step == 5


class TestEpochEvaluation(CallbackCase):
    needs = True
    invalid: ClassVar[dict[str, Any]] = {"sets": (["valid"],), "every_n_epochs": (0, -1)}
    callback = EpochEvaluation
    model = staticmethod(partial(MLPClassifier, 64, [8], norm=BatchNorm()))
    data = staticmethod(partial(Digits, batch_size=20, train_size=100))
