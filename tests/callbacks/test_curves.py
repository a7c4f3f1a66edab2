"""The picture of a run, and its curves when it is resumed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
import torch
from cli_support import rows_of
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from training import logged_trainer, quiet_trainer

from ln_zoo.callbacks import (
    CurvesInCheckpoint,
    CurvesPlot,
    EpochEvaluation,
    LastCheckpoint,
    StepEvaluation,
)
from ln_zoo.data import Digits
from ln_zoo.models import MLPClassifier
from ln_zoo.plots.csv_log import read_curves
from ln_zoo.plots.curves import plot_curves

METRICS = """epoch,epoch_seconds,epoch_train_nll,step,train_loss,val_error,val_nll
0,,,9,0.7,,
0,,,19,0.5,,
0,,,20,,0.2,0.6
0,1.5,0.4,20,,,
1,,,41,,0.1,0.3
1,1.4,0.2,41,,,
"""


def test_reads_each_curve_against_the_update(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(METRICS)
    assert read_curves(tmp_path / "metrics.csv") == {
        "train_loss": ([9, 19], [0.7, 0.5]),
        "val_error": ([20, 41], [0.2, 0.1]),
        "val_nll": ([20, 41], [0.6, 0.3]),
        "epoch_seconds": ([20, 41], [1.5, 1.4]),
        "epoch_train_nll": ([20, 41], [0.4, 0.2]),
    }


def drawn(tmp_path: Path, text: str) -> np.ndarray:
    (tmp_path / "metrics.csv").write_text(text)
    plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    return matplotlib.image.imread(tmp_path / "curves.png")[..., :3]


def has(picture: np.ndarray, colour: str) -> bool:
    wanted = np.array(matplotlib.colors.to_rgb(colour))
    return bool((np.abs(picture - wanted).max(-1) < 0.02).sum() > 50)


#: Nats per point and per sequence are apart.
NATS = """epoch,step,train_point_nll,val_point_nll,val_sequence_nll
0,1,0.5,0.6,-300
0,9,-0.5,-0.4,-900
"""
ZERO = "epoch,step,val_nll\n0,1,0.5\n1,2,0.0\n"
#: What a user logs of weights is drawn; what has a picture of its own is left out.
WEIGHTS = """epoch,step,weights/decay,weights/a/norm_mean,weights/a/norm_q50
0,1,0.5,3,3
0,9,0.7,4,4
"""


@pytest.mark.parametrize(
    ("text", "colours", "panels"),
    [
        # epoch_train is the first set, train the second (faint), val the third. No set of seconds.
        (METRICS, ("C0", "C2", "C3"), [[True, True, False], [False, True, False]]),
        (NATS, ("C0", "C1"), [[True, True], [False, True]]),
        (ZERO, ("C0",), [[True]]),
        (WEIGHTS, ("C0",), [[True]]),
    ],
    ids=["kinds", "nats", "zero", "weights"],
)
def test_a_panel_for_each_kind_and_a_colour_for_each_set(
    tmp_path: Path, text: str, colours: tuple[str, ...], panels: list[list[bool]]
) -> None:
    picture = drawn(tmp_path, text)
    height, width, _ = picture.shape
    assert width < 2 * height * len(panels)
    parts = np.split(picture, len(panels), axis=1)
    assert [[has(part, colour) for colour in colours] for part in parts] == panels


def test_batch_statistics_are_dashed_in_the_colour_of_their_set(tmp_path: Path) -> None:
    lines = "epoch,step,val_nll,val_batch_nll\n" + "".join(f"0,{t},0.5,0.8\n" for t in (1, 9))
    picture = drawn(tmp_path, lines)
    assert has(picture, "C0")
    assert not has(picture, "C1")

    def longest(half: np.ndarray) -> int:
        coloured = np.abs(half - np.array(matplotlib.colors.to_rgb("C0"))).max(-1) < 0.1
        rows = ["".join("x" if pixel else " " for pixel in row).split() for row in coloured]
        return max(len(run) for row in rows for run in row)

    upper, lower = np.split(picture, 2)
    assert longest(lower) > 10 * longest(upper)


@pytest.mark.parametrize("names", ["epoch_seconds", "weights/a/norm_mean"])
def test_nothing_to_draw(tmp_path: Path, names: str) -> None:
    """Neither seconds nor what has a picture of its own."""
    (tmp_path / "metrics.csv").write_text(f"epoch,step,{names}\n0,1,0.5\n")
    assert not plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


class Stops(MLPClassifier):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise KeyError("no more")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cls", [MLPClassifier, Stops])
def test_drawn_when_training_ends_one_way_or_the_other(tmp_path: Path, cls: type) -> None:
    callback = CurvesPlot()
    trainer = logged_trainer(tmp_path, callback, max_epochs=2)
    data = Digits(batch_size=20, train_size=100)
    with pytest.raises(KeyError) if cls is Stops else contextlib.nullcontext():
        trainer.fit(cls(64, [8]), datamodule=data)
    assert callback.written == tmp_path / "run/version_0/curves.png"
    assert callback.written.is_file()
    steps, _ = read_curves(callback.written.with_name("metrics.csv"))["train_loss"]
    assert steps == list(range(5 if cls is Stops else 10))


# In the checkpoint: curves of a resumed run are those of one that was never interrupted


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


def test_a_run_without_a_table_draws_and_keeps_none(tmp_path: Path) -> None:
    plot = CurvesPlot()
    callbacks = plot, CurvesInCheckpoint(), LastCheckpoint()
    trainer = quiet_trainer(*callbacks, max_epochs=1, default_root_dir=tmp_path)
    data = Digits(batch_size=20, train_size=40, val_size=20)
    trainer.fit(MLPClassifier(64, [4]), data)
    assert plot.written is None
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert "metrics_csv" not in torch.load(checkpoint, weights_only=True)
    trainer.fit(MLPClassifier(64, [4]), data, ckpt_path=checkpoint, weights_only=True)
