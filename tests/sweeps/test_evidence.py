"""Verdicts of measured rules on small tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ln_zoo.sweeps import claims
from ln_zoo.sweeps.claims import Outcome, Rule
from ln_zoo.sweeps.evidence import recompute
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.verdicts import Finding

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
    "data", [{"file": "no.csv"}, {"metric": "no"}, {"norm": "no"}, {"where": {"no": "1"}}]
)
def test_what_a_table_lacks_is_named(tmp_path: Path, data: dict[str, Any]) -> None:
    with pytest.raises(SweepError, match="no"):
        judged(tmp_path, test="above", **data)


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
