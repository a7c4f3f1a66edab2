"""The page of all claims, its part of a README, and the table of old and new verdicts."""

from __future__ import annotations

import functools
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ln_zoo.reproduction.claims import (
    BETTER,
    CONFIRMED,
    IN_PART,
    NOT_MEASURED,
    NOT_STATED,
    PAPER,
    REDUCED,
    REFUTED,
    SAME,
    UNDECIDED,
    WORSE,
    Claim,
    Comparison,
    Outcome,
    claims,
)
from ln_zoo.utils.package_data import render_template
from ln_zoo.utils.tables import markdown_table

#: Paths in the repository.
PAGE, HISTORY = "docs/results/claims.md", "docs/results/protocol_history.md"
PICTURE = "docs/figures/claims.png"
#: Between these lines of a README, and of the history, stands what is computed.
MARKS = ("<!-- claims: made by `ln-zoo reproduce --write` -->", "<!-- end of claims -->")
#: How a word stands to the paper's.
AS_CLAIMED, AGAINST, NOT_CLAIMED = "as claimed", "against", "not claimed"
#: Phrases of the summary for sizes of primary outcomes.
_SIZES = {
    PAPER: "have the paper's network and data",
    REDUCED: "are smaller",
    NOT_STATED: "is of a size that the paper does not state",
}


class Entry(NamedTuple):
    """A row of a claim with its outcome."""

    claim: Claim
    row: Comparison
    outcome: Outcome

    @property
    def stands(self) -> str:
        """How its word stands to the paper's."""
        return stands(self.row, self.outcome.word)


def entries(group: str = "") -> list[Entry]:
    """All rows with their outcomes, of all groups or of one."""
    return [
        Entry(claim, row, outcome)
        for claim in claims()
        if group in ("", claim.group)
        for row, outcome in zip(claim.rows, claim.outcomes, strict=True)
    ]


def stands(row: Comparison, word: str) -> str:
    """How a word stands to the paper's: one of three constants of this module, or the word."""
    if word in (UNDECIDED, NOT_MEASURED, IN_PART):
        return word
    if not row.claimed:
        return NOT_CLAIMED
    return AS_CLAIMED if word == row.claimed else AGAINST


def claims_page(folder: str = "") -> str:
    """The page of all claims, in Markdown, with links relative to a folder of the repository."""
    return render_template(
        "reproduction/templates/claims.md.jinja",
        _filters(folder),
        claims=[[claim, [each for each in entries() if each.claim is claim]] for claim in claims()],
        answers=answers(),
        other_answers=other_answers(),
        primary=[each for each in entries() if each.row.primary],
        other=[each for each in entries("experiment") if not each.row.primary],
        mechanism=entries("mechanism"),
        theory=entries("theory"),
        page_path=PAGE,
        picture=PICTURE,
    )


def readme_part() -> str:
    """The picture and three sentences, with links from the root."""
    text = "\n\n".join(answers(PAGE))
    alt = "Forest plot: speed of layer norm in each experiment, with 95 % intervals"
    return f"[![{alt}]({PICTURE})]({PAGE})\n\n{text}"


def answers(page: str = "") -> list[str]:
    """What holds, what does not, and what nobody knows yet; links lead to a page's sections."""
    theory = entries("theory")
    primary = [each for each in entries() if each.row.primary]
    beside = [
        each
        for each in entries("experiment")
        if each.claim.primary and not each.row.primary and each.stands == AGAINST
    ]
    sizes = Counter(each.row.size for each in primary)
    shorter = sum(each.row.length == REDUCED for each in primary)
    links, compared = functools.partial(_links, page), functools.partial(_compared, page, primary)
    others = {kind: len({each.claim.name for each in of}) for kind, of in _others().items()}

    def number(kind: str) -> str:
        return f"[{others[kind]} of {sum(others.values())} other claims]({page}#other-comparisons)"

    parts = {
        "What holds": [
            ("By fresh runs, layer norm is {}.", compared(BETTER, "faster than")),
            ("The theory is right on {}.", links(_with(theory, CONFIRMED))),
            ("All exploratory comparisons agree with the paper on {}.", number(AS_CLAIMED)),
        ],
        "What does not": [
            ("By fresh runs, layer norm is {}.", compared(WORSE, "slower than")),
            ("By fresh runs, it is {}.", compared(SAME, "only as fast as")),
            ("The theory is wrong on {}.", links(_with(theory, REFUTED))),
            ("The theory is right in part on {}.", links(_with(theory, IN_PART))),
            ("At least one exploratory comparison differs from the paper on {}.", number(AGAINST)),
            ("Beside the primary outcomes, these differ: {}.", links(beside)),
        ],
        "What nobody knows yet": [
            ("Fresh runs leave {} open.", links(_with(primary, UNDECIDED))),
            ("Exploratory comparisons leave {} open.", number(UNDECIDED)),
            ("Not measured: {}.", links(_with(entries(), NOT_MEASURED))),
            (f"Of {len(primary)} outcomes, {{}}; {shorter} have fewer updates than the paper.",
             ", ".join(f"{sizes[size]} {text}" for size, text in _SIZES.items() if sizes[size])),
        ],
    }  # fmt: skip
    return [
        f"**{head}:** {' '.join(text.format(found) for text, found in each if found)}"
        for head, each in parts.items()
    ]


def other_answers() -> list[str]:
    """How claims without a primary outcome stand, with links to the sections of this page."""
    others = _others()
    parts = {
        "Agree with the paper": others[AS_CLAIMED],
        "Differ": [each for each in others[AGAINST] if each.claim.group == "experiment"],
        "Differ, on mechanisms": [x for x in others[AGAINST] if x.claim.group == "mechanism"],
        "Open": others[UNDECIDED],
    }
    return [f"**{head}:** {_links('', found)}." for head, found in parts.items() if found]


def _with(found: Sequence[Entry], word: str) -> list[Entry]:
    return [each for each in found if each.outcome.word == word]


def _others() -> dict[str, list[Entry]]:
    """Comparisons of claims without a primary outcome, theory apart, by how they stand.

    Of each claim only those of the first kind that it has.
    """
    found: dict[str, list[Entry]] = {AGAINST: [], UNDECIDED: [], AS_CLAIMED: []}
    for claim, group in groupby(entries(), lambda each: each.claim):
        if claim.group == "theory" or claim.primary:
            continue
        apart: dict[str, list[Entry]] = {}
        for each in group:
            apart.setdefault(each.stands, []).append(each)
        if first := next((kind for kind in found if kind in apart), None):
            found[first] += apart[first]
    return found


def _compared(page: str, primary: Sequence[Entry], word: str, phrase: str) -> str:
    """Links to primary outcomes of a word, by the method that layer norm is compared with."""
    methods: dict[str, list[Entry]] = {}
    for each in _with(primary, word):
        methods.setdefault(each.claim.compared_with, []).append(each)
    return ". It is ".join(f"{phrase} {name} in {_links(page, of)}" for name, of in methods.items())


def _links(page: str, found: Iterable[Entry]) -> str:
    """Links to claims by their short names.

    Where only some comparisons of a claim are meant, with their names if its primary outcome is not
    among them, or the number of each word.
    """
    texts = []
    for claim, group in groupby(found, lambda each: each.claim):
        of = list(group)
        rows = [each.row for each in of]
        text = f"[{claim.short or claim.name.replace('-', ' ')}]({page}#{claim.name})"
        if any(row.primary for row in rows) or len(rows) == len(claim.rows):
            texts.append(text)
        elif claim.primary:
            texts.append(f"{text} ({'; '.join(row.of for row in rows)})")
        else:
            words = Counter(each.outcome.word for each in of)
            counts = ", ".join(f"{number} {word}" for word, number in words.items())
            texts.append(f"{text} ({counts}, of {len(claim.rows)})")
    return ", ".join(texts)


def _filters(folder: str) -> dict[str, Callable[..., str]]:
    return {
        "link": lambda path: posixpath.relpath(path, folder or "."),
        "name": posixpath.basename,
    }


def history() -> str:
    """Old and new verdict of every row, and their counts."""
    now: dict[str, list[str]] = {"judged": [], "exploratory": [], "theory": []}
    for each in entries():
        kind = "judged" if each.outcome.judged else "exploratory"
        now["theory" if each.claim.group == "theory" else kind].append(each.stands)
    columns = {
        "rules of 2026-11-27": Counter(row.old for _, row, _ in entries() if row.old),
        **{f"protocol, {kind}": Counter(found) for kind, found in now.items()},
        "all, without Holm": Counter(stands(r, o.uncorrected or o.word) for _, r, o in entries()),
    }
    kinds = {
        "holds": ("holds", AS_CLAIMED),
        "in part": ("holds in part", IN_PART),
        "does not hold": ("does not hold", AGAINST),
        UNDECIDED: (UNDECIDED,),
        NOT_MEASURED: (NOT_MEASURED,),
        NOT_CLAIMED: (NOT_CLAIMED,),
    }
    rows = [
        [kind, *(str(sum(count[word] for word in words)) for count in columns.values())]
        for kind, words in kinds.items()
    ]
    counts = markdown_table(["", *columns], rows)
    head = ["claim", "comparison", "before", "now", "without Holm", "reason"]
    return f"{counts}\n\n{markdown_table(head, _changes())}"


def _changes() -> Iterator[list[str]]:
    for claim, row, outcome in entries():
        judged = "" if outcome.judged or claim.group == "theory" else ", exploratory"
        word = outcome.word + (judged if outcome.number else "")
        reason = row.because or ("unchanged" if row.old else "added")
        words = [row.old or "-", word, outcome.uncorrected or outcome.word, reason]
        yield [f"[{claim.name}](claims.md#{claim.name})", row.of, *words]


def with_part(text: str, part: str) -> str:
    """A text with its computed part as it is now."""
    first, last = MARKS
    return re.sub(
        f"{re.escape(first)}.*?{re.escape(last)}",
        lambda _: f"{first}\n{part}\n{last}",
        text,
        flags=re.DOTALL,
    )


def write_page(path: Path) -> dict[str, Path]:
    """Write the page, and the computed parts of the README and the history beside it, if there.

    The README is that of the nearest folder above that has the marks. Returns the written files.
    """
    path = path.absolute()
    written, folder = {}, ""
    for parent in path.parents:
        readme = parent / "README.md"
        if readme.is_file() and MARKS[0] in (text := readme.read_text(encoding="utf-8")):
            readme.write_text(with_part(text, readme_part()), encoding="utf-8")
            written["README"] = readme
            folder = path.parent.relative_to(parent).as_posix()
            past = parent / HISTORY
            if past.is_file():
                text = past.read_text(encoding="utf-8")
                past.write_text(with_part(text, history()), encoding="utf-8")
                written["history"] = past
            break
    if path not in written.values():
        path.write_text(claims_page(folder), encoding="utf-8")
        written["page"] = path
    return written
