"""``ln-zoo sweep``: a grid of runs over norms, settings and seeds, and its report."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from ln_zoo.cli.errors import told
from ln_zoo.cli.sweep.grid import (
    Grid,
    SweepError,
    check_extends,
    check_option,
    digests,
    files_of,
    parse_norms,
    parse_seeds,
    parse_settings,
    parse_time,
    read_grid,
    write_grid,
)
from ln_zoo.cli.sweep.state import FAILED, FINISHED, State, state_of

_LOCK = ".sweep.lock"
#: Folder of the report, within that of the sweep.
_REPORT = "report"


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; 1 if a run failed; 2 if nothing was run because the input is wrong; 128
        plus the number of the signal that stopped it.
    """
    argv, options = _parted(list(argv))
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments, options)
    except SweepError as error:
        return told(error, "sweep", code=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ln-zoo sweep",
        usage="ln-zoo sweep --config FILE --norms NAMES --out FOLDER [options] [-- fit's options]",
        description="Trains and tests a grid of models: each norm with each seed and each "
        "value of the options of --set, in a separate process. All runs with the "
        "same seed see the data in the same order. If the sweep is stopped or "
        "killed, the same command, or `ln-zoo sweep --out FOLDER`, resumes it and "
        "repeats failed runs.",
        allow_abbrev=False,
    )
    grid = parser.add_argument_group("the grid")
    grid.add_argument(
        "--config", action="append", default=[], help="as for fit, shared by all runs"
    )
    grid.add_argument(
        "--norms",
        help="norms, separated by commas: names of files in configs/norms "
        "(layer,batch), paths of such files, or classes (LayerNorm, "
        "my_norm.MyNorm) with their defaults",
    )
    grid.add_argument(
        "--seeds",
        help="number of seeds, starting at 0, or a list such as 0,1,7 (a single one: "
        "7,); default: 3",
    )
    grid.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=V1,V2",
        help="values of an option of fit, such as model.lr=2e-4,1e-3; may be given several times",
    )
    grid.add_argument("--out", required=True, help="folder of the sweep")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--jobs", type=int, default=1, help="runs at a time; default: %(default)s")
    how.add_argument(
        "--max_time",
        metavar="HH:MM:SS",
        help="stop after this time, as on SIGTERM: runs write their checkpoints, and the same "
        "command resumes them, in a copy of the folder on another machine too",
    )
    how.add_argument(
        "--threads",
        type=int,
        help="threads of each run; default: 1 with several jobs, else torch's default. "
        "Results depend on it in their last digits, so a sweep keeps its first "
        "value",
    )
    how.add_argument(
        "--test",
        choices=("last", "best"),
        help="which weights are tested: the last, or the best by validation according "
        "to the configuration's ModelCheckpoint; default: last",
    )
    how.add_argument(
        "--print",
        action="store_true",
        help="run nothing, print one command per line for each unfinished run, for GNU "
        "parallel, SLURM arrays or Ray; run them in this folder, with the folder "
        "of --out on a shared disk",
    )
    how.add_argument("--run", metavar="NAME", help="one run of a sweep, as --print names it")
    how.add_argument("--attached", action="store_true", help=argparse.SUPPRESS)
    report = parser.add_argument_group("the report (report.md, tables and curves in FOLDER/report)")
    report.add_argument(
        "--gather", action="store_true", help="run nothing, report on the runs that have finished"
    )
    report.add_argument(
        "--baseline",
        help="norm that the others are compared with; default: none if it is there, else the first",
    )
    report.add_argument("--metric", nargs="+", help="curves to draw, as for `ln-zoo compare`")
    report.add_argument("--x", choices=("epoch", "step"), help="what to draw them against")
    report.add_argument(
        "--select",
        help="logged metric by which settings are chosen; default: the test's main "
        "metric, in validation",
    )
    return parser


def _run(arguments: argparse.Namespace, options: list[str]) -> int:
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise SweepError(f"--out {out} is a file: give a folder")
    if arguments.jobs < 1:
        raise SweepError(f"--jobs must be at least 1, got {arguments.jobs}")
    arguments.seconds = parse_time(arguments.max_time) if arguments.max_time else math.inf
    if arguments.run:
        from ln_zoo.cli.sweep.worker import work

        return work(out, arguments.run, arguments.attached)
    old = read_grid(out)
    if arguments.gather:
        if old is None:
            raise SweepError(f"there is no sweep in {out}")
        _report(old, out, arguments)
        return 0
    grid = _grid(arguments, options, old)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / _LOCK, timeout=0):
            return _work_through(grid, out, arguments)
    except Timeout:
        raise SweepError(
            f"another `ln-zoo sweep` is at work in {out}: wait for it, or choose another --out"
        ) from None


def _work_through(grid: Grid, out: Path, arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    # Now that no other can write it.
    old = read_grid(out)
    if old is not None:
        check_extends(grid, old, out)
    states = {run.name: state_of(out / run.name) for run in grid.runs()}
    waiting = [name for name, state in states.items() if state.kind != FINISHED]
    if waiting or old != grid:
        from ln_zoo.cli.sweep.check import check_grid

        lengths, seeded = check_grid(grid)
        grid = replace(grid, data_seed=seeded)
        write_grid(grid, out)
    else:
        lengths = {}
    if arguments.print:
        for name in waiting:
            print(shlex.join(["ln-zoo", "sweep", "--out", arguments.out, "--run", name]))
        return 0
    signal = _with_display(grid, out, lengths, arguments) if waiting else 0
    states = {run.name: state_of(out / run.name) for run in grid.runs()}
    kinds = [state.kind for state in states.values()]
    if signal:
        done = kinds.count(FINISHED)
        print(f"stopped with {done} of {len(kinds)} runs finished; to go on: {_again(arguments)}")
        return 128 + signal
    if FINISHED in kinds:
        _report(grid, out, arguments)
    return _tell_failed(states, arguments)


def _with_display(grid: Grid, out: Path, lengths: dict, arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ln_zoo.cli.sweep.display import LiveTable
    from ln_zoo.cli.sweep.processes import Processes, Watcher

    console = Console()
    of_sweep, limits = (grid.runs(), out, lengths, arguments.jobs), arguments.seconds
    if not console.is_terminal:
        return Processes(*of_sweep, Watcher(), limits).run()
    with LiveTable(console) as table:
        return Processes(*of_sweep, table, limits).run()


def _report(grid: Grid, out: Path, arguments: argparse.Namespace) -> None:
    from ln_zoo.cli.sweep.report import Report

    report = Report(grid, out, arguments.baseline, arguments.metric, arguments.x, arguments.select)
    print(report.write(out / _REPORT))
    print(f"report: {out / _REPORT / 'report.md'}")


def _tell_failed(states: dict[str, State], arguments: argparse.Namespace) -> int:
    failed = {name: state.error for name, state in states.items() if state.kind == FAILED}
    for name, error in failed.items():
        print(f"ln-zoo sweep: error: {name}: {error}", file=sys.stderr)
    if failed:
        print(
            f"{len(failed)} of {len(states)} runs failed (log.txt in the folder of each); to try "
            f"them again: {_again(arguments)}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _again(arguments: argparse.Namespace) -> str:
    jobs = ["--jobs", str(arguments.jobs)] if arguments.jobs > 1 else []
    return shlex.join(["ln-zoo", "sweep", "--out", arguments.out, *jobs])


def _parted(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our arguments, and those of ``fit``, which follow ``--``."""
    if "--" not in argv:
        return argv, []
    place = argv.index("--")
    return argv[:place], argv[place + 1 :]


def _grid(arguments: argparse.Namespace, options: list[str], old: Grid | None) -> Grid:
    """The grid that was asked for; without any word about it, that of the folder."""
    said = (arguments.config, arguments.norms, arguments.seeds, arguments.set, options)
    threads, test = arguments.threads, arguments.test
    if old is not None and not any(said):
        grid = old
        if threads not in (None, old.threads) or test not in (None, old.test):
            raise SweepError(
                f"{arguments.out} was begun with --threads {old.threads} --test {old.test}: "
                "choose another --out for others"
            )
        found = digests(list(old.digests))
        if changed := [path for path, digest in old.digests.items() if found[path] != digest]:
            raise SweepError(f"{', '.join(changed)} has changed since: choose another --out")
        return grid
    if not arguments.config:
        raise SweepError("give --config FILE, or the --out of a sweep that was begun")
    if not arguments.norms:
        raise SweepError("give --norms, such as --norms layer,none")
    if threads is None:
        threads = old.threads if old is not None else int(arguments.jobs > 1)
    if threads < 0:
        raise SweepError(f"--threads must be 0 (as many as torch takes) or more, got {threads}")
    for option in options:
        if option.startswith("--"):
            check_option(option)
    for path in arguments.config:
        if not Path(path).is_file():
            raise SweepError(f"--config: there is no file {path}")
    norms = parse_norms(arguments.norms, arguments.config)
    return Grid(
        configs=arguments.config,
        norms=norms,
        seeds=parse_seeds(arguments.seeds if arguments.seeds is not None else "3"),
        settings=parse_settings(arguments.set),
        options=options,
        test=test or (old.test if old is not None else "last"),
        threads=threads,
        data_seed=old.data_seed if old is not None else True,
        digests=digests(files_of(arguments.config, norms)),
    )
