"""What files say of runs of training, and what numbers it makes comparable."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningDataModule

from ln_zoo.utils import training_runs
from ln_zoo.zoo.reported import comparison, run_size

MNIST = {"dataset": "mnist", "train_size": 50_000, "batch_size": 100, "epochs": 10, "steps": 5000}
PIXELS = {"hidden_size": 100, "step_features": 1, "permuted": True}


@pytest.mark.parametrize(
    "stored",
    [
        None, "runs", 3, {}, {"runs": []}, [MNIST] * 101,
        *([MNIST | {key: value}] for key in ("epochs", "steps", "train_size", "batch_size")
          for value in (-1, True, 1.5, "3", float("nan"), 2**60, [3])),
        *([MNIST | {key: value}] for key in ("dataset", "weights")
          for value in (3, ["mnist"], "a\nb", "\x1b[2J", "\u202ex", "x" * 301)),
        ["mnist"], [[MNIST]], [None],
    ],
)  # fmt: skip
def test_damaged_runs_are_unknown(stored: Any) -> None:
    assert training_runs.read_runs(stored) == ({},)


def test_runs_are_read_as_they_were_written() -> None:
    runs = ({**MNIST, "weights": "mlp.none"}, MNIST)
    assert training_runs.read_runs([dict(run) for run in runs]) == runs
    # No key of a file reaches a table but ours.
    assert training_runs.read_run(MNIST | {"value": 0.1, "hidden_size": 400}) == MNIST


@pytest.mark.parametrize("metadata", [None, 3, ["dataset"], {"dataset": 3}, {}, lambda self: {}])
def test_data_modules_that_say_something_else(metadata: Any) -> None:
    data = type("Mine", (LightningDataModule,), {"metadata": metadata})()
    assert training_runs.dataset_metadata(data) == {"dataset": "Mine"}


def pixels(*runs: Any) -> list[str]:
    """What ``ln-zoo test`` says beside the number for LN-LSTM on permuted pixels."""
    size = run_size(PIXELS, {"dataset": "mnist", "batch_size": 1000}, runs)
    rows = comparison("SequenceClassifier", "BatchNorm", {"accuracy": 0.95}, data="mnist/test",
                      size=size)  # fmt: skip
    return [row.outcome for row in rows]


def test_the_whole_training_is_compared() -> None:
    assert pixels(MNIST) == ["0.4 points behind at 10 of 200 epochs"]
    assert pixels(MNIST, MNIST) == ["0.4 points behind at 20 of 200 epochs"]
    others = {
        "training_data digits, mnist here, MNIST there": (MNIST | {"dataset": "digits"}, MNIST),
        "training_data unknown, mnist here": ({}, MNIST),
        "training_data nothing here": (),
        "epochs not stated here": (MNIST | {"train_size": 1000}, MNIST),
    }
    for said, runs in others.items():
        (found,) = set(pixels(*runs))
        assert said in found, found
