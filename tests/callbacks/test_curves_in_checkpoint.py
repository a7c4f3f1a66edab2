"""`CurvesInCheckpoint`: the curves of a resumed run are those of one that was never interrupted."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from cli_support import rows_of
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from training import quiet_trainer

from ln_zoo.callbacks import CurvesInCheckpoint, EpochEvaluation, LastCheckpoint, StepEvaluation
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier


def fit(folder: Path, *callbacks: Callback, resume: Path | None = None) -> None:
    """Three epochs of 5 updates; a checkpoint after every third update and every epoch."""
    seed_everything(0, verbose=False)
    within = ModelCheckpoint(filename="at-{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        *(EpochEvaluation(), StepEvaluation(3, 50), CurvesInCheckpoint(), *callbacks),
        *(within, LastCheckpoint()),
        max_epochs=3, log_every_n_steps=2, logger=CSVLogger(folder, name="", version=""),
    )  # fmt: skip
    data = Digits(batch_size=20, train_size=100, val_size=20)
    trainer.fit(MLPClassifier(64, [4]), data, ckpt_path=resume, weights_only=True)


def table(folder: Path) -> list[dict[str, str]]:
    rows = rows_of(folder / "metrics.csv")
    return [{k: v for k, v in row.items() if not k.endswith("_seconds")} for row in rows]


def test_a_resumed_run_has_the_curves_of_an_uninterrupted_one(tmp_path: Path) -> None:
    fit(tmp_path / "whole")
    expected = table(tmp_path / "whole")
    assert {"train_loss", "val_nll", "epoch_test_error", "step_train_nll"} <= expected[0].keys()
    for step in (6, 12):
        checkpoint = tmp_path / f"whole/checkpoints/at-step={step}.ckpt"
        fit(tmp_path / checkpoint.stem, resume=checkpoint)
        assert table(tmp_path / checkpoint.stem) == expected, checkpoint.stem


def test_the_rows_of_an_epoch_are_in_its_checkpoint_before_they_are_logged(tmp_path: Path) -> None:
    class Killed(Callback):
        """Ends the process, as far as it can be ended here, when the second epoch was saved."""

        def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
            if trainer.current_epoch == 2:
                # Whatever was logged since then is lost, with all that a new header tears apart.
                (tmp_path / "whole/metrics.csv").write_text("epoch,st")
                raise KeyboardInterrupt

    fit(tmp_path / "expected")
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        fit(tmp_path / "whole", Killed())
    checkpoint = tmp_path / "whole/checkpoints/last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 10
    # Into the same folder, where Lightning deletes the table that it finds.
    fit(tmp_path / "whole", resume=checkpoint)
    assert table(tmp_path / "whole") == table(tmp_path / "expected")


def test_a_run_without_a_table_keeps_none(tmp_path: Path) -> None:
    callbacks = CurvesInCheckpoint(), LastCheckpoint()
    trainer = quiet_trainer(*callbacks, max_epochs=1, default_root_dir=tmp_path)
    data = Digits(batch_size=20, train_size=40, val_size=20)
    trainer.fit(MLPClassifier(64, [4]), data)
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert "metrics_csv" not in torch.load(checkpoint, weights_only=True)
    trainer.fit(MLPClassifier(64, [4]), data, ckpt_path=checkpoint, weights_only=True)
