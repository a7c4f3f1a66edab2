"""``ln-zoo sweep``: a grid of runs over norms, settings and seeds, and its report."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout

from ln_zoo.cli.commands import ONE_EACH
from ln_zoo.sweeps.grid import (
    Grid,
    SweepError,
    check_extends,
    check_option,
    digests,
    existing_grid,
    files_of,
    make_folder,
    parse_norms,
    parse_seeds,
    parse_settings,
    parse_time,
    read_grid,
    write_grid,
)
from ln_zoo.sweeps.state import FAILED, FINISHED, Length, State, state_of
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import config_names, find_config

_LOCK = ".sweep.lock"
#: Folder of the report, in the sweep's folder.
_REPORT = "report"


def sweep(
    *fit_options: str,
    out: str,
    config: Annotated[list[str], ONE_EACH] = [],  # noqa: B006
    norms: str | None = None,
    seeds: str | None = None,
    set_: Annotated[list[str], ONE_EACH] = [],  # noqa: B006
    jobs: int = 1,
    max_time: str | None = None,
    threads: int | None = None,
    test: Literal["last", "best"] | None = None,
    print_: bool = False,
    run: str | None = None,
    attached: bool = False,
    gather: bool = False,
    baseline: str | None = None,
    metric: list[str] | None = None,
    x: Literal["epoch", "step"] | None = None,
    select: str | None = None,
) -> int:
    """Trains and tests a grid of models: each norm with each seed and each value of --set.

    Each run is a process. All runs with the same seed see the data in the same order. If the sweep
    is stopped or killed, the same command, or `ln-zoo sweep --out FOLDER`, resumes it and repeats
    failed runs. Options of fit for all runs follow after --.

    Args:
        fit_options: options of fit, after --
        out: folder of the sweep; the report is in FOLDER/report
        config: as for fit, shared by all runs
        norms: norms, separated by commas: layer, batch, weight, rms, none, other names of files in
            configs/norms, paths of such files, or classes (LayerNorm, my_norm.MyNorm) with their
            defaults. A module without an argument `norm` gets it by the callback Normalize
        seeds: number of seeds, starting at 0, or a list such as 0,1,7 (a single one: 7,); default:
            3
        set_: OPTION=V1,V2: values of an option of fit, such as model.lr=2e-4,1e-3; may be given
            several times
        jobs: runs at a time
        max_time: HH:MM:SS: stop after this time, as on SIGTERM: runs write their checkpoints, and
            the same command resumes them, in a copy of the folder on another machine too
        threads: threads of each run; default: 1 with several jobs, otherwise torch's default.
            The last digits of results depend on it, so a sweep keeps its first value
        test: which weights are tested: the last, or the best by validation according to the
            configuration's ModelCheckpoint; default: last
        print_: run nothing, print one command per line for each unfinished run, for GNU parallel,
            SLURM arrays or Ray; run them in this folder, with the folder of --out on a shared disk
        run: one run of a sweep, as --print names it
        attached: with --run: stop at the end of standard input
        gather: run nothing, report on the finished runs
        baseline: norm to compare the others with; default: none if the grid has it, else the first
        metric: curves to draw, as for `ln-zoo compare`
        x: x axis of the curves
        select: logged metric to choose settings by; default: the test's main metric, in validation

    Returns:
        The exit code: 0; 1 if a run failed; 2 if the input is wrong and nothing was run; 128 plus
        the number of a signal.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise SweepError(f"--out {out} is a file: give a folder")
    if jobs < 1:
        raise SweepError(f"--jobs must be at least 1, got {jobs}")
    if run is not None:
        from ln_zoo.cli.sweep.worker import work

        return work(folder, run, attached)
    report = partial(_report, folder, baseline, metric, x, select)
    if gather:
        report(existing_grid(folder))
        return 0
    old = read_grid(folder)
    # From here on: checking the grid takes seconds.
    deadline = time.monotonic() + (math.inf if max_time is None else parse_time(max_time))
    again = ["ln-zoo", "sweep", "--out", out]
    if old is not None and not (config or norms or seeds or set_ or fit_options):
        grid = _unchanged(old, out, threads, test)
    else:
        grid = grid_of(config, norms, seeds, set_, fit_options, threads, test, jobs, old)
    make_folder(folder)
    try:
        with FileLock(folder / _LOCK, timeout=0):
            grid, waiting, lengths = _checked(grid, folder)
            if print_:
                for name in waiting:
                    print(shlex.join([*again, "--run", name]))
                return 0
            signal = _with_display(grid, folder, lengths, jobs, deadline) if waiting else 0
            states = {each.name: state_of(folder / each.name) for each in grid.runs()}
            if not signal and any(state.kind == FINISHED for state in states.values()):
                report(grid)
    except Timeout:
        raise SweepError(
            f"another `ln-zoo sweep` is running in {out}: wait for it, or choose another --out"
        ) from None
    return _summarize(states, signal, [*again, *(["--jobs", str(jobs)] if jobs > 1 else [])])


def grid_of(
    config: list[str],
    norms: str | None,
    seeds: str | None = None,
    set_: Sequence[str] = (),
    fit_options: Sequence[str] = (),
    threads: int | None = None,
    test: str | None = None,
    jobs: int = 1,
    old: Grid | None = None,
) -> Grid:
    """The grid of the arguments; threads and tested weights default to the folder's."""
    if not (config or any(option.startswith("--model") for option in fit_options)):
        raise SweepError(
            "give --config FILE or `-- --model NAME --data NAME`, or the --out of an existing sweep"
            if old is None
            else "this sweep exists: give --out alone to resume it, or repeat --config to change it"
        )
    if not norms:
        raise SweepError("give --norms, such as --norms layer,none")
    if threads is None:
        threads = old.threads if old is not None else int(jobs > 1)
    if threads < 0:
        raise SweepError(f"--threads must be at least 0 (0: torch's default), got {threads}")
    for option in fit_options:
        if option.startswith("--"):
            check_option(option)
    for path in config:
        if find_config(path) is None:
            near = nearest(path, config_names())
            raise SweepError(f"--config: there is no file {path}{near}")
    parsed = parse_norms(norms, config)
    return Grid(
        configs=config,
        norms=parsed,
        seeds=parse_seeds(seeds if seeds is not None else "3"),
        settings=parse_settings(set_),
        options=list(fit_options),
        test=test or (old.test if old is not None else "last"),
        threads=threads,
        data_seed=old.data_seed if old is not None else True,
        callback=old.callback if old is not None else False,
        digests=digests(files_of(config, parsed)),
    )


def _unchanged(old: Grid, out: str, threads: int | None, test: str | None) -> Grid:
    """The grid in the folder; SweepError if arguments contradict it, or a configuration changed."""
    if threads not in (None, old.threads) or test not in (None, old.test):
        raise SweepError(
            f"{out} has --threads {old.threads} --test {old.test}: choose another --out"
        )
    found = digests(list(old.digests))
    if changed := [path for path, digest in old.digests.items() if found[path] != digest]:
        raise SweepError(f"{', '.join(changed)} has changed since: choose another --out")
    return old


def _checked(grid: Grid, out: Path) -> tuple[Grid, list[str], dict[str, Length]]:
    """Check a grid and write it; returns it, its unfinished runs, and the lengths by label."""
    # Again, now under the lock.
    old = read_grid(out)
    if old is not None:
        check_extends(grid, old, out)
    names = [run.name for run in grid.runs()]
    waiting = [name for name in names if state_of(out / name).kind != FINISHED]
    if not waiting and old == grid:
        return grid, [], {}
    from ln_zoo.cli.sweep.check import check_grid

    grid, lengths = check_grid(grid)
    write_grid(grid, out)
    return grid, waiting, lengths


def _with_display(
    grid: Grid, out: Path, lengths: dict[str, Length], jobs: int, deadline: float
) -> int:
    from rich.console import Console

    from ln_zoo.sweeps.display import LiveTable
    from ln_zoo.sweeps.processes import Processes, Watcher

    console = Console()
    of_sweep = grid.runs(), out, lengths, jobs
    seconds = deadline - time.monotonic()
    if not console.is_terminal:
        return Processes(*of_sweep, Watcher(), seconds).run()
    with LiveTable(console) as table:
        return Processes(*of_sweep, table, seconds).run()


def _report(
    out: Path, baseline: str | None, metric: list[str] | None, x: str | None, select: str | None,
    grid: Grid,
) -> None:  # fmt: skip
    from ln_zoo.sweeps.report import write_report
    from ln_zoo.sweeps.results import Results

    results = Results(grid, out, baseline, select)
    make_folder(out / _REPORT)
    print(write_report(results, out / _REPORT, metric, x))
    print(f"report: {out / _REPORT / 'report.md'}")


def _summarize(states: dict[str, State], signal: int, again: list[str]) -> int:
    command = shlex.join(again)
    if signal:
        done = sum(state.kind == FINISHED for state in states.values())
        print(f"stopped with {done} of {len(states)} runs finished; to resume: {command}")
        return 128 + signal
    failed = {name: state.error for name, state in states.items() if state.kind == FAILED}
    for name, error in failed.items():
        print(f"ln-zoo sweep: error: {name}: {error}", file=sys.stderr)
    if failed:
        print(
            f"{len(failed)} of {len(states)} runs failed (log.txt in the folder of each); to try "
            f"them again: {command}",
            file=sys.stderr,
        )
    return 1 if failed else 0
