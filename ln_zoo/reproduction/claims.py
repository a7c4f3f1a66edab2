"""The claims of the paper as data: rule, sweep and outcome of each.

Reads ``claims.yaml``, which ``tests/reproduction/test_claims.py`` checks.

    >>> claim("draw-speed").quote
    'It highlights the speedup benefit of applying layer normalization that the layer normalized...'
"""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from ln_zoo.sweeps.grid import parse_seeds
from ln_zoo.utils import schema
from ln_zoo.utils.package_data import read_data

HOLDS, IN_PART, DOES_NOT_HOLD = "holds", "holds in part", "does not hold"
UNDECIDED = "undecided"
#: Verdict of a claim without an outcome.
NOT_TESTED = "not yet tested"
#: In the order of the tables.
VERDICTS = (HOLDS, IN_PART, DOES_NOT_HOLD, UNDECIDED)
#: Sizes of the sweeps.
SIZES = ("paper", "reduced")
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
        words: str = content()["kinds"][self.kind].format(self)
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

    def sweep_arguments(self, size: str, seeds: str | None = None) -> list[str]:
        """Arguments of the sweep of a size, but for its folder.

        ``seeds`` replaces the seeds: a list, or a number of them from the claim's first.
        """
        words = shlex.split(self.sweep[size])
        if seeds is not None:
            place = words.index("--seeds") + 1
            if seeds.isdigit() and int(seeds) >= 1:
                first = parse_seeds(words[place])[0]
                seeds = ",".join(map(str, range(first, first + int(seeds)))) + ","
            words[place] = seeds
        return words

    @property
    def verdict(self) -> str:
        """The verdict of each size, as text."""
        if not self.outcomes:
            return NOT_TESTED
        if len(self.outcomes) == 1:
            return self.outcomes[0].verdict
        return ", ".join(f"{each.verdict} ({each.size})" for each in self.outcomes)


def content() -> dict[str, Any]:
    """The content of ``claims.yaml``."""
    return read_data("reproduction/claims.yaml")


@functools.cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    return tuple(schema.read(Claim, each, "claims.yaml") for each in content()["claims"])


def claim(name: str) -> Claim:
    """The claim of that name."""
    return {each.name: each for each in claims()}[name]


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
