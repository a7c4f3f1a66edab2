"""A loss that is not a number stops training before the weights take it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from refusals import refuses
from training import quiet_trainer

from ln_zoo.callbacks import FiniteLoss, NonFiniteLossError
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.testing import CallbackCase


class Bad(MLPClassifier):
    """A loss of the given value at one step."""

    def __init__(self, value: float, step: int) -> None:
        super().__init__(64, [8])
        self.value = value
        self.step = step

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.trainer.global_step == self.step else loss


def stops(message: str, model: MLPClassifier, folder: Path, *callbacks, **options) -> None:
    """Train until the loss is not finite."""
    trainer = quiet_trainer(*callbacks, **{"default_root_dir": folder, "max_epochs": 2} | options)
    data = Digits(batch_size=20, train_size=100)
    refuses(message, trainer.fit, model, datamodule=data, error=NonFiniteLossError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_stops_before_the_weights_take_it(tmp_path: Path, value: float) -> None:
    model = Bad(value, 3)
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    message = r"not finite at step 3 \(epoch 0\).*checkpoint is .*step=3.ckpt"
    stops(message, model, tmp_path, FiniteLoss(), keep)
    last = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]
    for name, parameter in model.state_dict().items():
        assert torch.isfinite(parameter).all()
        assert torch.equal(parameter, last[name])


def test_looks_seldom_if_asked_to_and_never_saves_in_between(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    seldom, message = FiniteLoss(every_n_steps=100), "not finite at step 4 "
    stops(message, Bad(float("nan"), 4), tmp_path, seldom, keep, max_epochs=3)
    assert sorted(p.name for p in tmp_path.glob("*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]

    model, seldom = Bad(float("nan"), 4), FiniteLoss(every_n_steps=8)
    stops(message, model, tmp_path, seldom, enable_checkpointing=False)
    assert model.trainer.global_step == 8


def test_names_the_newest_of_several_checkpoints(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", "best", monitor="val_error")
    steps = ModelCheckpoint(tmp_path / "steps", "{step}", every_n_train_steps=2)
    message = r"checkpoint is .*steps/step=8.ckpt\. Try"
    stops(message, Bad(float("nan"), 8), tmp_path, FiniteLoss(), best, steps)


class TestFiniteLoss(CallbackCase):
    invalid: ClassVar[dict[str, Any]] = {"every_n_steps": (0, -1)}
    callback = FiniteLoss
    model = staticmethod(partial(MLPClassifier, 64, [8]))
    data = staticmethod(partial(Digits, batch_size=20, train_size=100))
