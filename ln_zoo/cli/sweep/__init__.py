"""``ln-zoo sweep``: a grid of runs over norms, settings and seeds, and its report."""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ln_zoo._version import __version__
from ln_zoo.cli.commands import ONE_EACH
from ln_zoo.sweeps.grid import (
    Grid,
    SweepError,
    check_extends,
    check_option,
    contents_of,
    existing_grid,
    make_folder,
    parse_norms,
    parse_seeds,
    parse_settings,
    parse_time,
    read_grid,
    write_grid,
)
from ln_zoo.sweeps.launchers import launcher_of
from ln_zoo.sweeps.progress import Watcher
from ln_zoo.sweeps.queue import Queue
from ln_zoo.sweeps.ranges import check_settings
from ln_zoo.sweeps.state import DONE, FAILED, FINISHED, Length, State, state_of
from ln_zoo.utils.locks import LockedError, owned
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import config_names, find_config

if TYPE_CHECKING:
    from ln_zoo.sweeps.search import Search

#: Lock of ``sweep.json`` and of the report.
_LOCK = ".sweep.owner"
#: What a sweep keeps of its first check.
_KEPT = ("version", "data", "data_seed", "modules", "callback")
#: Seconds to wait for it: another process writes the report.
_PATIENCE = 120
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
        grid = _unchanged(old, out, threads, test)
    else:
        seeds = "1" if search and seeds is None else seeds
        grid = grid_of(config, norms, seeds, set_, fit_options, threads, test, jobs, old)
    grid = searched(grid, search, trials, sampler, pruner, old)
    make_folder(folder)
    engine = launcher_of(launcher, folder, jobs, grid.threads, gpus, slurm)
    searcher = _search_of(grid, folder, select)
    grid, waiting, lengths = _checked(grid, folder)
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
    return _summarize(states, signal, again)


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
        contents=contents_of(config, parsed),
        callback=old.callback if old is not None else False,
    )


def searched(
    grid: Grid, search: str | None, trials: int | None, sampler: str | None, pruner: str | None,
    old: Grid | None = None,
) -> Grid:  # fmt: skip
    """The grid with the options of a search; SweepError if they do not fit it."""
    before = old.search if old is not None else {}
    options = {"sampler": sampler, "pruner": pruner, "trials": trials}
    given = {name: value for name, value in options.items() if value is not None}
    if given and not (search or before):
        raise SweepError(f"--{next(iter(given))} has no effect without --search optuna")
    searched = bool(search or before)
    check_settings(grid.settings, searched)
    if not searched:
        return grid
    found = {"sampler": "TPESampler", "pruner": "NopPruner", "trials": 20} | before | given
    if found["pruner"] != "NopPruner" and len(grid.seeds) > 1:
        raise SweepError("--pruner compares runs with one seed: give --seeds 1")
    if found["trials"] < before.get("trials", 0):
        raise SweepError(f"--trials {trials}: the sweep has {before['trials']}, and may have more")
    return replace(grid, search=found, trials=old.trials if old is not None else [])


def _search_of(grid: Grid, out: Path, select: str | None) -> Search | None:
    if not grid.search:
        return None
    from ln_zoo.sweeps.search import Search

    return Search(out, partial(_locked, out), grid.search, select)


def _unchanged(old: Grid, out: str, threads: int | None, test: str | None) -> Grid:
    """The grid in the folder; SweepError if arguments contradict it."""
    if threads not in (None, old.threads) or test not in (None, old.test):
        raise SweepError(
            f"{out} has --threads {old.threads} --test {old.test}: choose another --out"
        )
    changed = ", ".join(old.changed())
    if old.contents:
        if changed:
            _note(f"{changed} has changed since the sweep was begun, which keeps its own copy")
        return old
    if changed:
        raise SweepError(f"{changed} has changed since: choose another --out")
    # Of an earlier version.
    return replace(old, contents=contents_of(old.configs, old.norms), digests={})


def _checked(grid: Grid, out: Path) -> tuple[Grid, list[str], dict[str, Length]]:
    """Check a grid and write it; returns it, its unfinished runs, and the lengths by label."""
    old = read_grid(out)
    if old is not None:
        check_extends(grid, old, out)
        kept = {name: getattr(old, name) for name in _KEPT}
        grid = replace(grid, **kept)
        if old.version != __version__:
            _note(f"{out} was begun with ln_zoo {old.version}, this is {__version__}")
    names = [run.name for run in grid.runs()]
    waiting = [name for name in names if state_of(out / name).kind not in DONE]
    if not waiting and old == grid and not grid.search:
        return grid, [], {}
    from ln_zoo.cli.sweep.check import check_grid

    grid.find_modules(out)
    checked = check_grid(grid, out)
    grid = replace(
        grid,
        data_seed=checked.data_seed,
        callback=checked.callback,
        data=grid.data or checked.data,
        modules=grid.modules | checked.modules,
    )
    with _locked(out):
        current = read_grid(out)
        if current not in (None, old):
            check_extends(grid, current, out)
        write_grid(grid, out)
    return grid, waiting, checked.lengths


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Own the files of the sweep; other processes of it wait."""
    try:
        with owned(out / _LOCK, timeout=_PATIENCE):
            yield
    except LockedError as error:
        raise SweepError(f"{error}: wait for it, or choose another --out") from None


def _with_display(queue: partial[Queue], out: Path, select: str | None) -> int:
    from rich.console import Console

    from ln_zoo.sweeps.display import LiveTable
    from ln_zoo.sweeps.live import LivePage

    console, page = Console(), LivePage(out, out / _REPORT, select)
    if not console.is_terminal:
        return queue(watchers=[Watcher(), page]).run()
    with LiveTable(console) as table:
        return queue(watchers=[table, page]).run()


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _report(
    out: Path, baseline: str | None, metric: list[str] | None, x: str | None, select: str | None,
    grid: Grid,
) -> None:  # fmt: skip
    from ln_zoo.sweeps.report import write_report
    from ln_zoo.sweeps.results import Results

    results = Results(grid, out, baseline, select)
    make_folder(out / _REPORT)
    with _locked(out):
        page = write_report(results, out / _REPORT, metric, x)
    print(page)
    if find_spec("matplotlib") is None:
        _note("no pictures of curves without matplotlib: pip install 'ln-zoo[plots]'")
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
