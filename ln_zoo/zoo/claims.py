"""The claims of the paper as data: what tests each, by which rule, and with which outcome.

They live in ``claims.yaml``; this file checks it, decides by a rule, and makes the page of it.

    >>> claim("draw-speed").outcome.verdict
    'holds'
"""

from __future__ import annotations

import functools
import math
import posixpath
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

HOLDS, DOES_NOT_HOLD, UNDECIDED = "holds", "does not hold", "undecided"
#: Of a claim without outcome.
NOT_TESTED = "not yet tested"
#: Sizes of the sweeps.
SIZES = ("paper", "reduced")
#: Where the page of all claims lies in the repository.
PAGE = "docs/results/claims.md"
_KINDS = ("faster", "lower", "higher", "comparable", "grows")


@dataclass(frozen=True)
class Rule:
    """How a sweep decides a claim.

    Attributes:
        kind: ``"faster"``, ``"lower"``, ``"higher"``, ``"comparable"`` or ``"grows"``.
        metric: of the curves (``faster``) or of the test.
        norm: that the claim is about.
        baseline: that it is compared with.
        setting: ``grows`` alone: the option with which the lead of the norm grows.
        less: the value at which the lead is said to be smaller.
        more: the value at which it is said to be larger.
        margin: ``comparable`` alone: the largest difference that counts as none, in the
            units of the report (points of a percentage).
    """

    kind: str
    metric: str
    norm: str
    baseline: str
    setting: str = ""
    less: str = ""
    more: str = ""
    margin: float = 0.0

    @property
    def words(self) -> str:
        """The rule as a sentence."""
        text = {
            "faster": "`{0.norm}` meets the best `{0.metric}` of `{0.baseline}` after fewer "
            "updates",
            "lower": "`{0.norm}` has a lower test `{0.metric}` than `{0.baseline}`",
            "higher": "`{0.norm}` has a higher test `{0.metric}` than `{0.baseline}`",
            "comparable": "the test `{0.metric}` of `{0.norm}` and `{0.baseline}` differ by less "
            "than {0.margin:g}",
            "grows": "the lead in test `{0.metric}` of `{0.norm}` over `{0.baseline}` is larger "
            "with `{0.setting}` {0.more} than with {0.less}",
        }
        return text[self.kind].format(self) + "."


@dataclass(frozen=True)
class Outcome:
    """The outcome of a claim here.

    Attributes:
        verdict: ``"holds"``, ``"does not hold"`` or ``"undecided"``.
        size: ``"paper"`` or ``"reduced"``.
        seeds: behind it; ``None``: it depends on none.
        number: the one that says most, with its interval.
        rule_after_runs: whether the rule was written when the runs were known.
    """

    verdict: str
    size: str
    seeds: int | None
    number: str | None
    rule_after_runs: bool = False


@dataclass(frozen=True)
class Claim:
    """One claim of the paper; the attributes are the keys of ``claims.yaml``."""

    name: str
    section: str
    claim: str
    page: str | None
    outcome: Outcome | None
    reason: str
    rule: Rule | None = None
    sweep: dict[str, str] = field(default_factory=dict, hash=False)
    command: str | None = None

    @property
    def verdict(self) -> str:
        """That of the outcome, or that there is none."""
        return self.outcome.verdict if self.outcome else NOT_TESTED


def claims() -> tuple[Claim, ...]:
    """All claims, in the order of the file."""
    return _load()


def claim(name: str) -> Claim:
    """The claim of that name.

    Raises:
        KeyError: if there is none.
    """
    return {each.name: each for each in claims()}[name]


def decide(low: float, high: float, wanted: str) -> str:
    """The verdict of an interval: on the wanted side of 0, on the other, or around it.

    Args:
        low: lower end; NaN where there is no interval.
        high: upper end.
        wanted: ``"below"`` or ``"above"``.

    Raises:
        ValueError: for another side.

    Example:
        >>> decide(-0.3, -0.1, "below"), decide(-0.3, 0.1, "below"), decide(0.1, 0.3, "below")
        ('holds', 'undecided', 'does not hold')
    """
    if wanted not in ("below", "above"):
        raise ValueError(f"wanted must be 'below' or 'above', got {wanted!r}")
    if math.isnan(low) or math.isnan(high) or low <= 0 <= high:
        return UNDECIDED
    return HOLDS if (high < 0) == (wanted == "below") else DOES_NOT_HOLD


def decide_margin(low: float, high: float, margin: float) -> str:
    """The verdict of an interval on a difference that is said to be small.

    Args:
        low: lower end; NaN where there is no interval.
        high: upper end.
        margin: the largest difference that counts as none.

    Example:
        >>> decide_margin(-0.3, 0.4, 0.5), decide_margin(-0.3, 0.6, 0.5)
        ('holds', 'undecided')
        >>> decide_margin(0.6, 0.8, 0.5)
        'does not hold'
    """
    if -margin < low and high < margin:
        return HOLDS
    return DOES_NOT_HOLD if low > margin or high < -margin else UNDECIDED


# The page


def page(folder: str = "") -> str:
    """The page of all claims, in Markdown.

    Args:
        folder: where the page lies in the repository, such as ``"docs/results"``: links are
            relative to it.
    """
    source = posixpath.relpath("ln_zoo/zoo/claims.yaml", folder or ".")
    count = Counter(each.verdict for each in claims())
    failed, left = count[DOES_NOT_HOLD], count[NOT_TESTED]
    late = ", ".join(
        f"`{each.name}`" for each in claims() if each.outcome and each.outcome.rule_after_runs
    )
    head = [
        "# The claims of the paper",
        f"**Of {count.total()} claims, {count[HOLDS]} hold here, {failed} "
        f"{'does' if failed == 1 else 'do'} not and {count[UNDECIDED]} are undecided. "
        f"{f'Not yet tested: {left}.' if left else 'Each has been tested at some size.'}**",
        "The table has each claim of [Layer Normalization](https://arxiv.org/abs/1607.06450) (Ba, "
        "Kiros, Hinton 2016) with its verdict. `ln-zoo reproduce` lists them; `ln-zoo reproduce "
        "NAME --size reduced` runs the sweep for one and prints its verdict. For formulas and "
        "untrained networks it runs an analysis instead. Claims without a command below are "
        "judged by hand.",
        "Where a claim has a rule, given below, the verdict follows it. The other verdicts are "
        "ours, for the reasons given. A rule looks at the 95 % interval of the paired t statistic "
        "over seeds:",
        "- *holds*: the interval lies on the side of the claim;\n"
        "- *does not hold*: it lies on the other side;\n"
        "- *undecided*: it contains the value of no effect (0 for a difference, 1 for a ratio), or "
        "there is one seed.",
        "*Faster* compares the updates needed to reach the best value of the baseline. If no seed "
        "reaches it, the claim does not hold; if only some do, it is undecided. Where several "
        "settings were run, each method is taken at its best by validation; a *lead* is a mean "
        "over them.",
        "*Comparable* values differ by less than a margin, which the rule gives. Such a claim "
        "holds if the interval lies within the margin, and does not if it lies outside.",
        "*Paper* means the paper's size, *reduced* a smaller one.",
        f"Rules were fixed before the runs{f', except for {late}' if late else ''}. Some runs are "
        "shorter than the sweeps given here, as the reasons say.",
        f"This page is made by `ln-zoo reproduce --write {PAGE}` from [claims.yaml]({source}).",
    ]
    return "\n\n".join([*head, table(folder), *(_section(each) for each in claims())]) + "\n"


def table(folder: str = "") -> str:
    """All claims in a Markdown table, with links relative to ``folder``."""
    lines = ["| § | claim | verdict | number | size, seeds | name | more |", "|" + "---|" * 7]
    details = posixpath.relpath(PAGE, folder or ".")
    for each in claims():
        outcome = each.outcome
        size = ""
        if outcome:
            size = outcome.size + (f", {outcome.seeds}" if outcome.seeds else "")
        link = ""
        if each.page:
            path = posixpath.relpath(each.page, folder or ".")
            link = f"[{posixpath.basename(path)}]({path})"
        number = (outcome.number if outcome else None) or ""
        name = f"[{each.name}]({details}#{each.name})"
        cells = [each.section, each.claim, f"**{each.verdict}**", number, size, name, link]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _section(each: Claim) -> str:
    lines = [f"## `{each.name}`", "", f"Section {each.section}. {each.claim}.", ""]
    lines.append(f"**{each.verdict[0].upper()}{each.verdict[1:]}.** {each.reason}")
    if each.rule:
        lines += ["", f"Rule: {each.rule.words}"]
    runs = []
    for size in filter(each.sweep.__contains__, SIZES):
        own, dashes, options = each.sweep[size].partition(" -- ")
        out = f"--out sweeps/{each.name}-{size}"
        runs.append(f"ln-zoo sweep {own} {out}{dashes}{options}  # {size}")
    runs += [f"ln-zoo {each.command}"] if each.command else []
    if runs:
        lines += ["", "```bash", *runs, "```"]
    return "\n".join(lines)


# The file


@functools.cache
def _load() -> tuple[Claim, ...]:
    text = files("ln_zoo.zoo").joinpath("claims.yaml").read_text(encoding="utf-8")
    return parse(yaml.safe_load(text))


def parse(raw: Any) -> tuple[Claim, ...]:
    """Checks the content of ``claims.yaml``.

    Raises:
        ValueError: for unknown or missing keys, kinds, verdicts or sizes, or a name given twice;
            the message names the claim.
    """
    found: list[Claim] = []
    for entry in raw["claims"]:
        name = entry.get("name", entry)
        try:
            rule = Rule(**entry["rule"]) if "rule" in entry else None
            outcome = Outcome(**entry["outcome"]) if entry["outcome"] else None
            each = Claim(**entry | {"rule": rule, "outcome": outcome})
        except (KeyError, TypeError) as error:
            raise ValueError(f"claim {name}: {error}") from error
        if problem := _problem(each, [other.name for other in found]):
            raise ValueError(f"claim {name}: {problem}")
        found.append(each)
    return tuple(found)


def _problem(each: Claim, names: Sequence[str]) -> str:
    """What is wrong with a claim, or nothing."""
    if each.name in names:
        return "it appears twice"
    if each.rule and each.rule.kind not in _KINDS:
        return f"kind {each.rule.kind!r} is not one of {_KINDS}"
    if each.rule:
        of_setting = (each.rule.setting, each.rule.less, each.rule.more)
        if each.rule.kind == "grows" and not all(of_setting):
            return "a rule of this kind needs a setting and two values of it"
        if each.rule.kind != "grows" and any(of_setting):
            return "a rule of this kind takes no setting"
        if (each.rule.kind == "comparable") != (each.rule.margin > 0):
            return "a margin above 0 belongs to rules of the kind 'comparable', and to no other"
    if bool(each.rule) != bool(each.sweep):
        return "a rule needs a sweep, and a sweep a rule"
    if unknown := set(each.sweep) - set(SIZES):
        return f"sizes {sorted(unknown)} are none of {SIZES}"
    if each.rule:
        for arguments in each.sweep.values():
            words = shlex.split(arguments)
            # As a sweep names them: by their files.
            given = words[words.index("--norms") + 1].split(",")
            norms = {norm.rpartition("/")[2].removesuffix(".yaml") for norm in given}
            if not {each.rule.norm, each.rule.baseline} <= norms:
                return f"its sweep lacks a norm of the rule: {arguments}"
            settings = dict(word.split("=", 1) for word in words if "=" in word)
            values = settings.get(each.rule.setting, "").split(",")
            if each.rule.kind == "grows" and not {each.rule.less, each.rule.more} <= {*values}:
                return f"its sweep lacks a value of {each.rule.setting}: {arguments}"
    outcome = each.outcome
    if outcome and outcome.verdict not in (HOLDS, DOES_NOT_HOLD, UNDECIDED):
        return f"unknown verdict {outcome.verdict!r}"
    if outcome and outcome.size not in SIZES:
        return f"unknown size {outcome.size!r}"
    return ""
