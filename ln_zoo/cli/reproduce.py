"""``ln-zoo reproduce``: the claims of the paper, and a sweep and a verdict for each."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ln_zoo.cli import compare
from ln_zoo.cli.errors import told
from ln_zoo.cli.names import nearest
from ln_zoo.cli.sweep import main as sweep
from ln_zoo.cli.sweep.evidence import recompute
from ln_zoo.cli.sweep.grid import SweepError, read_grid
from ln_zoo.cli.sweep.report import Report
from ln_zoo.cli.sweep.verdicts import (
    Finding,
    judge_growth,
    judge_own_best,
    judge_scores,
    judge_speed,
    log_odds,
)
from ln_zoo.zoo import claims
from ln_zoo.zoo.claims import Claim, Rule

#: Between these lines of a README stands the table.
_MARKS = ("<!-- claims: made by `ln-zoo reproduce --write` -->", "<!-- end of claims -->")


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, also where a claim does not hold; 1 if a run failed, or if a verdict
        computed from tables differs from the one that is written; 2 if nothing was run
        because the input is wrong; 128 plus the number of the signal that stopped it.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.write:
            _write(Path(arguments.write))
            return 0
        if arguments.recompute:
            return _recompute()
        if arguments.json:
            _json()
            return 0
        if arguments.claim is None:
            _list()
            return 0
        return _reproduce(_named(arguments.claim), arguments)
    except SweepError as error:
        return told(error, "reproduce", code=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ln-zoo reproduce",
        description="Lists the claims of the paper with our verdicts. With the name of a "
        "claim, runs the sweep that tests it and prints its verdict. If it is "
        "stopped, the same command resumes.",
        allow_abbrev=False,
    )
    parser.add_argument("claim", nargs="?", help="name of the claim; default: list all")
    parser.add_argument(
        "--size", choices=claims.SIZES, default="reduced", help="default: %(default)s"
    )
    parser.add_argument("--out", help="folder of the sweep; default: sweeps/CLAIM-SIZE")
    parser.add_argument(
        "--seeds", help="as for ln-zoo sweep, in place of the claim's; more may be added later"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; default: %(default)s")
    parser.add_argument(
        "--print",
        action="store_true",
        help="run nothing, print one command per line, as in ln-zoo sweep",
    )
    parser.add_argument(
        "--gather", action="store_true", help="run nothing, judge by the runs that have finished"
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="run nothing, judge all claims by the tables in docs/figures of the current folder",
    )
    parser.add_argument(
        "--json", action="store_true", help="run nothing, print all claims with outcomes as JSON"
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        help="run nothing, write the page of all claims, and the table into the "
        "README.md of a parent folder, if that has one",
    )
    return parser


def judge(report: Report, rule: Rule) -> Finding:
    """The verdict of a rule on what has finished of a sweep.

    Raises:
        SweepError: if no seed has runs of both norms, or if there is no such metric.
    """
    try:
        if rule.kind in claims.OF_CURVES:
            return _judge_curves(report, rule)
        if rule.metric not in report.test_metrics:
            known = ", ".join(report.test_metrics)
            raise SweepError(f"the test has no {rule.metric!r}: {known}")
        if rule.kind == "grows":
            return _judge_growth(report, rule)
        mine, theirs = (
            report.by_seed(report.best_label(norm), rule.metric)
            for norm in (rule.norm, rule.baseline)
        )
        return judge_scores(mine, theirs, rule.metric, rule.kind, rule.margin, rule.matters)
    except ValueError as error:
        raise SweepError(f"{report.out}: {error}") from error


def _judge_curves(report: Report, rule: Rule) -> Finding:
    mine, theirs = (
        {
            member.run.seed: compare.read_curves(member.curves, [rule.metric], "step")[rule.metric]
            for member in report.of_label(report.best_label(norm))
        }
        for norm in (rule.norm, rule.baseline)
    )
    if rule.kind == "own_best":
        assert rule.value is not None
        return judge_own_best(mine, theirs, rule.metric, rule.value)
    return judge_speed(mine, theirs, rule.metric, matters=rule.matters)


def _judge_growth(report: Report, rule: Rule) -> Finding:
    names = rule.norm, rule.baseline, rule.metric, rule.setting
    less, more = (report.leads(*names, value) for value in (rule.less, rule.more))
    odds = None
    if rule.log_odds:
        odds = (
            report.leads(*names, rule.less, log_odds),
            report.leads(*names, rule.more, log_odds),
        )
    return judge_growth(less, more, rule.metric, rule.matters, odds)


def _named(name: str) -> Claim:
    try:
        return claims.claim(name)
    except KeyError:
        known = [each.name for each in claims.claims()]
        raise SweepError(
            f"no claim {name!r}{nearest(name, known)} (`ln-zoo reproduce` lists them)"
        ) from None


def _reproduce(claim: Claim, arguments: argparse.Namespace) -> int:
    if not arguments.print:
        print(f"section {claim.section}: {claim.claim}")
    if claim.rule.kind == "measured":
        return _measure(claim, arguments)
    if arguments.size not in claim.sweep:
        raise SweepError(
            f"{claim.name} has no sweep of --size {arguments.size}, only {', '.join(claim.sweep)}"
        )
    out = arguments.out or f"sweeps/{claim.name}-{arguments.size}"
    code = 0
    if not arguments.gather:
        own, dashes, options = claim.sweep[arguments.size].partition(" -- ")
        words = shlex.split(own)
        if arguments.seeds:
            words[words.index("--seeds") + 1] = arguments.seeds
        argv = [*words, f"--out={out}", f"--jobs={arguments.jobs}"]
        argv += ["--print"] if arguments.print else [f"--baseline={claim.rule.baseline}"]
        code = sweep([*argv, *(["--", *shlex.split(options)] if dashes else [])])
        if arguments.print or code > 1:
            return code
    grid = read_grid(Path(out))
    if grid is None:
        raise SweepError(f"there is no sweep in {out}")
    found = judge(Report(grid, Path(out), claim.rule.baseline), claim.rule)
    print(f"{claim.claim}: {_in_words(found)} ({arguments.size} size)")
    return code


def _in_words(found: Finding) -> str:
    text = f"{found.verdict}; {found.number}, {found.seeds} seed{'s' if found.seeds > 1 else ''}"
    if found.verdict == claims.UNDECIDED and found.seeds_needed:
        text += f"; some {found.seeds_needed} seeds would decide it"
    return text


def _measure(claim: Claim, arguments: argparse.Namespace) -> int:
    if claim.command is None:
        raise SweepError(f"{claim.name} has no command: {claim.verdict}. {claim.reason}".strip())
    if arguments.print:
        print(f"ln-zoo {claim.command}")
        return 0
    code = 0
    if not arguments.gather:
        from ln_zoo.cli import main as command

        code = command(shlex.split(claim.command))
    print(f"rule: {claim.rule.words}")
    print(f"our verdict: {claim.verdict}")
    return code


def _recompute() -> int:
    """Computes verdicts from the tables in git; returns 1 if one differs from what is written."""
    root = Path.cwd()
    same = True
    for each in claims.claims():
        for outcome in each.outcomes:
            name = f"{each.name} ({outcome.size})"
            if not outcome.data:
                print(f"{name}: {outcome.verdict}; no table, {_source(each)}")
                continue
            found = recompute(each.rule, outcome, root)
            agrees = found.verdict == outcome.verdict and found.seeds == outcome.seeds
            same &= agrees
            told_so = "" if agrees else f" BUT claims.yaml: {outcome.verdict}, {outcome.seeds}"
            print(f"{name}: {_in_words(found)}{told_so}")
    return 0 if same else 1


def _source(claim: Claim) -> str:
    return f"run `ln-zoo {claim.command}`" if claim.command else "see its page"


def _json() -> None:
    rows = [
        {
            "name": each.name,
            "section": each.section,
            "quote": each.quote,
            "claim": each.claim,
            "rule": each.rule.words,
            "rule_date": each.fixed,
            "known": each.known,
            "verdict": outcome.verdict if outcome else claims.NOT_TESTED,
            "size": outcome.size if outcome else None,
            "seeds": outcome.seeds if outcome else None,
            "number": outcome.number if outcome else None,
            "interval": outcome.interval if outcome else None,
            "runs_date": outcome.runs if outcome else None,
            "data": outcome.data.get("file") if outcome else None,
            "missing": (outcome.missing or None) if outcome else None,
        }
        for each in claims.claims()
        for outcome in each.outcomes or (None,)
    ]
    print(json.dumps(rows, indent=2, ensure_ascii=False))


def _list() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    wide = console.width >= 120
    table = Table(caption="in words, with reasons: docs/results/claims.md", caption_justify="left")
    for head in ("claim", "§", *(["what"] if wide else []), "size", "verdict"):
        table.add_column(head)
    for each in claims.claims():
        for outcome in each.outcomes or (None,):
            words = [each.claim] if wide else []
            ends = [outcome.size, outcome.verdict] if outcome else ["", claims.NOT_TESTED]
            table.add_row(*map(Text, (each.name, each.section, *words, *ends)))
    console.print(table)


def _write(path: Path) -> None:
    for folder in path.absolute().parents:
        readme = folder / "README.md"
        if readme.is_file() and _MARKS[0] in readme.read_text(encoding="utf-8"):
            page = claims.page(path.absolute().parent.relative_to(folder).as_posix())
            readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"table: {readme}")
            break
    else:
        page = claims.page()
    path.write_text(page, encoding="utf-8")
    print(f"page: {path}")


def with_table(readme: str) -> str:
    """A README with the table of claims as it is now."""
    first, last = _MARKS
    return re.sub(
        f"{re.escape(first)}.*?{re.escape(last)}",
        lambda _: f"{first}\n{claims.readme_table()}\n{last}",
        readme,
        flags=re.DOTALL,
    )
