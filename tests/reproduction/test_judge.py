"""Verdicts of rules on the runs of a sweep, and of measured rules on small tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_runs import FAST, SLOW, refuses, results, write_tested

from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Outcome, Rule
from ln_zoo.reproduction.evidence import recompute
from ln_zoo.reproduction.judge import judge
from ln_zoo.reproduction.verdicts import Finding
from ln_zoo.sweeps.grid import Grid, SweepError, write_grid
from ln_zoo.sweeps.results import Results

FASTER = Rule("faster", "val_nll", "layer", "none")
LOWER = Rule("lower", "error", "layer", "none")
GROWS = Rule("grows", "error", "layer", "none", "batch", "128", "16")


def test_faster(tmp_path: Path) -> None:
    # Targets of 0.27, 0.235 and 0.207: after 30, 40 and 40 updates, and 80 of the baseline.
    found = judge(results(tmp_path / "a", FAST, SLOW), FASTER)
    assert (found.verdict, found.seeds) == ("holds", 3)
    ratio = "2.2 (1.46 to 3.33)"
    assert found.number == f"times as fast to 90 %: {ratio}; 95 %: {ratio}; 99 %: {ratio}"
    assert found.interval == pytest.approx((1.46, 3.33), abs=0.005)
    # The other way round, the baseline's best is missed: two seeds in three cannot tell.
    back = judge(results(tmp_path / "b", SLOW, FAST), FASTER)
    assert back.verdict == "undecided"
    assert "99 %: met by 0 of 3, baseline 3 of 3" in back.number
    one = judge(results(tmp_path / "d", FAST[:1], SLOW[:1]), FASTER)
    assert (one.verdict, one.interval) == ("undecided", None)


def test_each_at_its_best_settings(tmp_path: Path) -> None:
    assert judge(results(tmp_path, FAST, SLOW, ("1", "2")), FASTER).verdict == "holds"


def test_own_best(tmp_path: Path) -> None:
    # Own bests after 40, 50 and 50 updates; the baseline's after 80.
    found = results(tmp_path / "a", [FAST[0], FAST[1], FAST[1]], SLOW)
    for value, verdict in {0.6: "holds", 0.5: "holds", 0.95: "holds in part"}.items():
        rule = Rule("own_best", "val_nll", "layer", "none", value=value)
        assert judge(found, rule).verdict == verdict
    assert judge(found, rule).number == "0.58 (0.421 to 0.799) of the baseline's updates"
    assert judge(results(tmp_path / "b", FAST, SLOW), rule).verdict == "undecided"
    assert judge(results(tmp_path / "c", SLOW, [FAST[1]] * 3), rule).verdict == "does not hold"


def test_lower_and_higher(tmp_path: Path) -> None:
    found = results(tmp_path / "a", [[0.10], [0.11], [0.12]], [[0.20], [0.22], [0.21]])
    lower = judge(found, LOWER)
    assert lower.verdict == "holds"
    assert (lower.number, lower.seeds) == ("error -10 (-12.5 to -7.52)", 3)
    assert judge(found, Rule("higher", "error", "layer", "none")).verdict == "does not hold"
    mixed = results(tmp_path / "b", [[0.10], [0.30]], [[0.20], [0.22]])
    assert judge(mixed, LOWER).verdict == "undecided"
    # In points: -1 (-115 to 113).
    assert judge(mixed, replace(LOWER, matters=110.0)).verdict == "undecided"
    assert judge(mixed, replace(LOWER, matters=120.0)).verdict == "does not hold"
    # Without a validation metric no setting is the best.
    rates = results(tmp_path / "c", SLOW, FAST, lrs=("1", "2"))
    assert judge(rates, LOWER).verdict == "does not hold"
    rates.select = None
    with pytest.raises(SweepError, match="no validation metric"):
        judge(rates, LOWER)
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
        columns, rows = "epoch,step,val_error", [f"0,9,{error}"]
        write_tested(tmp_path / run.name, columns, rows, metrics={"error": error})
    found = Results(grid, tmp_path)
    # 1, 2 and 0 points become 4, 6 and 5.
    grown = judge(found, GROWS)
    assert (grown.verdict, grown.seeds) == ("holds", 3)
    assert grown.number == "lead in error +1 to +5, +4 (+1.52 to +6.48)"
    assert judge(found, replace(GROWS, less="16", more="128")).verdict == "does not hold"
    length = replace(GROWS, setting="length", less="1", more="2")
    assert judge(found, length).verdict == "undecided"
    with pytest.raises(SweepError, match="no seed has finished at all settings"):
        judge(found, replace(GROWS, more="4"))


def test_comparable(tmp_path: Path) -> None:
    # The last values are 0.1, 0.1 and 0.2 with 0.2: -0.1, -0.1 and 0 apart, within 0.21 of it.
    found = results(tmp_path, [*FAST[:2], [*FAST[2][:-1], 0.2]], SLOW)
    wide, narrow = (Rule("comparable", "nll", "layer", "none", margin=m) for m in (0.25, 0.1))
    within = judge(found, wide)
    assert (within.verdict, within.number) == ("holds", "nll -0.0667 (-0.21 to +0.0768)")
    assert judge(found, narrow).verdict == "undecided"
    assert judge(found, narrow).seeds_needed == 5


# Tables

MEASURED = Rule("measured", says="in words")

#: Group a: 1.0, 1.1 and 0.9 above; group b: as much below.
TABLE = """\
group,method,seed,value,kept
a,x,0,2.0,yes
a,x,1,2.2,yes
a,x,2,2.1,yes
a,y,0,1.0,yes
a,y,1,1.1,yes
a,y,2,1.2,yes
b,x,0,1.0,yes
b,x,1,1.1,yes
b,x,2,1.2,yes
b,y,0,2.0,yes
b,y,1,2.2,yes
b,y,2,2.1,yes
a,x,3,50,no
a,y,3,1,no
"""


def judged(folder: Path, rule: Rule = MEASURED, **data: Any) -> Finding:
    (folder / "t.csv").write_text(TABLE)
    whole = {"file": "t.csv", "norm": "x", "baseline": "y", "metric": "value"} | data
    whole["where"] = {"kept": "yes"} | data.get("where", {})
    return recompute(rule, Outcome("holds", "paper", 3, "", "", whole), folder)


@pytest.mark.parametrize(
    ("test", "margin", "verdict"),
    [
        ("above", 0, "holds"),
        ("below", 0, "does not hold"),
        ("within", 1.5, "holds"),
        ("within", 1.1, "undecided"),
        ("within", 0.5, "does not hold"),
        ("at_most", 1.5, "holds"),
        ("at_most", 1.0, "undecided"),
        ("at_most", 0.5, "does not hold"),
        ("each_below", 2.3, "holds"),
        ("each_below", 2.05, "undecided"),
        ("each_below", 1.9, "does not hold"),
    ],
)
def test_sides(tmp_path: Path, test: str, margin: float, verdict: str) -> None:
    found = judged(tmp_path, test=test, margin=margin, where={"group": "a"})
    assert (found.verdict, found.seeds) == (verdict, 3)


def test_groups_have_to_agree(tmp_path: Path) -> None:
    found = judged(tmp_path, test="above", groups="group")
    assert found.verdict == "holds in part"
    assert found.number == "a +1 (+0.752 to +1.25); b -1 (-1.25 to -0.752)"
    assert judged(tmp_path, test="within", margin=1.5, groups="group").verdict == "holds"


def test_units(tmp_path: Path) -> None:
    a = {"group": "a"}
    assert judged(tmp_path, test="above", where=a, scale=100).number.startswith("+100 (")
    assert judged(tmp_path, test="above", where=a, log=True).number.startswith("1.91 (")
    both = judged(tmp_path, test="above", where=a, metric="2*value+value")
    assert both.number.startswith("+3 (")


def test_runs_of_two_tables_are_apart(tmp_path: Path) -> None:
    a = {"group": "a"}
    found = judged(tmp_path, test="above", where=a, file=["t.csv", "t.csv"])
    assert found.seeds == 6


def test_other_kinds(tmp_path: Path) -> None:
    where = {"group": "b"}
    lower = Rule("lower", "value", "x", "y")
    assert judged(tmp_path, lower, where=where).verdict == "holds"
    near = Rule("comparable", "value", "x", "y", margin=1.5)
    assert judged(tmp_path, near, where=where).verdict == "holds"


@pytest.mark.parametrize(
    ("least", "verdict", "number"),
    [
        # Logs to base 2 of 3, 4 and 1, 2: a difference of 2 with a standard error of 0.707, and
        # 4.30 of them, as Student's t has two degrees of freedom.
        (8, "undecided", "a 2.08, b 2.77; c 0.69, d 1.39: +1.39 (-0.72 to +3.50)"),
        (32, "holds", "a 3.47, b 4.16; c 0.69, d 1.39: +2.77 (+0.66 to +4.88)"),
    ],
)
def test_speed_ups_of_tasks(tmp_path: Path, least: int, verdict: str, number: str) -> None:
    tasks = {}
    for name, ratio in {"a": least, "b": 2 * least, "c": 2, "d": 4}.items():
        falls = {"x": 8, "y": 8 * ratio}
        rows = [f"{of},0,{t},{loss}" for of, at in falls.items() for t, loss in ((0, 1), (at, 0))]
        (tmp_path / name).write_text("\n".join(["label,seed,step,loss", *rows]))
        tasks[name] = {"file": name, "norm": "x", "baseline": "y", "metric": "loss"}
    groups = {of: {name: tasks[name] for name in of} for of in ("ab", "cd")}
    outcome = Outcome("", "", None, "", "", {"tasks": groups})
    found = recompute(MEASURED, outcome, tmp_path)
    assert (found.verdict, found.number) == (verdict, f"log of the speed-up: {number}")
    assert outcome.files == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "data", [{"file": "no.csv"}, {"metric": "no"}, {"norm": "no"}, {"where": {"no": "1"}}]
)
def test_what_a_table_lacks_is_named(tmp_path: Path, data: dict[str, Any]) -> None:
    refuses("no", judged, tmp_path, test="above", **data)


def test_numbers_of_the_claims_are_those_of_their_tables() -> None:
    """Verdict, seeds, number and interval, from the tables in git."""
    root = Path(__file__).parents[2]
    for each in claims.claims():
        for outcome in each.outcomes:
            if outcome.data:
                found = recompute(each.rule, outcome, root)
                assert (found.verdict, found.seeds) == (outcome.verdict, outcome.seeds), each.name
                assert found.number in outcome.number, each.name
                ends = found.interval and pytest.approx(found.interval, rel=1e-3)
                assert outcome.interval == ends, each.name
