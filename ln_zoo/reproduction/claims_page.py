"""The page of all claims, and the table of them in a README."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from pathlib import Path

from ln_zoo.reproduction.claims import (
    DOES_NOT_HOLD,
    HOLDS,
    IN_PART,
    NOT_TESTED,
    UNDECIDED,
    VERDICTS,
    claims,
    content,
)
from ln_zoo.utils.package_data import render_template

#: Path of the page of all claims in the repository.
PAGE = "docs/results/claims.md"
#: Between these lines of a README stands the table.
MARKS = ("<!-- claims: made by `ln-zoo reproduce --write` -->", "<!-- end of claims -->")


def claims_page(folder: str = "") -> str:
    """The page of all claims, in Markdown, with links relative to a folder of the repository."""
    return render_template(
        "reproduction/templates/claims.md.jinja",
        {
            "link": lambda path: posixpath.relpath(path, folder or "."),
            "name": posixpath.basename,
        },
        claims=claims(),
        count=_count(),
        introduction=content()["page"].strip(),
        page_path=PAGE,
        not_tested=NOT_TESTED,
    )


def readme_table() -> str:
    """Rows marked ``readme``, by verdict, as a Markdown table with links from the root."""
    rows = [(each, o) for each in claims() for o in each.outcomes if o.readme]
    rows.sort(key=lambda row: VERDICTS.index(row[1].verdict))
    return render_template(
        "reproduction/templates/claims_readme.md.jinja",
        {"name": posixpath.basename},
        rows=rows,
        count=_count(),
        page_path=PAGE,
    ).strip()


def _count() -> str:
    rows = [each for claim in claims() for each in claim.outcomes]
    count = Counter(each.verdict for each in rows)
    left = sum(not each.outcomes for each in claims())
    reduced = sum(each.size == "reduced" for each in rows)
    text = (
        f"{len(claims())} claims, {len(rows)} tests, {reduced} of them at a reduced size: "
        f"{count[HOLDS]} hold, {count[IN_PART]} in part, {count[DOES_NOT_HOLD]} do not hold, "
        f"{count[UNDECIDED]} are undecided."
    )
    return text + (f" Claims not yet tested: {left}." if left else "")


def with_table(readme: str) -> str:
    """A README with the table of claims as it is now."""
    first, last = MARKS
    return re.sub(
        f"{re.escape(first)}.*?{re.escape(last)}",
        lambda _: f"{first}\n{readme_table()}\n{last}",
        readme,
        flags=re.DOTALL,
    )


def write_page(path: Path) -> dict[str, Path]:
    """Writes the page, and the table into the README.md of the nearest folder above that has one.

    Returns the written files: ``table``, if there is such a README, and ``page``, if ``path`` is
    another file.
    """
    path = path.absolute()
    written, folder = {}, ""
    for parent in path.parents:
        readme = parent / "README.md"
        if readme.is_file() and MARKS[0] in (text := readme.read_text(encoding="utf-8")):
            readme.write_text(with_table(text), encoding="utf-8")
            written["table"] = readme
            folder = path.parent.relative_to(parent).as_posix()
            break
    if path not in written.values():
        path.write_text(claims_page(folder), encoding="utf-8")
        written["page"] = path
    return written
