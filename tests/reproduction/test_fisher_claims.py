"""The study of the claims about Fisher information, its tables and its picture."""

from __future__ import annotations

import csv
import dataclasses
import io
from pathlib import Path

import pytest
from cli_support import rows_of
from refusals import refuses
from rich.console import Console

from ln_zoo.reproduction.fisher_claims import (
    FisherCheck,
    FisherStudy,
    study_fisher,
    write_fisher_curves,
)
from ln_zoo.reproduction.fisher_picture import plot_fisher


@pytest.fixture(scope="module")
def study() -> FisherStudy:
    return study_fisher(units=3, features=3, examples=60, draws=60_000, seed=2)


def test_every_claim_agrees(study: FisherStudy) -> None:
    assert [check for check in study.checks if not check.agrees] == []
    assert study.agrees
    measured = {check.claim: check.measured for check in study.checks}
    assert measured["W doubled: curvature F_ww (the paper: 1/2)"] == "BN 0.25, WN 0.25, LN 0.25"
    assert measured["W doubled: mixed blocks F_wb, F_wg"] == "BN 0.5, WN 0.5, LN 0.5"
    assert measured["LN: rank of F, of 15"] == "11"
    grown = [measured[f"{name}: gain block, inputs times 3"] for name in ("BN", "LN", "WN")]
    assert grown == ["1", "1", "9"]
    spectra, _, sampling, _ = study.panels
    assert sampling.x == [600, 6000, 60_000]
    above = {name: sum(v > 1e-12 for v in values) for name, values in spectra.lines.items()}
    assert above == {"none": 12, "BN": 12, "WN": 12, "LN": 11, "LN, eq. 13 as printed": 15}


def test_tables(study: FisherStudy) -> None:
    check = FisherCheck("7", "|a| [b]", "1", "2", False)
    shown = dataclasses.replace(study, checks=[study.checks[0], check])
    assert not shown.agrees
    head, line, first, second = shown.markdown().splitlines()
    assert head == "| source | claim | expected | measured | agrees |"
    assert line == "|---|---|---|---|---|"
    assert first.startswith("| 12-14 | closed forms against autograd")
    assert first.endswith("| yes |")
    assert second == r"| 7 | \|a\| [b] | 1 | 2 | no |"
    rows = list(csv.DictReader(io.StringIO(shown.csv())))
    assert rows[1] == {
        "source": "7", "claim": "|a| [b]", "expected": "1", "measured": "2", "agrees": "no"
    }  # fmt: skip
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(shown)
    printed = console.export_text()
    assert "source" in printed
    assert "|a| [b]" in printed
    assert "no" in printed.splitlines()[-1]


def test_picture_and_its_numbers(study: FisherStudy, tmp_path: Path) -> None:
    picture, table = tmp_path / "new" / "fisher.svg", tmp_path / "other" / "fisher.csv"
    plot_fisher(study, picture, "a title")
    drawn = picture.read_text()
    for text in ("a title", "LN, eq. 13 as printed", "categorical", "KL less its quadratic form"):
        assert f"<!-- {text}" in drawn
    write_fisher_curves(study, table)
    rows = rows_of(table)
    found = [row for row in rows if row["line"] == "bernoulli" and row["x"] == "60000"]
    assert [row["panel"] for row in found] == ["F from sampled outputs, BN"]
    assert float(found[0]["y"]) == pytest.approx(study.panels[2].lines["bernoulli"][-1], rel=1e-3)
    eigenvalues = [row for row in rows if row["panel"].startswith("eigenvalues")]
    assert len(eigenvalues) == 12 + 4 * 15


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [("units", 2, 3), ("features", 1, 2), ("examples", 13, 14), ("draws", 100, 20000)],
)
def test_models_that_are_too_small(option: str, value: int, least: int) -> None:
    refuses(f"{option}.*{least}.*{value}", study_fisher, **{option: value})
