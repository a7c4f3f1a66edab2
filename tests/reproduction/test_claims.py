"""The claims of the paper: file, rules and page, with which README, pages and tables agree."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from ln_zoo.reproduction import claims, decisions
from ln_zoo.reproduction.claims import Claim, Outcome, Rule
from ln_zoo.reproduction.claims_page import claims_page, readme_table

ROOT = Path(__file__).parents[2]
KINDS = ("faster", "own_best", "lower_best", "lower", "higher", "comparable", "grows", "measured")


def test_the_pages_are_up_to_date() -> None:
    """`ln-zoo reproduce --write docs/results/claims.md` makes them anew."""
    written = (ROOT / "docs/results/claims.md").read_text(encoding="utf-8")
    assert written == claims_page("docs/results")
    assert f"\n{readme_table()}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_five_rows_by_verdict() -> None:
    rows = readme_table().splitlines()[2:]
    verdicts = [row.split("**")[1] for row in rows if row.startswith("| **")]
    assert len(verdicts) == 5
    assert verdicts == sorted(verdicts, key=claims.VERDICTS.index)
    assert len(set(verdicts)) >= 3  # not the pleasant ones alone


def test_what_the_claims_name_is_there() -> None:
    for each in claims.claims():
        assert (ROOT / each.page).is_file(), each.name
        for outcome in each.outcomes:
            assert all((ROOT / file).is_file() for file in outcome.files), each.name
        for arguments in each.sweep.values():
            words = arguments.split()
            assert (ROOT / words[words.index("--config") + 1]).is_file(), each.name
    sections = {each.section for each in claims.claims()}
    assert {"3.1", "5.1", "5.2", *(f"6.{n}" for n in range(1, 8)), "7"} <= sections


@pytest.mark.parametrize(
    ("low", "high", "matters", "verdict"),
    [
        (1, 2, 0, claims.HOLDS),
        (-2, -1, 0, claims.DOES_NOT_HOLD),
        (-1, 2, 0, claims.UNDECIDED),
        (-1, 0, 0, claims.UNDECIDED),
        (0, 1, 0, claims.UNDECIDED),
        (math.nan, math.nan, 0, claims.UNDECIDED),
        # An interval that excludes what matters.
        (-1, 2, 3, claims.DOES_NOT_HOLD),
        (-1, 4, 3, claims.UNDECIDED),
        (1, 2, 3, claims.HOLDS),
        (-math.inf, math.inf, 3, claims.UNDECIDED),
        (math.nan, math.nan, 3, claims.UNDECIDED),
    ],
)
def test_the_rule(low: float, high: float, matters: float, verdict: str) -> None:
    assert decisions.decide(low, high, "above", matters) == verdict
    assert decisions.decide(-high, -low, "below", matters) == verdict


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
    assert decisions.decide_margin(low, high, 0.5) == verdict


def problems(each: Claim) -> list[str]:
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
    both = replace(each, outcomes=(paper, reduced))
    assert both.verdict == "holds (paper), undecided (reduced)"
    assert replace(each, outcomes=()).verdict == claims.NOT_TESTED


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_is_a_sentence(kind: str) -> None:
    rule = Rule(kind, "error", "layer", "batch", "size", "4", "128", 0.5, True, 0.6, 2.0, "words")
    assert re.fullmatch(r".+\. An effect of 2( times the speed)? matters\.", rule.words)
    assert "{" not in rule.words
    assert kind == "measured" or "`layer`" in rule.words


# README, claims, pages, cards and tables say the same

RESULTS = ROOT / "docs/results"
PAGES = sorted(path for path in RESULTS.glob("*.md") if path.name != "claims.md")
#: Bold words that tell a verdict.
VERDICT = re.compile(rf"\*\*({'|'.join(claims.VERDICTS)})\*\*")


def paragraphs(page: Path) -> list[str]:
    return page.read_text(encoding="utf-8").split("\n\n")


def named(paragraph: str) -> list[str]:
    """Claims that a paragraph links to, or names as such."""
    links = re.findall(r"claims\.md#([a-z0-9-]+)", paragraph)
    return links + re.findall(r"claims? `([a-z0-9-]+)`", paragraph)


def row(model: str) -> list[str]:
    """Cells of the README's table of models, without links."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| [`{model}`]")]
    return [cell.strip() for cell in line.strip("| ").split("|")]


def measured(name: str) -> dict[str, float]:
    results = json.loads((ROOT / f"model_cards/{name}/results.json").read_text(encoding="utf-8"))
    return {each["name"]: each["value"] for each in results["metrics"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_tell_the_verdicts_of_the_claims(page: Path) -> None:
    known = {each.name: each for each in claims.claims()}
    for paragraph in paragraphs(page):
        names = named(paragraph)
        assert set(names) <= set(known), f"{page.name}: {paragraph}"
        told = set(VERDICT.findall(paragraph)) if names else set()
        given = {o.verdict for name in names for o in known[name].outcomes}
        assert told <= given, f"{page.name}: {paragraph}"


def test_a_wrong_verdict_would_be_found() -> None:
    text = "By [its rule](claims.md#invariance) it **does not hold**, so the claim `draw-bound`"
    assert named(text) == ["invariance", "draw-bound"]
    assert VERDICT.findall(text) == ["does not hold"]


def test_each_page_of_a_claim_links_to_it() -> None:
    for each in claims.claims():
        page = ROOT / each.page
        assert f"(claims.md#{each.name})" in page.read_text(encoding="utf-8"), each.name


@pytest.mark.parametrize(
    ("model", "table", "chosen"),
    [
        ("MLPClassifier", "mnist_protocol", {"layer": "3e-4", "batch": "1e-3", "none": "1e-3"}),
        ("ConvClassifier", "convnets_protocol", {"layer": "1e-3", "batch": "1e-3", "none": "3e-3"}),
        ("AttentiveReader", "attentive_reader_fresh_seeds", {"layer": "", "batch": "", "none": ""}),
    ],
)
def test_the_readme_has_the_means_of_the_tables(
    model: str, table: str, chosen: dict[str, str]
) -> None:
    with (ROOT / f"docs/figures/{table}.csv").open(newline="") as file:
        runs = [run for run in csv.DictReader(file) if run["error"]]
    digits = 1 if model == "AttentiveReader" else 2
    cells = dict(zip(("layer", "batch", "none", "seeds"), row(model)[4:], strict=True))
    for norm, rate in chosen.items():
        errors = [
            float(run["error"])
            for run in runs
            if run["norm"] == norm and run.get("model.lr", "") == rate
        ]
        spread = statistics.fmean(errors), statistics.stdev(errors)
        assert cells[norm] == " ± ".join(f"{value:.{digits}f}" for value in spread)
        assert str(len(errors)) in cells["seeds"]


@pytest.mark.parametrize(("norm", "column"), [("layernorm", 4), ("none", 6)])
def test_readme_and_page_have_the_scores_of_the_cards(norm: str, column: int) -> None:
    assert row("DRAW")[column] == f"{measured(f'draw.{norm}')['bound']:.1f}"
    text = (RESULTS / "handwriting.md").read_text(encoding="utf-8")
    assert f"{measured(f'handwriting.{norm}')['sequence_nll']:.1f}" in text
