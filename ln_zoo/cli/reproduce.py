"""``ln-zoo reproduce``: the claims of the paper, and a sweep and a verdict for each."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ln_zoo.cli.errors import told
from ln_zoo.cli.names import nearest
from ln_zoo.cli.sweep import main as sweep
from ln_zoo.cli.sweep.grid import SweepError, read_grid
from ln_zoo.cli.sweep.report import Report
from ln_zoo.cli.sweep.statistics import paired
from ln_zoo.zoo import claims
from ln_zoo.zoo.claims import Claim, Rule

#: Between these lines of a README stands the table.
_MARKS = ("<!-- claims: made by `ln-zoo reproduce --write` -->", "<!-- end of claims -->")


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        The exit code: 0, also where a claim does not hold; 1 if a run failed; 2 if nothing was run
        because the input is wrong; 128 plus the number of the signal that stopped it.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.write:
            _write(Path(arguments.write))
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
        "--write",
        metavar="FILE",
        help="run nothing, write the page of all claims, and the table into the "
        "README.md of a parent folder, if that has one",
    )
    return parser


def judge(report: Report, rule: Rule) -> tuple[str, str]:
    """The verdict of a rule on what has finished of a sweep, and its number in words.

    Raises:
        SweepError: if no seed has runs of both norms, or if there is no such metric.
    """
    label, other = report.best_label(rule.norm), report.best_label(rule.baseline)
    if rule.kind == "faster":
        return _judge_speed(report, label, other, rule.metric)
    if rule.metric not in report.test_metrics:
        raise SweepError(f"the test has no {rule.metric!r}: {', '.join(report.test_metrics)}")
    if rule.kind == "grows":
        return _judge_growth(report, rule)
    found = paired(report.by_seed(label, rule.metric), report.by_seed(other, rule.metric))
    if found is None:
        raise SweepError(f"no seed of both {label} and {other} has finished")
    if rule.kind == "comparable":
        verdict = claims.decide_margin(found.low, found.high, rule.margin)
    else:
        side = "below" if rule.kind == "lower" else "above"
        verdict = claims.decide(found.low, found.high, side)
    text = f"{rule.metric} {found.mean:+.3g}{_interval(found.low, found.high, '+')}"
    return verdict, f"{text}, {found.number} seeds"


def _judge_speed(report: Report, label: str, other: str, metric: str) -> tuple[str, str]:
    try:
        reached = report.reach(label, other, metric)
    except ValueError as error:
        raise SweepError(str(error)) from error
    if not reached:
        raise SweepError(f"no seed of both {label} and {other} has finished")
    # A baseline that is best before its first update has learned nothing.
    usable = [r for r in reached if r.baseline_steps > 0 and r.steps > 0]
    missed = [r for r in reached if math.isinf(r.steps)]
    if len(missed) == len(reached) > 1:
        return claims.DOES_NOT_HOLD, f"the best of {other} is never met, {len(reached)} seeds"
    if missed or len(usable) < len(reached):
        met = len(reached) - len(missed)
        return claims.UNDECIDED, f"the best of {other} is met with {met} of {len(reached)} seeds"
    logs = {r.run.seed: math.log(r.steps / r.baseline_steps) for r in usable}
    found = paired(logs, dict.fromkeys(logs, 0.0))
    assert found is not None
    text = f"{math.exp(-found.mean):.2g} times as fast"
    text += _interval(math.exp(-found.high), math.exp(-found.low))
    return claims.decide(found.low, found.high, "below"), f"{text}, {found.number} seeds"


def _judge_growth(report: Report, rule: Rule) -> tuple[str, str]:
    names = rule.norm, rule.baseline, rule.metric, rule.setting
    less, more = (report.leads(*names, value) for value in (rule.less, rule.more))
    found = paired(more, less)
    if found is None:
        raise SweepError(f"no seed has finished at all settings of {rule.less} and {rule.more}")
    seeds = [seed for seed in less if seed in more]
    ends = [math.fsum(leads[seed] for seed in seeds) / len(seeds) for leads in (less, more)]
    text = f"lead in {rule.metric} {ends[0]:+.3g} to {ends[1]:+.3g}, {found.mean:+.3g}"
    text += _interval(found.low, found.high, "+")
    return claims.decide(found.low, found.high, "above"), f"{text}, {found.number} seeds"


def _interval(low: float, high: float, sign: str = "") -> str:
    return "" if math.isnan(low) else f" ({low:{sign}.3g} to {high:{sign}.3g})"


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
    if claim.command and not claim.rule:
        if arguments.print:
            print(f"ln-zoo {claim.command}")
            return 0
        code = 0
        if not arguments.gather:
            from ln_zoo.cli import main as command

            code = command(shlex.split(claim.command))
        print(f"our verdict: {claim.verdict}. {claim.reason}")
        return code
    if claim.rule is None or not claim.sweep:
        raise SweepError(f"{claim.name} has no sweep: {claim.verdict}. {claim.reason}")
    if arguments.size not in claim.sweep:
        raise SweepError(
            f"{claim.name} has no sweep of --size {arguments.size}, only {', '.join(claim.sweep)}"
        )
    out = arguments.out or f"sweeps/{claim.name}-{arguments.size}"
    if not arguments.gather:
        own, dashes, options = claim.sweep[arguments.size].partition(" -- ")
        argv = [*shlex.split(own), f"--out={out}", f"--jobs={arguments.jobs}"]
        argv += ["--print"] if arguments.print else [f"--baseline={claim.rule.baseline}"]
        code = sweep([*argv, *(["--", *shlex.split(options)] if dashes else [])])
        if arguments.print or code > 1:
            return code
    else:
        code = 0
    grid = read_grid(Path(out))
    if grid is None:
        raise SweepError(f"there is no sweep in {out}")
    verdict, number = judge(Report(grid, Path(out), claim.rule.baseline), claim.rule)
    print(f"{claim.claim}: {verdict} ({arguments.size} size; {number})")
    return code


def _list() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    wide = console.width >= 120
    table = Table(caption="in words, with reasons: docs/results/claims.md", caption_justify="left")
    for head in ("claim", "§", *(["what"] if wide else []), "verdict", "number"):
        table.add_column(head)
    for each in claims.claims():
        number = (each.outcome.number if each.outcome else None) or ""
        words = [each.claim] if wide else []
        table.add_row(*map(Text, (each.name, each.section, *words, each.verdict, number)))
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
        lambda _: f"{first}\n{claims.table()}\n{last}",
        readme,
        flags=re.DOTALL,
    )
