"""The claims of the paper: their file, the rule of a verdict, the page that is made of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ln_zoo.zoo import claims

ROOT = Path(__file__).parents[2]


def test_the_pages_are_up_to_date() -> None:
    """`ln-zoo reproduce --write docs/results/claims.md` makes them anew."""
    assert (ROOT / "docs/results/claims.md").read_text(encoding="utf-8") == claims.page(
        "docs/results"
    )
    assert f"\n{claims.readme_table()}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_five_rows_by_verdict() -> None:
    rows = claims.readme_table().splitlines()[2:]
    verdicts = [row.split("**")[1] for row in rows if row.startswith("| **")]
    assert len(verdicts) == 5
    assert verdicts == sorted(verdicts, key=claims.VERDICTS.index)
    assert len(set(verdicts)) >= 3  # not the pleasant ones alone


def test_what_the_claims_name_is_there() -> None:
    for each in claims.claims():
        assert (ROOT / each.page).is_file(), each.name
        for outcome in each.outcomes:
            if outcome.data:
                assert (ROOT / outcome.data["file"]).is_file(), each.name
        for arguments in each.sweep.values():
            words = arguments.split()
            assert (ROOT / words[words.index("--config") + 1]).is_file(), each.name
    sections = {each.section for each in claims.claims()}
    assert {"3.1", "5.1", "5.2", *(f"6.{n}" for n in range(1, 8)), "7"} <= sections


@pytest.mark.parametrize(
    ("low", "high", "below", "above"),
    [
        (-2, -1, claims.HOLDS, claims.DOES_NOT_HOLD),
        (1, 2, claims.DOES_NOT_HOLD, claims.HOLDS),
        (-1, 2, claims.UNDECIDED, claims.UNDECIDED),
        (-1, 0, claims.UNDECIDED, claims.UNDECIDED),
        (0, 1, claims.UNDECIDED, claims.UNDECIDED),
        (math.nan, math.nan, claims.UNDECIDED, claims.UNDECIDED),
    ],
)
def test_the_rule(low: float, high: float, below: str, above: str) -> None:
    assert claims.decide(low, high, "below") == below
    assert claims.decide(low, high, "above") == above


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.4, 0.4, claims.HOLDS),
        (0.1, 0.4, claims.HOLDS),
        (0.4, 0.6, claims.UNDECIDED),
        (-0.6, 0.6, claims.UNDECIDED),
        (0.6, 0.7, claims.DOES_NOT_HOLD),
        (-0.7, -0.6, claims.DOES_NOT_HOLD),
        (math.nan, math.nan, claims.UNDECIDED),
    ],
)
def test_the_rule_of_a_margin(low: float, high: float, verdict: str) -> None:
    assert claims.decide_margin(low, high, 0.5) == verdict


def entry(**changes: Any) -> dict[str, Any]:
    rule = {"kind": "faster", "metric": "m", "norm": "layer", "baseline": "none"}
    plain = dict.fromkeys(("section", "quote", "claim", "page", "fixed", "known", "reason"), "x")
    plain |= {"name": "a", "outcomes": [outcome()], "rule": rule}
    return plain | {"sweep": {"paper": "--config x --norms none,layer"}} | changes


def outcome(**changes: Any) -> dict[str, Any]:
    plain = {"verdict": "holds", "size": "paper", "seeds": 3, "number": "1", "runs": "today"}
    return plain | changes


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(), entry()], "claim a: it appears twice"),
        ([entry(extra=1)], "claim a: .*extra"),
        ([{"name": "a"}], "claim a: 'rule'"),
        ([entry(rule=entry()["rule"] | {"kind": "slower"})], "kind 'slower' is not one of"),
        ([entry(sweep={})], "a rule needs a sweep"),
        ([entry(sweep={"small": "--norms layer,none"})], "sizes .'small'. are none of"),
        ([entry(sweep={"paper": "--norms layer,batch"})], "lacks a norm of the rule"),
        (
            [entry(rule=entry()["rule"] | {"kind": "grows", "setting": "n", "less": "1"})],
            "needs a setting and two values",
        ),
        (
            [
                entry(
                    rule=entry()["rule"]
                    | {"kind": "grows", "setting": "n", "less": "1", "more": "2"},
                    sweep={"paper": "--norms none,layer --set n=1,3"},
                )
            ],
            "its sweep lacks a value of n",
        ),
        ([entry(rule=entry()["rule"] | {"setting": "n"})], "of this kind takes no setting"),
        ([entry(rule=entry()["rule"] | {"margin": 0.1})], "a margin above 0 belongs to"),
        ([entry(rule=entry()["rule"] | {"kind": "comparable"})], "a margin above 0 belongs to"),
        ([entry(rule=entry()["rule"] | {"kind": "own_best"})], "a value belongs to"),
        ([entry(rule={"kind": "measured"})], "words belong to rules of the kind 'measured'"),
        ([entry(outcomes=[outcome(verdict="yes")])], "unknown verdict 'yes'"),
        ([entry(outcomes=[outcome(size="half")])], "unknown size 'half'"),
        ([entry(outcomes=[outcome(verdict="undecided")])], "says what is missing"),
        ([entry(outcomes=[outcome(missing="a seed")])], "says what is missing"),
    ],
)
def test_wrong_files(entries: list[dict[str, Any]], message: str) -> None:
    assert claims.parse({"claims": [entry()]})[0].verdict == "holds"
    both = [outcome(), outcome(size="reduced", verdict="undecided", missing="a seed")]
    (parsed,) = claims.parse({"claims": [entry(outcomes=both)]})
    assert parsed.verdict == "holds (paper), undecided (reduced)"
    assert claims.parse({"claims": [entry(outcomes=[])]})[0].verdict == claims.NOT_TESTED
    with pytest.raises(ValueError, match=message):
        claims.parse({"claims": entries})
