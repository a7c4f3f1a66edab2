"""The claims of the paper: their file, the rule of a verdict, the page that is made of them."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ln_zoo.sweeps import claims
from ln_zoo.sweeps.claims import Claim, Outcome, Rule

ROOT = Path(__file__).parents[2]
KINDS = ("faster", "own_best", "lower", "higher", "comparable", "grows", "measured")


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


def test_an_interval_that_excludes_what_matters() -> None:
    for low, high, verdict in [
        (-1, 2, claims.DOES_NOT_HOLD),
        (-1, 4, claims.UNDECIDED),
        (1, 2, claims.HOLDS),
        (-math.inf, math.inf, claims.UNDECIDED),
        (math.nan, math.nan, claims.UNDECIDED),
    ]:
        assert claims.decide(low, high, "above", matters=3) == verdict
        assert claims.decide(-high, -low, "below", matters=3) == verdict


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


def problems(each: Claim) -> list[str]:
    """What is wrong with an entry of ``claims.yaml``."""
    rule, found = each.rule, []

    def wants(fits: object, text: str) -> None:
        if not fits:
            found.append(f"{each.name}: {text}")

    wants(rule.kind in KINDS, f"kind {rule.kind!r}")
    of_setting = rule.setting and rule.less and rule.more
    wants(bool(of_setting) == (rule.kind == "grows"), "grows has a setting and two values")
    wants(not rule.log_odds or rule.kind == "grows", "log_odds is for grows")
    wants((rule.kind == "comparable") == (rule.margin > 0), "comparable has a margin")
    wants((rule.kind == "own_best") == (rule.value is not None), "own_best has a value")
    wants((rule.kind == "measured") == bool(rule.says), "measured has words")
    wants((rule.kind == "measured") != bool(each.sweep), "a rule has a sweep")
    wants(set(each.sweep) <= set(claims.SIZES), "sizes of sweeps")
    for arguments in each.sweep.values():
        words = shlex.split(arguments)
        norms = {Path(norm).stem for norm in words[words.index("--norms") + 1].split(",")}
        wants({rule.norm, rule.baseline} <= norms, f"norms of {arguments}")
        settings = dict(word.split("=", 1) for word in words if "=" in word)
        values = settings.get(rule.setting, "").split(",")
        wants(rule.kind != "grows" or {rule.less, rule.more} <= {*values}, f"values of {arguments}")
    for outcome in each.outcomes:
        wants(outcome.verdict in claims.VERDICTS, f"verdict {outcome.verdict!r}")
        wants(outcome.size in claims.SIZES, f"size {outcome.size!r}")
        undecided = outcome.verdict == claims.UNDECIDED
        wants(undecided == bool(outcome.missing), "an undecided outcome has `missing`")
    return found


def test_the_file_is_valid() -> None:
    assert [problem for each in claims.claims() for problem in problems(each)] == []
    names = [each.name for each in claims.claims()]
    assert len(set(names)) == len(names)


def test_verdicts_of_both_sizes() -> None:
    paper = Outcome("holds", "paper", 3, "1", "today")
    reduced = replace(paper, size="reduced", verdict="undecided", missing="a seed")
    each = replace(claims.claims()[0], outcomes=(paper,))
    assert each.verdict == "holds"
    assert replace(each, outcomes=(paper, reduced)).verdict == (
        "holds (paper), undecided (reduced)"
    )
    assert replace(each, outcomes=()).verdict == claims.NOT_TESTED


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_is_a_sentence(kind: str) -> None:
    rule = Rule(kind, "error", "layer", "batch", "size", "4", "128", 0.5, True, 0.6, 2.0, "words")
    assert re.fullmatch(r".+\. An effect of 2( times the speed)? matters\.", rule.words)
    assert "{" not in rule.words
    assert kind == "measured" or "`layer`" in rule.words
