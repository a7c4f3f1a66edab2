"""The claims of the paper as data: what is compared, on which table, and its outcome here.

Reads ``claims.yaml``, which defines the keys, and ``outcomes.json``, which `ln-zoo reproduce
--write` computes from the tables in git. The rules are those of ``docs/results/protocol.md``.

    >>> claim("draw-speed").quote
    'It highlights the speedup benefit of applying layer normalization that the layer normalized...'
"""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.resources import files
from typing import Any

from ln_zoo.sweeps.options import parse_seeds
from ln_zoo.utils import schema
from ln_zoo.utils.package_data import read_data

#: Words of a comparison, and of a statement of theory.
BETTER, SAME, WORSE, UNDECIDED = WORDS = ("better", "same", "worse", "undecided")
CONFIRMED, IN_PART, REFUTED = THEORY = ("confirmed", "in part", "refuted")
NOT_MEASURED = "not measured"
#: Groups of claims, counted apart.
GROUPS = ("experiment", "mechanism", "theory")
#: Sizes of the sweeps.
SIZES = ("paper", "reduced")
#: Sizes and lengths of runs: the paper's, smaller, or without one in the paper.
EXTENTS = PAPER, REDUCED, NOT_STATED = (*SIZES, "not stated")


@dataclass(frozen=True)
class Outcome:
    """What the table of a comparison gives; `ln_zoo.reproduction.evidence` computes it."""

    word: str = NOT_MEASURED  #: one of `WORDS` or `THEORY`; with Holm's correction if judged
    number: str = ""  #: the effect with its 95 % interval, as text
    pairs: int | None = None  #: pairs of runs
    judged: bool = False  #: whether all runs began after the protocol; otherwise exploratory
    uncorrected: str = ""  #: the word without Holm's correction
    estimate: float | None = None  #: a ratio for speeds; above 1, or above 0, favours the claim
    low: float | None = None  #: lower end of the interval
    high: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One row of a claim; ``claims.yaml`` defines the keys."""

    kind: str  #: ``speed``, ``end``, ``theory``, ``tasks``, or ``none`` without a table
    of: str = ""  #: what sets it apart from other rows of the claim
    file: str | list[str] = ""
    norm: Any = ""
    baseline: Any = ""
    metric: str = ""
    target: float | str = ""
    x: str = "step"
    timed: str = ""  #: experiment in update_seconds.csv, which turns updates into ``seconds``
    score: str = "last"
    lower: bool = True
    scale: float = 1.0
    log: bool = False
    margin: float = 0.0
    where: dict[str, Any] = field(default_factory=dict, hash=False)
    tasks: dict[str, list[str]] = field(default_factory=dict, hash=False)
    claimed: str = BETTER  #: the paper's word; empty if it has none
    size: str = REDUCED
    length: str = REDUCED
    runs: str = ""  #: dates of the runs
    primary: str = ""  #: name of the primary outcome in the protocol
    pairs: int = 0  #: pairs of judged runs of a primary outcome
    floor: float | None = None
    command: str = ""  #: what measures it, for ``none``
    old: str = ""  #: verdict of 2026-11-28, by the rules of 2026-11-27
    because: str = ""  #: why it changed

    @property
    def files(self) -> list[str]:
        """Tables in git with its runs."""
        names = [self.file] if isinstance(self.file, str) else self.file
        return [f"docs/figures/{name}" for name in names if name]


@dataclass(frozen=True)
class Claim:
    """One claim of the paper; ``claims.yaml`` defines the keys."""

    name: str
    section: str
    quote: str
    claim: str
    page: str
    rows: tuple[Comparison, ...]
    group: str = "experiment"
    short: str = ""  #: name in the summary; default: the name, without hyphens
    note: str = ""
    sweep: dict[str, str] = field(default_factory=dict, hash=False)
    compared_with: str = "no norm"  #: what layer norm is compared with in the primary outcome
    norm: str = ""  #: of the sweep; default of the rows, as are the next two
    baseline: str = ""
    metric: str = ""
    command: str | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each row."""
        return [outcomes().get(key(self, row), Outcome()) for row in self.rows]

    @property
    def primary(self) -> bool:
        """Whether a row is a primary outcome."""
        return any(row.primary for row in self.rows)

    @property
    def words(self) -> str:
        """The distinct words of all rows."""
        return ", ".join(dict.fromkeys(each.word for each in self.outcomes))

    @property
    def commands(self) -> list[str]:
        """Commands that test the claim again."""
        found = []
        for size in filter(self.sweep.__contains__, SIZES):
            own, dashes, options = self.sweep[size].partition(" -- ")
            out = f"--out sweeps/{self.name}-{size}"
            found.append(f"ln-zoo sweep {own} {out}{dashes}{options}  # {size}")
        found += [f"ln-zoo {self.command}"] if self.command else []
        rows = (row for row in self.rows if row.command)
        return found + [f"{row.command}  # {row.of}" if row.of else row.command for row in rows]

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


def key(claim: Claim, row: Comparison) -> str:
    """The name of a row in ``outcomes.json``."""
    return f"{claim.name}: {row.of}" if row.of else claim.name


def content() -> dict[str, Any]:
    """The content of ``claims.yaml``."""
    return read_data("reproduction/claims.yaml")


def protocol_date() -> datetime:
    """The time from which on runs are judged."""
    return datetime.fromisoformat(content()["protocol"])


@functools.cache
def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    found = []
    for each in content()["claims"]:
        shared = {name: each[name] for name in ("norm", "baseline", "metric") if name in each}
        rows = [shared | row for row in each["rows"]]
        found.append(schema.read(Claim, each | {"rows": rows}, "claims.yaml"))
    return tuple(found)


@functools.cache
def outcomes() -> dict[str, Outcome]:
    """The outcomes by `key`, as they were last computed from the tables."""
    text = files("ln_zoo").joinpath("reproduction/outcomes.json").read_text(encoding="utf-8")
    return {name: Outcome(**values) for name, values in json.loads(text).items()}


def claim(name: str) -> Claim:
    """The claim of that name."""
    return {each.name: each for each in claims()}[name]


def rows() -> list[dict[str, Any]]:
    """Every row of every claim with its outcome, as plain values."""
    return [
        {
            **{
                name: getattr(each, name) for name in ("name", "section", "group", "quote", "claim")
            },
            **{name: getattr(row, name) for name in ("of", "kind", "claimed", "size", "length")},
            "primary": row.primary or None,
            "runs_date": row.runs or None,
            "data": row.files,
            "command": row.command or None,
            **asdict(outcome),
        }
        for each in claims()
        for row, outcome in zip(each.rows, each.outcomes, strict=True)
    ]
