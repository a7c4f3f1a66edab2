"""The picture of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger
from training import quiet_trainer

from ln_zoo.callbacks import CurvesPlot
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


def test_a_panel_for_each_kind_and_a_colour_for_each_set(tmp_path: Path) -> None:
    picture = drawn(tmp_path, METRICS)
    nll, error = np.split(picture, 2, axis=1)
    # epoch_train is the first set, train the second (faint), val the third. No set of seconds.
    assert has(nll, "C0")
    assert has(nll, "C2")
    assert has(error, "C2")
    assert not has(error, "C0")
    assert not has(picture, "C3")


def test_batch_statistics_are_dashed_in_the_colour_of_their_set(tmp_path: Path) -> None:
    lines = "epoch,step,val_nll,val_batch_nll\n" + "".join(f"0,{t},0.5,0.8\n" for t in (1, 9))
    picture = drawn(tmp_path, lines)
    assert has(picture, "C0")
    assert not has(picture, "C1")

    def longest(half: np.ndarray) -> int:
        """The longest run of coloured pixels in a row."""
        coloured = np.abs(half - np.array(matplotlib.colors.to_rgb("C0"))).max(-1) < 0.1
        rows = ["".join("x" if pixel else " " for pixel in row).split() for row in coloured]
        return max(len(run) for row in rows for run in row)

    upper, lower = np.split(picture, 2)
    assert longest(lower) > 10 * longest(upper)


def test_nats_per_point_and_per_sequence_are_apart(tmp_path: Path) -> None:
    head = "epoch,step,train_point_nll,val_point_nll,val_sequence_nll\n"
    picture = drawn(tmp_path, head + "0,1,0.5,0.6,-300\n0,9,-0.5,-0.4,-900\n")
    points, sequences = np.split(picture, 2, axis=1)
    assert has(points, "C0")
    assert has(points, "C1")
    assert has(sequences, "C1")
    assert not has(sequences, "C0")


def test_zero_can_be_drawn(tmp_path: Path) -> None:
    picture = drawn(tmp_path, "epoch,step,val_nll\n0,1,0.5\n1,2,0.0\n")
    assert has(picture, "C0")


def test_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("epoch,step,epoch_seconds\n0,1,0.5\n")
    assert not plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_what_a_user_logs_of_weights_is_drawn(tmp_path: Path) -> None:
    """Only what has a picture of its own is left out."""
    head = "epoch,step,weights/decay,weights/a/norm_mean,weights/a/norm_q50\n"
    picture = drawn(tmp_path, head + "0,1,0.5,3,3\n0,9,0.7,4,4\n")
    height, width, _ = picture.shape
    assert width < 2 * height  # one panel
    assert has(picture, "C0")
    (tmp_path / "curves.png").unlink()
    (tmp_path / "metrics.csv").write_text("epoch,step,weights/a/norm_mean\n0,1,3\n")
    assert not plot_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")


class Stops(MLPClassifier):
    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            raise KeyError("no more")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cls", [MLPClassifier, Stops])
def test_drawn_when_training_ends_one_way_or_the_other(tmp_path: Path, cls: type) -> None:
    callback = CurvesPlot()
    logger = CSVLogger(tmp_path, "run")
    trainer = quiet_trainer(callback, max_epochs=2, logger=logger, log_every_n_steps=1)
    data = Digits(batch_size=20, train_size=100)
    with pytest.raises(KeyError) if cls is Stops else contextlib.nullcontext():
        trainer.fit(cls(64, [8]), datamodule=data)
    assert callback.written == tmp_path / "run/version_0/curves.png"
    assert callback.written.is_file()
    steps, _ = read_curves(callback.written.with_name("metrics.csv"))["train_loss"]
    assert steps == list(range(5 if cls is Stops else 10))


def test_does_nothing_without_the_file(tmp_path: Path) -> None:
    callback = CurvesPlot()
    quiet_trainer(callback, max_epochs=1).fit(
        MLPClassifier(64, [8]), datamodule=Digits(batch_size=50, train_size=100)
    )
    assert callback.written is None
