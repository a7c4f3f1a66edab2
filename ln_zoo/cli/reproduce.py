"""``ln-zoo reproduce``: claims of the paper, each with a sweep and a verdict."""

from __future__ import annotations

import shlex
import sys
from json import dumps
from pathlib import Path
from typing import Literal

from ln_zoo.cli.commands import call
from ln_zoo.cli.sweep import sweep
from ln_zoo.reproduction import claims
from ln_zoo.reproduction.claims import Claim
from ln_zoo.reproduction.claims_page import write_page
from ln_zoo.sweeps.grid import SweepError, existing_grid
from ln_zoo.sweeps.state import FAILED, FINISHED
from ln_zoo.utils.names import nearest


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
    write: Path | None = None,
) -> int:
    """Lists the claims of the paper with our verdicts, or tests one.

    With the name of a claim, runs the sweep that tests it and prints its verdict. If it is stopped,
    the same command resumes.

    Args:
        claim: name of the claim; default: list all
        size: size of the sweep
        out: folder of the sweep, or of the picture; default: sweeps/CLAIM-SIZE, or no picture
        seeds: number of seeds, from the first of the claim's, or a list as for ln-zoo sweep; may be
            increased later
        jobs: runs at a time
        print_: run nothing, print one command per line, as in ln-zoo sweep
        gather: run nothing, judge the finished runs of a sweep
        recompute: run nothing, judge all claims by the tables in docs/figures of the current folder
        json: run nothing, print all claims with outcomes as JSON
        write: run nothing, write the page of all claims to this path, and update the table in the
            README.md of a parent folder, if it has one

    Returns:
        The exit code: 0, also if a claim does not hold; 1 if a run failed, or a recomputed verdict
        differs; 2 if the input is wrong and nothing was run; 128 plus the number of a signal.
    """
    if write:
        for name, path in write_page(write).items():
            print(f"{name}: {path}")
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
    if claim.rule.kind == "measured":
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
        own += ["--print"] if shown else [f"--baseline={claim.rule.baseline}"]
        code = call(sweep, "sweep", [*own, *claim.sweep_arguments(size, seeds)])
        if shown or code > 1:
            return code
    from ln_zoo.reproduction.judge import judge
    from ln_zoo.sweeps.results import Results

    folder = Path(out)
    try:
        results = Results(existing_grid(folder), folder, claim.rule.baseline)
        found = judge(results, claim.rule)
    except SweepError as error:
        if not code:
            raise
        print(f"ln-zoo reproduce: error: {error}", file=sys.stderr)
        return code
    print(f"{claim.claim}: {found.text} ({size} size)")
    kinds = [state.kind for state in results.states.values()]
    if left := len(kinds) - kinds.count(FINISHED):
        print(f"without {left} of {len(kinds)} runs, of which {kinds.count(FAILED)} failed")
    return code or int(FAILED in kinds)


def _measure(claim: Claim, out: str | None, shown: bool, gather: bool) -> int:
    if claim.command is None:
        raise SweepError(f"{claim.name} has no command: {claim.verdict}. {claim.reason}".strip())
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
    print(f"rule: {claim.rule.words}")
    print(f"our verdict: {claim.verdict}" + ("" if gather else "; this run is not judged"))
    return 0


def _recompute() -> int:
    """Recompute verdicts from the tables in git; return 1 if one differs from claims.yaml."""
    from ln_zoo.reproduction.evidence import recompute

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
            differs = "" if agrees else f" BUT claims.yaml: {outcome.verdict}, {outcome.seeds}"
            print(f"{name}: {found.text}{differs}")
    return 0 if same else 1


def _source(claim: Claim) -> str:
    return f"run `ln-zoo {claim.command}`" if claim.command else "see its page"


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
