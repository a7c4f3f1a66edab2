"""The claims of the paper as data: rule, sweep and outcome of each.

Reads ``claims.yaml``, which ``tests/reproduction/test_claims.py`` checks, decides by a rule, and
renders the page of claims.

    >>> claim("draw-speed").quote
    'It highlights the speedup benefit of applying layer normalization that the layer normalized...'
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from ln_zoo.zoo import schema
from ln_zoo.zoo.rendering import read_data, render_template

HOLDS, IN_PART, DOES_NOT_HOLD = "holds", "holds in part", "does not hold"
UNDECIDED = "undecided"
#: Verdict of a claim without an outcome.
NOT_TESTED = "not yet tested"
#: In the order of the tables.
VERDICTS = (HOLDS, IN_PART, DOES_NOT_HOLD, UNDECIDED)
#: Sizes of the sweeps.
SIZES = ("paper", "reduced")
#: Path of the page of all claims in the repository.
PAGE = "docs/results/claims.md"
#: Between these lines of a README stands the table.
MARKS = ("<!-- claims: made by `ln-zoo reproduce --write` -->", "<!-- end of claims -->")
#: Kinds that look at curves, not at test scores.
OF_CURVES = ("faster", "own_best", "lower_best")


@dataclass(frozen=True)
class Rule:
    """How a claim is decided; the head of ``claims.yaml`` defines the kinds."""

    kind: str
    metric: str = ""  #: of the curves (`OF_CURVES`) or of the test
    norm: str = ""  #: subject of the claim
    baseline: str = ""  #: norm that it is compared with
    setting: str = ""  #: for ``grows``: the option with which the lead of the norm grows
    less: str = ""  #: the value with the smaller claimed lead
    more: str = ""  #: the value with the larger claimed lead
    margin: float = 0.0  #: for ``comparable``: largest difference that counts as none
    log_odds: bool = False  #: for ``grows``: whether leads in points and log-odds must agree
    value: float | None = None  #: for ``own_best``: the paper's ratio
    matters: float | None = None  #: smallest effect of interest; for ``faster`` a ratio
    says: str = ""  #: for ``measured``: the rule as text

    @property
    def words(self) -> str:
        """The rule as a sentence."""
        words: str = _content()["kinds"][self.kind].format(self)
        if self.log_odds:
            words += ", in points and in log-odds"
        if self.matters:
            unit = " times the speed" if self.kind == "faster" else ""
            words += f". An effect of {self.matters:g}{unit} matters"
        return f"{words}."


@dataclass(frozen=True)
class Outcome:
    """The outcome of a claim at one size."""

    verdict: str  #: one of `VERDICTS`
    size: str  #: ``"paper"`` or ``"reduced"``
    seeds: int | None  #: their number; None if the outcome depends on none
    number: str  #: effect with its interval
    runs: str  #: dates of the runs
    #: Table in git that it is computed from; see `ln_zoo.reproduction.evidence`.
    data: dict[str, Any] = field(default_factory=dict, hash=False)
    missing: str = ""  #: what would decide an undecided one, and its cost
    interval: list[float] | None = field(default=None, hash=False)  #: of the effect
    readme: bool = False  #: whether README.md has its row

    @property
    def files(self) -> list[str]:
        """Tables in git that it is computed from."""
        groups = self.data.get("tasks", {}).values()
        tables = [self.data, *(task for tasks in groups for task in tasks.values())]
        found = [table["file"] for table in tables if "file" in table]
        return [file for each in found for file in ([each] if isinstance(each, str) else each)]


@dataclass(frozen=True)
class Claim:
    """One claim of the paper; the attributes are the keys of ``claims.yaml``."""

    name: str
    section: str
    quote: str
    claim: str
    page: str
    fixed: date
    known: str
    rule: Rule
    outcomes: tuple[Outcome, ...]
    reason: str
    sweep: dict[str, str] = field(default_factory=dict, hash=False)
    command: str | None = None

    @property
    def commands(self) -> list[str]:
        """Commands that test the claim again."""
        found = []
        for size in filter(self.sweep.__contains__, SIZES):
            own, dashes, options = self.sweep[size].partition(" -- ")
            out = f"--out sweeps/{self.name}-{size}"
            found.append(f"ln-zoo sweep {own} {out}{dashes}{options}  # {size}")
        return found + ([f"ln-zoo {self.command}"] if self.command else [])

    @property
    def verdict(self) -> str:
        """The verdict of each size, as text."""
        if not self.outcomes:
            return NOT_TESTED
        if len(self.outcomes) == 1:
            return self.outcomes[0].verdict
        return ", ".join(f"{each.verdict} ({each.size})" for each in self.outcomes)


def _content() -> dict[str, Any]:
    return read_data("reproduction/claims.yaml")


@functools.cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    return tuple(schema.read(Claim, each, "claims.yaml") for each in _content()["claims"])


def claim(name: str) -> Claim:
    """The claim of that name."""
    return {each.name: each for each in claims()}[name]


def decide(low: float, high: float, wanted: str, matters: float = 0.0) -> str:
    """The verdict of an interval on an effect that is claimed to lie below or above 0.

    The claim holds if the interval lies on that side, and does not if it excludes an effect of the
    size ``matters`` on that side. An interval that is unknown has NaN as its ends.

    Example:
        >>> decide(-0.3, -0.1, "below"), decide(-0.3, 0.1, "below"), decide(0.1, 0.3, "below")
        ('holds', 'undecided', 'does not hold')
        >>> decide(-0.3, 0.1, "below", matters=0.4)
        'does not hold'
    """
    if wanted == "below":
        low, high = -high, -low
    elif wanted != "above":
        raise ValueError(f"wanted must be 'below' or 'above', got {wanted!r}")
    if low > 0:
        return HOLDS
    return DOES_NOT_HOLD if high < matters else UNDECIDED


def decide_margin(low: float, high: float, margin: float) -> str:
    """The verdict of an interval on a difference that is claimed to be less than a margin.

    Example:
        >>> decide_margin(-0.3, 0.4, 0.5), decide_margin(-0.3, 0.6, 0.5)
        ('holds', 'undecided')
        >>> decide_margin(0.6, 0.8, 0.5)
        'does not hold'
    """
    if -margin < low and high < margin:
        return HOLDS
    return DOES_NOT_HOLD if low > margin or high < -margin else UNDECIDED


def combine(verdicts: Iterable[str]) -> str:
    """The verdict of a rule with several parts: if some hold and others do not, it is in part."""
    found = set(verdicts)
    if len(found) == 1:
        return found.pop()
    return IN_PART if {HOLDS, DOES_NOT_HOLD} <= found else UNDECIDED


# The page


def page(folder: str = "") -> str:
    """The page of all claims, in Markdown, with links relative to a folder of the repository."""
    return render_template(
        "reproduction/templates/claims.md.jinja",
        {
            "link": lambda path: posixpath.relpath(path, folder or "."),
            "name": posixpath.basename,
        },
        claims=claims(),
        count=_count(),
        introduction=_content()["page"].strip(),
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


def rows() -> list[dict[str, Any]]:
    """Every claim with each of its outcomes, as plain values."""
    return [
        {
            **{key: getattr(each, key) for key in ("name", "section", "quote", "claim")},
            "rule": each.rule.words,
            "rule_date": str(each.fixed),
            "known": each.known,
            "verdict": outcome.verdict,
            "scale": outcome.size or None,
            "size": outcome.size or None,  # deprecated in 0.2: use `scale`
            "seeds": outcome.seeds,
            "number": outcome.number or None,
            "interval": outcome.interval,
            "runs_date": outcome.runs or None,
            "data": outcome.files,
            "missing": outcome.missing or None,
        }
        for each in claims()
        for outcome in each.outcomes or (Outcome(NOT_TESTED, "", None, "", ""),)
    ]


def with_table(readme: str) -> str:
    """A README with the table of claims as it is now."""
    first, last = MARKS
    return re.sub(
        f"{re.escape(first)}.*?{re.escape(last)}",
        lambda _: f"{first}\n{readme_table()}\n{last}",
        readme,
        flags=re.DOTALL,
    )
