"""Prose says things as the field does: phrases of `docs/words.txt` are not used."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AVOIDED = dict(
    line.split(" -> ")
    for line in (ROOT / "docs/words.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "configs").rglob("*.yaml"),
    *(ROOT / "ln_zoo").rglob("*.py"),
]


@functools.cache
def texts() -> dict[str, str]:
    """Each page and file, its lines joined: a phrase may be broken across two."""
    return {
        page.relative_to(ROOT).as_posix(): re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))
        for page in PAGES
    }


@pytest.mark.parametrize(("phrase", "better"), AVOIDED.items(), ids=list(AVOIDED))
def test_phrases_to_avoid_are_not_used(phrase: str, better: str) -> None:
    pattern = re.compile(rf"\b{phrase}\b", re.IGNORECASE)
    found = [
        f"{page}: {text[max(0, match.start() - 40) : match.end() + 40]!r}"
        for page, text in texts().items()
        for match in pattern.finditer(text)
    ]
    assert not found, f"say {better!r}: {found}"


def test_a_phrase_is_found() -> None:
    assert re.search(rf"\b{next(iter(AVOIDED))}\b", "The claim comes out in the main.")


def test_each_item_of_a_list_has_a_line() -> None:
    # An editor that fills paragraphs joins items, and the site shows one long item.
    joined = re.compile(r"^(?:- |  )\S.*[.;:)] -(?:$| [A-Z`*\[])", re.MULTILINE)
    assert joined.search("- one. - Two")
    assert joined.search("- one\n  more. -\n  Two")
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES if page.suffix == ".md"}
    found = [
        f"{page.name}: {m[0]!r}" for page, text in pages.items() for m in joined.finditer(text)
    ]
    assert not found
