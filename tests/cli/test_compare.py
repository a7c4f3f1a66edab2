"""`ln-zoo compare`: the picture, the table and the refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from ln_zoo.cli import main
from ln_zoo.cli.compare import groups, read_run, spread

METRICS = ["epoch_train_nll", "epoch_test_error"]


def write_run(folder: Path, values: list[float]) -> Path:
    """A run as Lightning logs it: rows of updates between the rows that end an epoch."""
    folder.mkdir(parents=True)
    lines = ["epoch,step,train_loss,epoch_train_nll,epoch_test_error"]
    for epoch, value in enumerate(values):
        lines += [f"{epoch},{9 + 10 * epoch},0.5,,", f"{epoch},{10 + 10 * epoch},,{value},0.02"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_spread_over_runs_of_a_label(tmp_path: Path) -> None:
    seeds = [[0.1, 0.04], [0.2, 0.01], [0.6, 0.02, 0.001]]
    folders = [write_run(tmp_path / f"a/version_{i}", v) for i, v in enumerate(seeds)]
    runs = [read_run(f"LN={folder}", METRICS) for folder in folders]
    assert list(groups(runs)) == ["LN"]
    # Epochs count from 1, and end where the shortest run does.
    assert spread(runs, "epoch_train_nll") == [(1, 0.2, 0.1, 0.6), (2, 0.02, 0.01, 0.04)]


def test_writes_picture_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(tmp_path / f"m/version_{i}", [0.1, 0.05]) for i in range(2))
    picture, table = tmp_path / "out/curves.png", tmp_path / "out/curves.csv"
    command = ["compare", f"LN={one}", f"LN={two}", str(two), "--out", str(picture)]
    assert main([*command, "--csv", str(table)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "| LN | 2 | 2 | 0.05 (0.05 to 0.05) | 0.02 (0.02 to 0.02) |" in printed
    assert "| m | 1 | 2 |" in printed
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert rows[3] == {
        "label": "LN",
        "run": "1",
        "epoch": "2",
        "epoch_train_nll": "0.05",
        "epoch_test_error": "0.02",
    }


def test_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "none")]) == 1
    assert "is no run: there is no" in capsys.readouterr().err
    run = write_run(tmp_path / "a/version_0", [0.1])
    assert main(["compare", str(run), "--metric", "val_nll"]) == 1
    assert "has no 'val_nll'; it has epoch_test_error" in capsys.readouterr().err
