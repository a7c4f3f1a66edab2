"""``ln-zoo analyze dynamics``: what it measures, prints and writes, and how it fails."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from cli_support import fails

from ln_zoo.analysis import dynamics_table, initial_dynamics
from ln_zoo.cli import main
from ln_zoo.norms import LayerNorm, WeightNorm

COMMAND = ["analyze", "dynamics"]
SMALL = ["--steps", "12", "--hidden", "5", "--features", "4", "--batch", "3"]
PNG = b"\x89PNG"


def test_untrained_layers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cell", "LSTM", "GRU", "--norm", "LayerNorm", "WeightNorm", "--gains", "0.5", "2"]
    files = ["--out", "a/dynamics.png", "--csv", "a/dynamics.csv"]
    more = ["--start", "identity", "--exponents", "2", "--skip", "3", "--seed", "4", "--noise", "1"]
    more += ["--recurrent_scale", "3"]
    assert main([*COMMAND, *SMALL, *options, *files, *more]) == 0
    title, _, *table = capsys.readouterr().out.splitlines()
    assert title == (
        "H = 5, 4 standard normal inputs per step, identity weights, recurrent ones times 3, "
        "3 sequences, 12 steps"
    )
    inputs = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    wanted = [
        each
        for cell in ("LSTM", "GRU")
        for each in initial_dynamics(
            inputs, cell, 5, [LayerNorm, WeightNorm], (0.5, 2.0), "identity", 3.0, 1.0, 2, 3, 4
        )
    ]
    assert table == dynamics_table(wanted).splitlines()
    assert len(table) == 2 + 8
    assert (here / "a/dynamics.png").read_bytes().startswith(PNG)
    with (here / "a/dynamics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 * 12
    last = wanted[-1]
    assert rows[-1]["layer"] == "WeightNorm 2"
    assert rows[-1]["gradient_norm"] == f"{float(last.gradients[-1]):.4g}"


def test_all_cells_norms_and_gains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *SMALL, "--csv", "dynamics.csv"]) == 0
    title, _, _, _, *table = capsys.readouterr().out.splitlines()
    wanted = "H = 5, 4 standard normal inputs per step, torch weights, 3 sequences, 12 steps"
    assert title == wanted
    gains = ("0.1", "0.5", "1")
    wanted = [
        f"{cell} {name}"
        for cell in ("LSTM", "GRU", "RNN")
        for name in (
            *(f"{norm} {gain}" for norm in ("LayerNorm", "RMSNorm") for gain in gains),
            *(f"{norm} {gain}" for norm in ("BatchNorm", "WeightNorm") for gain in gains),
            "Identity",
        )
    ]
    rows = {row.split("|")[1].strip(): row.split("|") for row in table}
    assert list(rows) == wanted
    assert "nan" not in "".join(table)
    # Sequences are systems of their own, but under batch norm.
    for name, row in rows.items():
        assert (" to " in row[3]) == ("BatchNorm" not in name)
    inputs = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Numbers of the other cells: above.
    by_name = {
        row.split("|")[1].strip(): row.split("|")
        for row in dynamics_table(list(initial_dynamics(inputs, "RNN", 5))).splitlines()[2:]
    }
    assert len(by_name) == 13
    assert all(rows[name] == row for name, row in by_name.items())
    with (here / "dynamics.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 39 * 12
    assert (here / "dynamics.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--norm LayrNorm", "'LayrNorm' 'LayerNorm'"),
        ("--steps 1", "--steps 2 1"),
        ("--noise nan", "--noise nan"),
        ("--gains 1 nan", "--gains nan"),
        ("--recurrent_scale -1", "--recurrent_scale -1"),
        ("--statistics batch", "--statistics --weights"),
        ("--exponents 11 --cell LSTM", "10"),
        ("--skip 12", "skip 12"),
        ("--weights no-such-model --start torch", "--start --hidden --features"),
    ],
)
def test_wrong_values(here: Path, given: str, says: str) -> None:
    fails(*COMMAND, *SMALL, *given.split(), code=1, says=says.split())
    assert not list(here.glob("*.png"))
