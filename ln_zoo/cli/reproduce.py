"""``ln-zoo reproduce``: claims of the paper, each with a sweep and a verdict."""

from __future__ import annotations

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import Literal

from ln_zoo.cli.commands import Picture, call
from ln_zoo.cli.sweep import sweep
from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Claim
from ln_zoo.reproduction.claims_page import write_page
from ln_zoo.sweeps.grid import SweepError
from ln_zoo.sweeps.manifest import existing_grid
from ln_zoo.sweeps.state import FAILED, FINISHED
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import root_with


def reproduce(
    claim: str | None = None,
    *,
    size: Literal["paper", "reduced"] = "reduced",
    out: str | None = None,
    seeds: str | None = None,
    jobs: int = 1,
    print_: bool = False,
    gather: bool = False,
    recompute: bool = False,
    json: bool = False,
    csv: Path | None = None,
    plot: Picture | None = None,
    theory: Path | None = None,
    write: Path | None = None,
) -> int:
    """Lists the claims of the paper with their outcomes, or tests one.

    With the name of a claim, runs the sweep that tests it and prints its outcome. If it is stopped,
    the same command resumes.

    Args:
        claim: name of the claim; default: list all
        size: size of the sweep
        out: folder of the sweep, or of the picture; default: sweeps/CLAIM-SIZE, or no picture. With
            --csv, several folders separated by commas
        seeds: number of seeds, from the first of the claim's, or a list as for ln-zoo sweep; may be
            increased later
        jobs: runs at a time
        print_: run nothing, print one command per line, as in ln-zoo sweep
        gather: run nothing, judge the finished runs of a sweep
        recompute: run nothing, compute all outcomes from the tables in docs/figures of the current
            folder, or those of the package, and find the numbers of README, result pages and model
            cards in these tables if the folder has them
        json: run nothing, print all claims with outcomes as JSON
        csv: run nothing, write the curves of the finished runs of a primary outcome to this table,
            with the time at which each began
        plot: run nothing, draw all primary outcomes
        theory: run nothing, compute the statements of theory and write them to this table
        write: run nothing, write the page of all claims to this path, and the computed parts of
            README.md and of the history, if a parent folder has them. If the current folder has
            the tables, outcomes are computed from them first

    Returns:
        The exit code: 0, also if a claim does not hold; 1 if a run failed, or a recomputed outcome
        or number differs; 2 if the input is wrong and nothing was run; 128 plus the number of a
        signal.
    """
    if write:
        _write(write)
    elif plot:
        from ln_zoo.reproduction.forest import plot_forest

        plot_forest(plot)
    elif theory:
        from ln_zoo.reproduction.theory import write_theory

        write_theory(theory)
    elif csv:
        return _table(claim, out, csv)
    elif recompute:
        return _recompute()
    elif json:
        print(dumps(claims.rows(), indent=2, ensure_ascii=False))
    elif claim is None:
        _list()
    else:
        return _test(_named(claim), size, out, seeds, jobs, print_, gather)
    return 0


def _named(name: str) -> Claim:
    try:
        return claims.claim(name)
    except KeyError:
        known = [each.name for each in claims.claims()]
        raise SweepError(
            f"no claim {name!r}{nearest(name, known)} (`ln-zoo reproduce` lists them)"
        ) from None


def _test(
    claim: Claim, size: str, out: str | None, seeds: str | None, jobs: int, shown: bool,
    gather: bool,
) -> int:  # fmt: skip
    if not shown:
        print(f"section {claim.section}: {claim.claim}")
    if not claim.sweep:
        if seeds is not None or jobs != 1:
            raise SweepError(f"{claim.name} is not a sweep: --seeds and --jobs do not apply")
        return _measure(claim, out, shown, gather)
    if size not in claim.sweep:
        raise SweepError(
            f"{claim.name} has no sweep of --size {size}, only {', '.join(claim.sweep)}"
        )
    out = out or f"sweeps/{claim.name}-{size}"
    code = 0
    if not gather:
        own = [f"--out={out}", f"--jobs={jobs}"]
        own += ["--print"] if shown else [f"--baseline={claim.baseline}"]
        code = call(sweep, "sweep", [*own, *claim.sweep_arguments(size, seeds)])
        if shown or code > 1:
            return code
    from ln_zoo.reproduction.judge import judge
    from ln_zoo.sweeps.results import Results

    folder = Path(out)
    try:
        results = Results(existing_grid(folder), folder, claim.baseline)
        found = judge(results, claim, size)
    except SweepError as error:
        if not code:
            raise
        print(f"ln-zoo reproduce: error: {error}", file=sys.stderr)
        return code
    print(f"{claim.claim}: {found.word}; {found.number}; pairs: {found.pairs} ({size} size)")
    kinds = [state.kind for state in results.states.values()]
    if left := len(kinds) - kinds.count(FINISHED):
        print(f"without {left} of {len(kinds)} runs, of which {kinds.count(FAILED)} failed")
    return code or int(FAILED in kinds)


def _measure(claim: Claim, out: str | None, shown: bool, gather: bool) -> int:
    if claim.command is None:
        known = "; ".join(claim.commands) or claim.words
        raise SweepError(f"{claim.name} is not one sweep; its commands: {known}")
    command, *words = shlex.split(claim.command)
    if out and command == "analyze":
        words.append(f"--out={Path(out, words[0])}.png")
    elif out:
        words[words.index("--out") + 1] = out
    if shown:
        print(shlex.join(["ln-zoo", command, *words]))
        return 0
    if not gather:
        from ln_zoo.cli import main

        if code := main([command, *words]):
            return code
    if claim.group == "theory" and not gather:
        from ln_zoo.reproduction.evidence import theory_outcome
        from ln_zoo.reproduction.theory import cases

        found = theory_outcome([case for case in cases() if case["claim"] == claim.name])
        print(f"{claim.claim}: {found.word}; {found.number}")
        return 0
    print(f"our outcome: {claim.words}" + ("" if gather else "; this run is not judged"))
    return 0


def _recompute() -> int:
    """Compute outcomes, and find numbers of pages in the tables; return 1 if one differs."""
    from ln_zoo.reproduction.evidence import recompute_all

    same, root = True, root_with("docs/figures")
    for name, found in recompute_all(root).items():
        kept = claims.outcomes().get(name, claims.Outcome())
        same &= found == kept
        differs = "" if found == kept else f" BUT outcomes.json: {kept.word}, {kept.number}"
        kind = "judged" if found.judged else "exploratory"
        pairs = f"; pairs: {found.pairs}, {kind}" if found.pairs else ""
        print(f"{name}: {found.word}; {found.number}{pairs}{differs}")
    if (root / "docs/results/index.md").is_file():  # not in the package
        from ln_zoo.reproduction.numbers import check_pages

        for page in check_pages(root):
            same &= not page.lost
            print(f"{page.path}: {page.numbers} numbers, {len(page.lost)} not found in a table")
            for line, text in page.lost:
                print(f"{page.path}:{line}: {text}")
    return 0 if same else 1


def _write(path: Path) -> None:
    stored = Path("ln_zoo/reproduction/outcomes.json")
    if stored.is_file() and Path("docs/figures").is_dir():
        from ln_zoo.reproduction.evidence import write_outcomes

        write_outcomes(Path.cwd(), stored)
        claims.outcomes.cache_clear()
    for name, written in write_page(path).items():
        print(f"{name}: {written}")


def _table(claim: str | None, out: str | None, csv: Path) -> int:
    if claim is None or out is None:
        raise SweepError("--csv needs the name of a claim and --out with the folders of its sweeps")
    rows = [row for row in _named(claim).rows if row.primary]
    if not rows:
        raise SweepError(f"{claim} has no primary outcome")
    from ln_zoo.reproduction.judge import write_judged

    number = write_judged([Path(each) for each in out.split(",")], rows[0].metric, csv)
    print(f"{csv}: {number} runs")
    return 0


def _list() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    wide = console.width >= 120
    table = Table(
        caption="in words, with reasons: ln-zoo reproduce --write claims.md", caption_justify="left"
    )
    for head in ("claim", "§", *(["what"] if wide else []), "compared", "outcome"):
        table.add_column(head, no_wrap=head == "claim")
    for each in claims.claims():
        for row, outcome in zip(each.rows, each.outcomes, strict=True):
            words = [each.claim] if wide else []
            kind = "" if outcome.judged or row.kind == "theory" else " (exploratory)"
            word = outcome.word + (kind if outcome.number else "")
            table.add_row(*map(Text, (each.name, each.section, *words, row.of, word)))
    console.print(table)
