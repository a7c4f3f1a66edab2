"""``ln-zoo sweep``: a grid of runs over norms, settings and seeds, and its report."""

from __future__ import annotations

import math
import shlex
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ln_zoo.cli.commands import ONE_EACH
from ln_zoo.cli.sweep.request import checked, grid_of, locked, note, searched, unchanged
from ln_zoo.sweeps.grid import Grid, SweepError
from ln_zoo.sweeps.launchers import launcher_of
from ln_zoo.sweeps.manifest import existing_grid, make_folder, read_grid
from ln_zoo.sweeps.options import parse_time
from ln_zoo.sweeps.progress import Watcher
from ln_zoo.sweeps.queue import Queue
from ln_zoo.sweeps.state import DONE, FINISHED, State, last_error_line, state_of

if TYPE_CHECKING:
    from ln_zoo.sweeps.search import Search

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
    pack: int = 1,
    launcher: Literal["local", "slurm", "ray"] = "local",
    slurm: Annotated[list[str], ONE_EACH] = [],  # noqa: B006
    gpus: float = 0.0,
    search: Literal["optuna"] | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
    max_time: str | None = None,
    threads: int | None = None,
    test: Literal["last", "best"] | None = None,
    print_: bool = False,
    run: Annotated[list[str], ONE_EACH] = [],  # noqa: B006
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
        out: folder of the sweep; the report is in FOLDER/report, with a page, index.html, from the
            beginning on
        config: as for fit, shared by all runs
        norms: norms, separated by commas: layer, batch, weight, rms, none, other names of files in
            configs/norms, paths of such files, or classes (LayerNorm, my_norm.MyNorm) with their
            defaults. A module without an argument `norm` gets it by the callback Normalize
        seeds: number of seeds, starting at 0, or a list such as 0,1,7 (a single one: 7,); default:
            3
        set_: OPTION=V1,V2: values of an option of fit, such as model.lr=2e-4,1e-3; may be given
            several times
        jobs: processes at a time
        pack: runs of a process, one after the other: starting one takes longer than a small run
        launcher: what runs the processes: this machine, SLURM (pip install 'ln-zoo[slurm]'), or Ray
            ('ln-zoo[ray]'; RAY_ADDRESS names the cluster, else it is this machine). The folder of
            --out must be on a disk that all machines share
        slurm: options of sbatch, such as partition=gpu,time=04:00:00; cluster=local tries the jobs
            on this machine
        gpus: GPUs of each process under SLURM or Ray, for Ray also a fraction such as 0.25
        search: search the ranges of --set instead of training all values: log(LOW,HIGH),
            uniform(LOW,HIGH), int(LOW,HIGH), or a list of values (pip install 'ln-zoo[optuna]').
            Each norm has a search of its own. Several machines may share one
        trials: settings that a search tries for each norm, by default with one seed; default: 20
        sampler: Optuna's class that proposes settings; default: TPESampler
        pruner: Optuna's class that stops runs early, such as MedianPruner; default: none stops
        max_time: HH:MM:SS: stop after this time, as on SIGTERM: runs write their checkpoints, and
            the same command resumes them, in a copy of the folder on another machine too
        threads: threads of each run; default: 1 with several jobs, otherwise torch's default.
            The last digits of results depend on it, so a sweep keeps its first value
        test: which weights are tested: the last, or the best by validation according to the
            configuration's ModelCheckpoint; default: last
        print_: run nothing, print one command per line for each unfinished run, for GNU parallel
            and other engines
        run: one run of a sweep, as --print names it; may be given several times
        attached: with --run: stop at the end of standard input
        gather: run nothing, report on the finished runs
        baseline: norm to compare the others with; default: none if the grid has it, else the first
        metric: curves to draw, as for `ln-zoo compare`
        x: x axis of the curves
        select: logged metric to choose settings by, and to search for; default: the test's main
            metric, in validation

    Returns:
        The exit code: 0; 1 if a run failed; 2 if the input is wrong and nothing was run; 128 plus
        the number of a signal.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise SweepError(f"--out {out} is a file: give a folder")
    counts = {"jobs": jobs, "pack": pack, "trials": 1 if trials is None else trials}
    for name, count in counts.items():
        if count < 1:
            raise SweepError(f"--{name} must be at least 1, got {count}")
    if not 0 <= gpus < math.inf:
        raise SweepError(f"--gpus must be at least 0 and finite, got {gpus:g}")
    if run:
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
        grid = unchanged(old, out, threads, test)
    else:
        seeds = "1" if search and seeds is None else seeds
        grid = grid_of(config, norms, seeds, set_, fit_options, threads, test, jobs, old)
    grid = searched(grid, search, trials, sampler, pruner, old)
    make_folder(folder)
    engine = launcher_of(launcher, folder, jobs, grid.threads, gpus, slurm)
    searcher = _search_of(grid, folder, select)
    grid, waiting, lengths = checked(grid, folder)
    if print_:
        for name in waiting:
            print(shlex.join([*again, "--run", name]))
        return 0
    queue = partial(
        Queue, grid.runs(), folder, lengths, engine, jobs=jobs, pack=pack,
        max_time=deadline - time.monotonic(), search=searcher,
    )  # fmt: skip
    signal = _with_display(queue, folder, select) if waiting or grid.search else 0
    grid = existing_grid(folder)
    states = {each.name: state_of(folder / each.name) for each in grid.runs()}
    if not signal and any(state.kind == FINISHED for state in states.values()):
        report(grid)
    again += ["--jobs", str(jobs)] if jobs > 1 else []
    again += ["--launcher", launcher] if launcher != "local" else []
    again += [f"--slurm={text}" for text in slurm]
    return _summarize(states, signal, folder, again)


def _search_of(grid: Grid, out: Path, select: str | None) -> Search | None:
    if not grid.search:
        return None
    from ln_zoo.sweeps.search import Search

    return Search(out, partial(locked, out), grid.search, select)


def _with_display(queue: partial[Queue], out: Path, select: str | None) -> int:
    from rich.console import Console

    from ln_zoo.sweeps.display import LiveTable
    from ln_zoo.sweeps.live import LivePage

    console, page = Console(), LivePage(out, out / _REPORT, select)
    if not console.is_terminal:
        return queue(watchers=[Watcher(), page]).run()
    with LiveTable(console) as table:
        return queue(watchers=[table, page]).run()


def _report(
    out: Path, baseline: str | None, metric: list[str] | None, x: str | None, select: str | None,
    grid: Grid,
) -> None:  # fmt: skip
    from ln_zoo.sweeps.report import write_report
    from ln_zoo.sweeps.results import Results

    results = Results(grid, out, baseline, select)
    make_folder(out / _REPORT)
    with locked(out):
        page = write_report(results, out / _REPORT, metric, x)
    print(page)
    if find_spec("matplotlib") is None:
        note("no pictures of curves without matplotlib: pip install 'ln-zoo[plots]'")
    print(f"report: {out / _REPORT / 'report.md'}")


def _summarize(states: dict[str, State], signal: int, out: Path, again: list[str]) -> int:
    command = shlex.join(again)
    if signal:
        done = sum(state.kind == FINISHED for state in states.values())
        print(f"stopped with {done} of {len(states)} runs finished; to resume: {command}")
        return 128 + signal
    # A full disk keeps the file of a failure from being written.
    failed = {name: state.error for name, state in states.items() if state.kind not in DONE}
    for name, error in failed.items():
        why = error or last_error_line(out / name) or "it has left no results"
        print(f"ln-zoo sweep: error: {name}: {why}", file=sys.stderr)
    if failed:
        print(
            f"{len(failed)} of {len(states)} runs failed (log.txt in the folder of each); to try "
            f"them again: {command}",
            file=sys.stderr,
        )
    return 1 if failed else 0
