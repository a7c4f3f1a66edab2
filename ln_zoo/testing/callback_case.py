"""The contract of a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from ln_zoo.testing.argument_case import ArgumentCase


class CallbackCase(ArgumentCase):
    """Contract of a callback; pytest runs every check.

    A subclass implements `callback`, `model` and `data`. To omit a check, set it to ``None``.

    Attributes:
        stage: the stage in which it works: ``"fit"``, ``"test"`` or ``"predict"``.
        needs: whether it needs methods of the model or the data module.
    """

    stage: ClassVar[str] = "fit"
    needs: ClassVar[bool] = False

    def callback(self, **arguments: Any) -> Any:
        raise NotImplementedError

    def model(self) -> LightningModule:
        raise NotImplementedError

    def data(self) -> LightningDataModule:
        raise NotImplementedError

    def _made(self, **arguments: Any) -> Any:
        return self.callback(**arguments)

    def trainer(self, folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
        """A trainer of one epoch on the CPU that logs to a folder."""
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "logger": CSVLogger(folder),
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        return Trainer(**(quiet | options), callbacks=list(callbacks))

    def _run(self, folder: Path, callback: Callback, *others: Callback, **options: Any) -> Trainer:
        torch.default_generator.manual_seed(0)
        trainer = self.trainer(folder, callback, *others, **options)
        getattr(trainer, self.stage)(self.model(), datamodule=self.data())
        return trainer

    def test_training_is_unchanged(self, tmp_path: Path) -> None:
        if self.stage != "fit":
            pytest.skip(f"it works in {self.stage}")
        plain, watched = _Witness(), _Witness()
        self._run(tmp_path / "plain", plain)
        self._run(tmp_path / "watched", self.callback(), watched)
        assert plain.states.keys() == watched.states.keys()
        for step, state in plain.states.items():
            for name, value in state.items():
                assert torch.equal(value, watched.states[step][name]), (
                    f"{name} differs after update {step}: restore modes, buffers and random numbers"
                )

    def test_a_dry_run_writes_nothing(self, tmp_path: Path) -> None:
        self._run(tmp_path, self.callback(), fast_dev_run=1)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_runs_again(self, tmp_path: Path) -> None:
        callback = self.callback()
        written = []
        for _ in range(2):
            trainer = self._run(tmp_path, callback)
            found = sorted(path.name for path in Path(trainer.log_dir or "").rglob("*"))
            written.append(found)
            model = trainer.lightning_module
            assert not any(module._forward_hooks for module in model.modules())
        assert written[0] == written[1]

    def test_checkpoints_are_plain(self, tmp_path: Path) -> None:
        if self.stage != "fit":
            pytest.skip(f"it works in {self.stage}")
        callback = self.callback()
        keep = ModelCheckpoint(tmp_path, "kept", every_n_train_steps=1)
        self._run(tmp_path, callback, keep, enable_checkpointing=True)
        saved = torch.load(tmp_path / "kept.ckpt", weights_only=True)["callbacks"]
        if callback.state_key in saved:
            self.callback().load_state_dict(saved[callback.state_key])

    def test_an_unsuitable_model_is_refused_first(self, tmp_path: Path) -> None:
        if not self.needs:
            pytest.skip("it needs nothing of the model")
        trainer = self.trainer(tmp_path, self.callback())
        with pytest.raises(ValueError, match=type(self.callback()).__name__):
            getattr(trainer, self.stage)(_Bare(), datamodule=_BareData())
        assert trainer.global_step == 0


class _Witness(Callback):
    """Record the state of the model and of the random generator by update."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        assert pl_module.training
        self._keep(trainer, pl_module)

    def _keep(self, trainer: Trainer, module: LightningModule) -> None:
        state = {name: value.clone() for name, value in module.state_dict().items()}
        self.states[trainer.global_step] = state | {"random numbers": torch.get_rng_state()}


class _Bare(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.line(batch).sum()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.line(batch)

    predict_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


class _BareData(LightningDataModule):
    def train_dataloader(self) -> list[Tensor]:
        return [torch.ones(1, 1)]

    test_dataloader = predict_dataloader = train_dataloader
