"""``ln-zoo analyze fisher``: what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from ln_zoo import analysis
from ln_zoo.analysis import FisherStudy, study_fisher
from ln_zoo.cli import main

SMALL = ("--units", "3", "--features", "2", "--examples", "50", "--draws", "5000", "--seed", "3")


@pytest.fixture(scope="module")
def study() -> FisherStudy:
    return study_fisher(3, 2, 50, 5000, seed=3)


def test_it_prints_the_claims_and_writes_picture_and_csv(
    here: Path, study: FisherStudy, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format", "csv", "--out", "a/fisher.png", "--csv", "a/fisher.csv"]
    assert main(["analyze", "fisher", *SMALL, *options]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["claim"] for row in rows] == [check.claim for check in study.checks]
    # What is not at the level of rounding does not depend on the order of sums.
    found = {row["claim"]: row["measured"] for row in rows if row["expected"] != "<= 1e-12"}
    assert found == {c.claim: c.measured for c in study.checks if c.expected != "<= 1e-12"}
    assert (here / "a/fisher.png").stat().st_size > 10_000
    with (here / "a/fisher.csv").open() as file:
        curves = list(csv.DictReader(file))
    drawn = [float(row["y"]) for row in curves if row["panel"] == "eq. 13 as printed, LN"]
    wanted = [value for values in study.deviations.values() for value in values]
    assert drawn == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("form", ["rich", "markdown"])
def test_forms_of_the_table(
    here: Path, form: str, study: FisherStudy, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(analysis, "study_fisher", lambda *arguments: study)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["analyze", "fisher", *SMALL, "--format", form]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "mixed blocks F_wb, F_wg" in line)
    assert ("|" in line) == (form == "markdown")
    assert "BN 0.5, WN 0.5, LN 0.5" in line
    assert (here / "fisher.png").is_file()
