"""Outcomes of claims on the runs of a sweep, and the table of judged runs."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_runs import FAST, SLOW, refuses, results, write_tested

from ln_zoo.reproduction.claims import Claim, Comparison
from ln_zoo.reproduction.judge import judge, write_judged
from ln_zoo.sweeps.grid import Grid
from ln_zoo.sweeps.manifest import write_grid
from ln_zoo.sweeps.results import Results


def claim(metric: str, kind: str = "end", **keys: Any) -> Claim:
    row = Comparison(kind, norm="a", baseline="b", metric="other", **keys)
    rows = (Comparison("none"), row)
    return Claim("c", "1", "q", "c", "p", rows, norm="layer", baseline="none", metric=metric)


FASTER = claim("val_nll", "speed", target=0.25)
LOWER = claim("error")


def test_speed(tmp_path: Path) -> None:
    # After 30, 40 and 40 updates, and 80 of the baseline; the rounding is that of 10 updates.
    found = judge(results(tmp_path / "a", FAST, SLOW), FASTER)
    assert (found.word, found.pairs) == ("better", 3)
    assert found.number == "2.2 times as fast (1.46 to 3.33)"
    # The other way round, with the same interval.
    back = judge(results(tmp_path / "b", SLOW, FAST), FASTER)
    assert (back.word, back.low) == ("worse", pytest.approx(1 / found.high, rel=1e-3))
    assert judge(results(tmp_path / "d", FAST[:1], SLOW[:1]), FASTER).word == "undecided"


def test_the_primary_comparison_is_that_of_the_judged_runs(tmp_path: Path) -> None:
    """It has the labels of a sweep; those of other rows are of older tables."""
    row = Comparison("speed", norm="layer", baseline="none", metric="val_nll", target=0.25, pairs=3)
    found = judge(results(tmp_path, FAST, SLOW), replace(FASTER, rows=(row,), metric="old"))
    assert (found.word, found.pairs) == ("better", 3)


def test_a_target_is_that_of_the_size(tmp_path: Path) -> None:
    never = Comparison("speed", norm="a", baseline="b", metric="other", target=-1)
    full = replace(never, target=0.25, size="paper", length="paper")
    both = replace(FASTER, rows=(never, replace(full, target=-2, length="reduced"), full))
    found = results(tmp_path, FAST, SLOW)
    assert judge(found, both).word == "undecided"
    assert judge(found, both, "paper").word == "better"


def test_each_at_its_best_settings(tmp_path: Path) -> None:
    assert judge(results(tmp_path, FAST, SLOW, ("1", "2")), FASTER).word == "better"


def test_ends(tmp_path: Path) -> None:
    found = results(tmp_path / "a", [[0.10], [0.11], [0.12]], [[0.20], [0.22], [0.21]])
    lower = judge(found, LOWER)
    assert (lower.word, lower.number) == ("better", "+10 (+7.52 to +12.5)")
    assert judge(found, claim("error", lower=False)).word == "worse"
    assert judge(found, claim("error", margin=20)).word == "same"
    mixed = results(tmp_path / "b", [[0.10], [0.30]], [[0.20], [0.22]])
    assert judge(mixed, LOWER).word == "undecided"
    rates = results(tmp_path / "c", SLOW, FAST, lrs=("1", "2"))
    assert judge(rates, LOWER).word == "worse"
    rates.select = None
    refuses("no validation metric", judge, rates, LOWER)
    refuses(["bound"], judge, found, claim("bound"))
    refuses(["loss"], judge, found, claim("loss", "speed", target=0.1))


def test_a_lead_that_grows(tmp_path: Path) -> None:
    # By seed: error of layer and of none, for a batch of 128 and one of 16, at either length.
    errors = [[0.30, 0.31, 0.20, 0.24], [0.30, 0.32, 0.20, 0.26], [0.31, 0.31, 0.19, 0.24]]
    settings = {"batch": ["128", "16"], "length": ["1", "2"]}
    grid = Grid(["c.yaml"], ["layer.yaml", "none.yaml"], [0, 1, 2], settings)
    write_grid(grid, tmp_path)
    for run in grid.runs():
        at = 2 * (run.settings["batch"] == "16") + (run.norm == "none.yaml")
        error = errors[run.seed][at] + (run.settings["length"] == "2")
        write_tested(
            tmp_path / run.name, "epoch,step,val_error", [f"0,9,{error}"], metrics={"error": error}
        )

    def lead(value: str) -> list[dict[str, str]]:
        return [{"norm": norm, "batch": value} for norm in ("layer", "none")]

    row = Comparison("end", norm=lead("16"), baseline=lead("128"), metric="error", score="mean")
    grown = replace(LOWER, rows=(row,))
    found = judge(Results(grid, tmp_path), grown)
    # 1, 2 and 0 points become 4, 6 and 5.
    assert (found.word, found.number) == ("better", "+4 (+1.52 to +6.48)")


def test_a_table_of_judged_runs(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    results(out, FAST[:2], SLOW[:2])
    refuses(["layer", "events"], write_judged, [out], "val_nll", tmp_path / "t.csv")
    for number, run in enumerate(sorted(path.parent for path in out.rglob("metrics.csv"))):
        for second in (9, 5):  # a run that was resumed has several files; the first counts
            (run / f"events.out.tfevents.179590000{second}.host.{number}.0").touch()
    assert write_judged([out], "val_nll", tmp_path / "t.csv") == 4
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 8
    assert rows[0] == {
        "begun": "2026-11-28T21:06:45+00:00", "norm": "layer", "seed": "0", "step": "10",
        "val_nll": "0.9",
    }  # fmt: skip
