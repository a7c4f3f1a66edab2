"""Validation under batch-dependent norms: by running averages, and by batch statistics."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from cli_support import same
from lightning.pytorch import Callback
from torchmetrics import Metric
from training import mean_scores, quiet_trainer

from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier, SequenceClassifier
from ln_zoo.models.classifier import Classifier
from ln_zoo.norms import BatchNorm, Identity, LayerNorm, Norm, WeightNorm

digits = partial(Digits, batch_size=20, train_size=100, val_size=41, eval_batch_size=10)


def models() -> list[Classifier]:
    torch.manual_seed(0)
    return [
        MLPClassifier(64, [8], norm=BatchNorm()),
        SequenceClassifier(
            64, hidden_size=5, step_features=8, norm=BatchNorm(max_steps=8), initial_noise=0.0
        ),
    ]


@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_both_modes_are_logged(model: Classifier) -> None:
    data = digits()
    keys = list(model.state_dict())
    run = quiet_trainer(max_epochs=2)
    run.fit(model, datamodule=data)
    assert list(model.state_dict()) == keys
    logged = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val")}
    expected = {f"val_{k}": v for k, v in mean_scores(model, data.val_dataloader()).items()}
    # 41 images in batches of 10: the last one, alone, has no statistics and is left out.
    of_batches = mean_scores(model, data.val_dataloader(), True)
    expected |= {f"val_batch_{k}": v for k, v in of_batches.items()}
    assert logged == pytest.approx(expected, rel=1e-6)
    assert set(expected) == {f"val_{m}{name}" for m in ("", "batch_") for name in model.metrics}
    assert expected["val_nll"] != pytest.approx(expected["val_batch_nll"], rel=1e-4)
    # Metric objects, as the others are: several processes give the numbers of one.
    assert all(isinstance(getattr(model, name), Metric) for name in expected)


@pytest.mark.parametrize("norm", [BatchNorm(), LayerNorm()])
@pytest.mark.parametrize(("size", "measured"), [(1, False), (2, True)])
def test_batches_of_one_example_are_told(
    size: int, measured: bool, norm: Norm, recwarn: pytest.WarningsRecorder
) -> None:
    data = Digits(batch_size=20, train_size=100, val_size=11, eval_batch_size=size)
    run = quiet_trainer(max_epochs=2)
    run.fit(MLPClassifier(64, [8], norm=norm), datamodule=data)
    told = [str(w.message) for w in recwarn if "raise eval_batch_size" in str(w.message)]
    assert bool(told) is (norm == BatchNorm() and not measured)
    assert run.callback_metrics["val_nll"].isfinite()
    # If they were logged as NaN, `ln-zoo validate` would report that training diverged.
    assert ("val_batch_nll" in run.callback_metrics) is (norm == BatchNorm() and measured)


class Witness(Callback):
    def on_validation_start(self, trainer, pl_module) -> None:
        self.before = copy.deepcopy(pl_module.state_dict())

    def on_validation_end(self, trainer, pl_module) -> None:
        assert same(pl_module.state_dict(), self.before)
        assert not any(module.training for module in pl_module.modules())


@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_running_averages_and_training_are_untouched(model: Classifier) -> None:
    start = copy.deepcopy(model.state_dict())
    quiet_trainer(Witness(), max_epochs=2).fit(model, datamodule=digits())
    trained = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    quiet_trainer(max_epochs=2, limit_val_batches=0).fit(model, datamodule=digits())
    assert same(model.state_dict(), trained)


@pytest.mark.parametrize("norm", [LayerNorm(), WeightNorm(), Identity()])
def test_other_norms_have_one_mode(norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MLPClassifier(64, [8], norm=norm)
    batches, score = [], model.per_example
    monkeypatch.setattr(model, "per_example", lambda batch: batches.append(batch) or score(batch))
    run = quiet_trainer(max_epochs=2)
    run.validate(model, datamodule=digits(), verbose=False)
    assert not [name for name in run.callback_metrics if "batch" in name]
    assert len(batches) == 5
    assert not [name for name, _ in model.named_modules() if "batch" in name]


def test_one_trainer_after_another() -> None:
    model = MLPClassifier(64, [8], norm=BatchNorm())
    for _ in range(2):
        (logged,) = quiet_trainer().validate(model, datamodule=digits(), verbose=False)
        assert set(logged) == {"val_nll", "val_error", "val_batch_nll", "val_batch_error"}
    assert [name for name, m in model.named_modules() if isinstance(m, Metric)] == [
        "val_nll", "val_error", "test_nll", "test_error", "val_batch_nll", "val_batch_error",
    ]  # fmt: skip
    (tested,) = quiet_trainer().test(model, datamodule=digits(), verbose=False)
    assert set(tested) == {"test_nll", "test_error"}
