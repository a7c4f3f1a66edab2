"""README, claims, pages, cards and tables say the same."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path

import pytest

from ln_zoo.sweeps import claims

ROOT = Path(__file__).parents[2]
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
