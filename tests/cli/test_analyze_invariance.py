"""``ln-zoo analyze invariance``: what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from ln_zoo.analysis import eps_effect, invariance_table, random_inputs
from ln_zoo.cli import main
from ln_zoo.norms import LayerNorm, RMSNorm, WeightNorm

COMMAND = ["analyze", "invariance"]
#: A user's norm, beside the folder of the command.
MINE = """
from dataclasses import dataclass
from typing import ClassVar

from ln_zoo.norms import Norm


@dataclass(frozen=True)
class MaxNorm(Norm):
    eps: float = 1e-5
    invariances: ClassVar = frozenset({"weight_matrix_rescaling", "weight_matrix_recentering"})

    def normalize(self, site, a, step=None):
        return a / (a.square().amax(-1, keepdim=True) + self.eps).sqrt()


@dataclass(frozen=True)
class NeedsSize(Norm):
    size: int
"""


def test_the_table_and_the_picture(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("yes (yes)") == 4 + 2 + 4 + 3
    assert "eps 0, verdict without it" in " ".join(shown.split())
    assert 10_000 < (here / "invariance.png").stat().st_size < 150_000


@pytest.mark.parametrize("form", ["markdown", "latex", "csv"])
def test_formats_and_options(here: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--norm", "LayerNorm", "WeightNorm", "--eps", "0.001", "--examples", "5"]
    options += ["--inputs", "4", "--features", "3", "--factors", "2", "7"]
    options += ["--weight_scale", "0.1", "--seed", "3", "--out", "a/eps.svg", "--csv", "a/eps.csv"]
    assert main([*COMMAND, *options, "--format", form]) == 0
    table = invariance_table(
        [LayerNorm(), WeightNorm()], 0.001, random_inputs(5, 4, 3), 3, (2, 7), 0.1, 3
    )
    assert capsys.readouterr().out == getattr(table, form)() + "\n"
    drawn = (here / "a/eps.svg").read_text()
    assert "<!-- weights times 7 -->" in drawn
    with (here / "a/eps.csv").open() as file:
        rows = list(csv.DictReader(file))
    effects = eps_effect(
        LayerNorm(), 0.001, (2, 7), inputs=random_inputs(5, 4, 3), features=3, seed=3
    )
    found = [float(row["measured"]) for row in rows]
    wanted = [value for effect in effects for value in effect.measured.tolist()]
    assert found == pytest.approx(wanted, rel=1e-3)


def test_norms_as_shipped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--eps", "shipped", "--norm", "RMSNorm", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    cells = invariance_table([RMSNorm()], None).rows[0].cells
    assert [row["deviation"] for row in rows] == [f"{c.deviation:.4g}" for c in cells.values()]
    assert {row["eps"] for row in rows} == {"shipped"}


def test_a_norm_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "max_norms.py").write_text(MINE)
    assert main([*COMMAND, "--norm", "max_norms.MaxNorm", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["norm"] for row in rows} == {"MaxNorm"}
    found = {row["map"]: (row["invariant"], row["declared"], row["agrees"]) for row in rows}
    assert found["weight_matrix_rescaling"] == ("yes", "yes", "yes")
    assert found["weight_matrix_recentering"] == ("no", "yes", "no")
    assert found["example_rescaling"] == ("yes", "no", "no")
    assert found["dataset_recentering"] == ("no", "no", "yes")


def test_no_picture_of_norms_without_eps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--norm", "WeightNorm", "Identity", "--csv", "eps.csv"]) == 0
    said = capsys.readouterr()
    assert "yes (yes)" in said.out
    assert said.err.startswith("no invariance.png written\nWeightNorm() has no eps above 0")
    assert not list(here.iterdir())
