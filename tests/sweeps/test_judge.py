"""Verdicts of rules on the runs of a sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_runs import FAST, SLOW, report

from ln_zoo.sweeps.claims import Rule
from ln_zoo.sweeps.grid import Grid, SweepError, write_grid
from ln_zoo.sweeps.report import Report, judge

FASTER = Rule("faster", "val_nll", "layer", "none")
LOWER = Rule("lower", "error", "layer", "none")


def test_faster(tmp_path: Path) -> None:
    # Targets of 0.27, 0.235 and 0.207: after 30, 40 and 40 updates, and 80 of the baseline.
    found = judge(report(tmp_path / "a", FAST, SLOW), FASTER)
    assert (found.verdict, found.seeds) == ("holds", 3)
    ratio = "2.2 (1.46 to 3.33)"
    assert found.number == f"times as fast to 90 %: {ratio}; 95 %: {ratio}; 99 %: {ratio}"
    assert found.interval == pytest.approx((1.46, 3.33), abs=0.005)
    # The other way round, the baseline's best is missed: two seeds in three cannot tell.
    back = judge(report(tmp_path / "b", SLOW, FAST), FASTER)
    assert back.verdict == "undecided"
    assert "99 %: met by 0 of 3, baseline 3 of 3" in back.number
    # Six seeds can, by ranks.
    never = judge(report(tmp_path / "c", SLOW * 2, FAST * 2), FASTER)
    assert never.verdict == "does not hold"
    one = judge(report(tmp_path / "d", FAST[:1], SLOW[:1]), FASTER)
    assert (one.verdict, one.interval) == ("undecided", None)


def test_each_at_its_best_settings(tmp_path: Path) -> None:
    assert judge(report(tmp_path, FAST, SLOW, ("1", "2")), FASTER).verdict == "holds"


def test_own_best(tmp_path: Path) -> None:
    # Own bests after 40, 50 and 50 updates; the baseline's after 80.
    found = report(tmp_path / "a", [FAST[0], FAST[1], FAST[1]], SLOW)
    for value, verdict in {0.6: "holds", 0.5: "holds", 0.95: "holds in part"}.items():
        rule = Rule("own_best", "val_nll", "layer", "none", value=value)
        assert judge(found, rule).verdict == verdict
    assert judge(found, rule).number == "0.58 (0.421 to 0.799) of the baseline's updates"
    assert judge(report(tmp_path / "b", FAST, SLOW), rule).verdict == "undecided"
    assert judge(report(tmp_path / "c", SLOW, [FAST[1]] * 3), rule).verdict == "does not hold"


def test_lower_and_higher(tmp_path: Path) -> None:
    found = report(tmp_path / "a", [[0.10], [0.11], [0.12]], [[0.20], [0.22], [0.21]])
    lower = judge(found, LOWER)
    assert lower.verdict == "holds"
    assert (lower.number, lower.seeds) == ("error -10 (-12.5 to -7.52)", 3)
    assert judge(found, Rule("higher", "error", "layer", "none")).verdict == "does not hold"
    mixed = report(tmp_path / "b", [[0.10], [0.30]], [[0.20], [0.22]])
    assert judge(mixed, LOWER).verdict == "undecided"
    # In points: -1 (-115 to 113).
    assert judge(mixed, replace(LOWER, matters=110.0)).verdict == "undecided"
    assert judge(mixed, replace(LOWER, matters=120.0)).verdict == "does not hold"
    with pytest.raises(SweepError, match="the test has no 'bound'"):
        judge(found, Rule("lower", "bound", "layer", "none"))
    with pytest.raises(SweepError, match="has no 'loss'"):
        judge(found, Rule("faster", "loss", "layer", "none"))


def test_a_gain_that_grows(tmp_path: Path) -> None:
    # By seed: error of layer and of none, for a batch of 128 and one of 16, at either length.
    errors = [[0.30, 0.31, 0.20, 0.24], [0.30, 0.32, 0.20, 0.26], [0.31, 0.31, 0.19, 0.24]]
    settings = {"batch": ["128", "16"], "length": ["1", "2"]}
    grid = Grid(["c.yaml"], ["layer.yaml", "none.yaml"], [0, 1, 2, 3], settings)
    write_grid(grid, tmp_path)
    for run in grid.runs():
        # The last seed has finished in part.
        if run.seed == 3 and run.settings["length"] == "2":
            continue
        at = 2 * (run.settings["batch"] == "16") + (run.norm == "none.yaml")
        error = errors[run.seed % 3][at] + (run.settings["length"] == "2")
        folder = tmp_path / run.name
        folder.mkdir(parents=True)
        (folder / "test_results.json").write_text(json.dumps({"metrics": {"error": error}}))
        (folder / "metrics.csv").write_text(f"epoch,step,val_error\n0,9,{error}\n")
    found = Report(grid, tmp_path)
    # 1, 2 and 0 points become 4, 6 and 5.
    rule = Rule("grows", "error", "layer", "none", "batch", "128", "16")
    grown = judge(found, rule)
    assert (grown.verdict, grown.seeds) == ("holds", 3)
    assert grown.number == "lead in error +1 to +5, +4 (+1.52 to +6.48)"
    back = Rule("grows", "error", "layer", "none", "batch", "16", "128")
    assert judge(found, back).verdict == "does not hold"
    length = Rule("grows", "error", "layer", "none", "length", "1", "2")
    assert judge(found, length).verdict == "undecided"
    with pytest.raises(SweepError, match="no seed has finished at all settings"):
        judge(found, Rule("grows", "error", "layer", "none", "batch", "128", "4"))


def test_comparable(tmp_path: Path) -> None:
    # The last values are 0.1, 0.1 and 0.2 with 0.2: -0.1, -0.1 and 0 apart, within 0.21 of it.
    found = report(tmp_path, [*FAST[:2], [*FAST[2][:-1], 0.2]], SLOW)
    wide, narrow = (Rule("comparable", "nll", "layer", "none", margin=m) for m in (0.25, 0.1))
    within = judge(found, wide)
    assert (within.verdict, within.number) == ("holds", "nll -0.0667 (-0.21 to +0.0768)")
    assert judge(found, narrow).verdict == "undecided"
    assert judge(found, narrow).seeds_needed == 5
