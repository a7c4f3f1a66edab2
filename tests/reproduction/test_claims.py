"""The claims of the paper: file, rules and page, with which README, pages and tables agree."""

from __future__ import annotations

import csv
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Claim, Comparison
from ln_zoo.reproduction.claims_page import (
    answers,
    claims_page,
    entries,
    history,
    other_answers,
    readme_part,
    stands,
)

ROOT = Path(__file__).parents[2]


def test_the_pages_are_up_to_date() -> None:
    """`ln-zoo reproduce --write docs/results/claims.md` makes them anew."""
    written = (ROOT / "docs/results/claims.md").read_text(encoding="utf-8")
    assert written == claims_page("docs/results")
    for path, part in (
        ("README.md", readme_part()),
        ("docs/results/protocol_history.md", history()),
    ):
        assert f"\n{part}\n" in (ROOT / path).read_text(encoding="utf-8"), path


def test_what_the_claims_name_is_there() -> None:
    for each in claims.claims():
        assert (ROOT / each.page).is_file(), each.name
        assert all((ROOT / file).is_file() for row in each.rows for file in row.files), each.name
        for arguments in each.sweep.values():
            words = arguments.split()
            assert (ROOT / words[words.index("--config") + 1]).is_file(), each.name
    sections = {each.section for each in claims.claims()}
    assert {"3.1", "5.1", "5.2", *(f"6.{n}" for n in range(1, 8)), "7"} <= sections


def problems(each: Claim) -> list[str]:
    found = []

    def wants(fits: object, text: str) -> None:
        if not fits:
            found.append(f"{each.name}: {text}")

    wants(each.group in claims.GROUPS, f"group {each.group!r}")
    wants(set(each.sweep) <= set(claims.SIZES), "sizes of sweeps")
    for arguments in each.sweep.values():
        words = shlex.split(arguments)
        norms = {Path(norm).stem for norm in words[words.index("--norms") + 1].split(",")}
        wants(not each.norm or {each.norm, each.baseline} <= norms, f"norms of {arguments}")
    for row in each.rows:
        name = claims.key(each, row)
        wants(row.kind in ("speed", "end", "theory", "tasks", "none"), f"kind {row.kind!r}")
        wants((row.kind == "theory") == (each.group == "theory"), f"{name}: group")
        wants((row.kind == "speed") == (row.target != "" and row.kind != "none"), f"{name}: target")
        wants(row.kind != "none" or row.command or each.sweep, f"{name}: what measures it?")
        wants(row.kind in ("none", "tasks") or row.files, f"{name}: a table")
        wants({row.size, row.length} <= set(claims.EXTENTS), f"{name}: size, length")
        wants(row.claimed in ("", *claims.WORDS, *claims.THEORY), f"{name}: {row.claimed}")
        wants(bool(row.primary) == bool(row.pairs), f"{name}: pairs")
        wants(row.kind in ("none",) or row.runs, f"{name}: dates of the runs")
    return found


def test_the_file_is_valid() -> None:
    assert [problem for each in claims.claims() for problem in problems(each)] == []
    names = [claims.key(each, row) for each in claims.claims() for row in each.rows]
    assert len(set(names)) == len(names)
    assert set(claims.outcomes()) <= set(names)


@pytest.mark.parametrize(
    ("claimed", "word", "kind"),
    [
        ("better", "better", "as claimed"),
        ("better", "same", "against"),
        ("better", "worse", "against"),
        ("same", "same", "as claimed"),
        ("same", "better", "against"),
        ("better", "undecided", "undecided"),
        ("", "same", "not claimed"),
        ("confirmed", "in part", "in part"),
        ("confirmed", "refuted", "against"),
    ],
)
def test_how_a_word_stands_to_the_papers(claimed: str, word: str, kind: str) -> None:
    assert stands(Comparison("end", claimed=claimed), word) == kind


def test_the_answers_name_every_primary_outcome() -> None:
    text = " ".join(answers())
    assert len(answers()) == 3
    for claim, row, outcome in entries():
        if row.primary or claim.group == "theory":
            assert f"(#{claim.name})" in text
        if outcome.word == claims.NOT_MEASURED and not row.primary:
            assert f"(#{claim.name})" in answers()[2]


def test_the_answers_follow_fresh_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [claims.key(claim, row) for claim, row, _ in entries() if row.primary]
    words = [*["better"] * 5, "same", "worse", "undecided"]
    judged = [claims.Outcome(word, "1.5 times as fast", 12, judged=True) for word in words]
    stored = claims.outcomes() | dict(zip(names, judged, strict=True))
    monkeypatch.setattr(claims, "outcomes", lambda: stored)
    links = [f"(#{name.partition(':')[0]})" for name in names]
    holds, fails, unknown = (text.split(". ") for text in answers())
    assert "fresh runs, layer norm is faster than" in holds[0]
    assert "It is faster than" in holds[1]
    assert all(link in holds[0] + holds[1] for link in links[:5])
    assert "fresh runs, layer norm is slower than" in fails[0]
    assert links[6] in fails[0]
    assert "only as fast as" in fails[1]
    assert links[5] in fails[1]
    assert links[7] in unknown[0]
    assert not any(link in unknown[0] for link in links[:7])


def test_a_claim_is_answered_once_by_what_is_most_against_the_paper() -> None:
    agree, differ, mechanisms, unknown = other_answers()
    for claim in claims.claims():
        kinds = [stands(r, o.word) for r, o in zip(claim.rows, claim.outcomes, strict=True)]
        if claim.primary:
            for row, kind in zip(claim.rows, kinds, strict=True):
                assert row.primary or kind != "against" or row.of in answers()[1]
        elif claim.group != "theory" and set(kinds) != {claims.NOT_MEASURED}:
            where = agree if set(kinds) == {"as claimed"} else unknown
            if "against" in kinds:
                where = mechanisms if claim.group == "mechanism" else differ
            assert [f"(#{claim.name})" in each for each in other_answers()].count(True) == 1
            assert f"(#{claim.name})" in where


def test_the_answers_count_the_other_claims() -> None:
    counts = [re.search(r"\[(\d+) of (\d+) other claims\]", text) for text in answers()]
    found = [tuple(map(int, count.groups())) for count in counts if count]
    agree, differ, mechanisms, unknown = (text.count("](#") for text in other_answers())
    total = agree + differ + mechanisms + unknown
    assert found == [(agree, total), (differ + mechanisms, total), (unknown, total)]


def test_only_judged_words_and_theory_are_verdicts() -> None:
    for line in claims_page().splitlines():
        if "exploratory" in line and line.startswith("| "):
            assert "**" not in line, line


def test_the_history_counts_the_verdicts_of_before() -> None:
    lines = [line.strip("| ").split(" | ") for line in history().splitlines()[2:6]]
    assert [line[:2] for line in lines] == [
        ["holds", "30"], ["in part", "3"], ["does not hold", "11"], ["undecided", "4"],
    ]  # fmt: skip


def test_the_history_counts_judged_words_apart() -> None:
    judged = [each.stands for each in entries() if each.outcome.judged]
    counts = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[2]
        for line in history().split("\n")[2:7]
    }
    kinds = {"holds": "as claimed", "does not hold": "against", "undecided": claims.UNDECIDED}
    assert {kind: int(counts[kind]) for kind in kinds} == {
        kind: judged.count(word) for kind, word in kinds.items()
    }


def test_a_changed_verdict_has_a_reason() -> None:
    same = {
        "holds": "as claimed",
        "holds in part": claims.IN_PART,
        "does not hold": "against",
        "undecided": claims.UNDECIDED,
    }
    for claim, row, outcome in entries():
        if row.old and stands(row, outcome.word) != same[row.old]:
            assert row.because, claims.key(claim, row)


# README, claims, pages, cards and tables say the same

RESULTS = ROOT / "docs/results"
MADE = ("claims.md", "protocol_history.md")
PAGES = sorted(path for path in RESULTS.glob("*.md") if path.name not in MADE)
#: Bold words that tell a verdict.
VERDICT = re.compile(rf"\*\*({'|'.join((*claims.WORDS, *claims.THEORY))})\*\*")


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


DECIMAL = re.compile(r"(?<![\w.,])\d[\d,]*\.\d+(?![\d.])")


def test_the_decimals_of_a_note_are_on_the_page_of_its_claim() -> None:
    """Up to rounding; `ln-zoo reproduce --recompute` finds those of the page in tables."""
    for each in claims.claims():
        page = (ROOT / each.page).read_text(encoding="utf-8")
        known = [float(text.replace(",", "")) for text in DECIMAL.findall(page)]
        for text in DECIMAL.findall(each.note):
            half = 0.5000001 * 10 ** -len(text.partition(".")[2])
            value = float(text.replace(",", ""))
            assert any(abs(value - other) <= half for other in known), f"{each.name}: {text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_tell_the_verdicts_of_the_claims(page: Path) -> None:
    known = {each.name: each for each in claims.claims()}
    for paragraph in paragraphs(page):
        names = named(paragraph)
        assert set(names) <= set(known), f"{page.name}: {paragraph}"
        told = set(VERDICT.findall(paragraph)) if names else set()
        given = {o.word for name in names for o in known[name].outcomes}
        assert told <= given, f"{page.name}: {paragraph}"


def test_a_wrong_verdict_would_be_found() -> None:
    text = "By [its rule](claims.md#invariance) it is **worse**, so the claim `draw-bound`"
    assert named(text) == ["invariance", "draw-bound"]
    assert VERDICT.findall(text) == ["worse"]


def test_each_page_of_a_claim_links_to_it() -> None:
    for each in claims.claims():
        page = ROOT / each.page
        assert f"(claims.md#{each.name})" in page.read_text(encoding="utf-8"), each.name


CARDS = {
    "MLPClassifier": "mlp",
    "ConvClassifier": "conv",
    "AttentiveReader": "attentive_reader",
    "OrderEmbedding": "order_embedding",
    "SequenceClassifier": "pixels",
}
#: Metric of the README's column, its digits, and the factor of the cards' value.
COLUMNS = {
    "AttentiveReader": ("error", 1, 100),
    "OrderEmbedding": ("image_r10", 1, 1),
    "SequenceClassifier": ("accuracy", 1, 100),
    "SkipThought": ("token_nll", 3, 1),
}


@pytest.mark.parametrize(
    ("model", "table", "chosen"),
    [
        ("MLPClassifier", "mnist_protocol", {"layer": "3e-4", "batch": "1e-3", "none": "1e-3"}),
        ("ConvClassifier", "convnets_protocol", {"layer": "1e-3", "batch": "1e-3", "none": "3e-3"}),
        ("AttentiveReader", "attentive_reader_fresh_seeds", {"layer": "", "batch": "", "none": ""}),
        ("OrderEmbedding", "order_embeddings_fresh_seeds", {"layer": "", "none": ""}),
        ("SequenceClassifier", "test_scores", {"layer": "", "batch": "", "none": ""}),
        ("SkipThought", "test_scores", {"layer": "", "none": ""}),
    ],
)
def test_the_readme_has_the_means_of_the_tables(
    model: str, table: str, chosen: dict[str, str]
) -> None:
    metric, digits, factor = COLUMNS.get(model, ("error", 2, 100))
    with (ROOT / f"docs/figures/{table}.csv").open(newline="") as file:
        runs = [run for run in csv.DictReader(file) if run[metric]]
    paired = set.intersection(*({r["seed"] for r in runs if r["norm"] == norm} for norm in chosen))
    first, _, _, *others = row(model)
    cells = dict(zip(("layer", "batch", "none"), others, strict=True))
    for norm, rate in chosen.items():
        scores = [
            float(run[metric])
            for run in runs
            if run["norm"] == norm and run.get("model.lr", "") == rate and run["seed"] in paired
        ]
        spread = statistics.fmean(scores), statistics.stdev(scores)
        mean, _, published = cells[norm].partition(" (")
        assert mean == " ± ".join(f"{value:.{digits}f}" for value in spread)
        assert first.endswith(f", {len(scores)} seeds")
        card = f"{CARDS.get(model)}.{norm if norm == 'none' else f'{norm}norm'}"
        if (ROOT / "model_cards" / card).is_dir():
            assert published == f"{factor * measured(card)[metric]:.{digits}f})"


@pytest.mark.parametrize(("norm", "column"), [("layernorm", 3), ("none", 5)])
def test_readme_and_page_have_the_scores_of_the_cards(norm: str, column: int) -> None:
    assert row("DRAW")[column] == f"{measured(f'draw.{norm}')['bound']:.1f}"
    assert row("Handwriting")[column] == f"{measured(f'handwriting.{norm}')['sequence_nll']:.1f}"
    text = (RESULTS / "handwriting.md").read_text(encoding="utf-8")
    assert f"{measured(f'handwriting.{norm}')['sequence_nll']:.1f}" in text
