"""The grid that the arguments of a sweep ask for, checked and written to its folder."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ln_zoo._version import __version__
from ln_zoo.sweeps.grid import Grid, SweepError, contents_of
from ln_zoo.sweeps.manifest import check_extends, read_grid, write_grid
from ln_zoo.sweeps.options import check_option, parse_norms, parse_seeds, parse_settings
from ln_zoo.sweeps.ranges import check_settings
from ln_zoo.sweeps.state import DONE, Length, state_of
from ln_zoo.utils.locks import LockedError, owned
from ln_zoo.utils.names import nearest
from ln_zoo.utils.package_data import config_names, find_config

#: Lock of ``sweep.json`` and of the report.
_LOCK = ".sweep.owner"
#: What a sweep keeps of its first check.
_KEPT = ("version", "data", "data_seed", "modules", "paths", "folders", "callback")
#: Seconds to wait for it: another process writes the report.
_PATIENCE = 120


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


def unchanged(old: Grid, out: str, threads: int | None, test: str | None) -> Grid:
    """The grid in the folder; SweepError if arguments contradict it."""
    if threads not in (None, old.threads) or test not in (None, old.test):
        raise SweepError(
            f"{out} has --threads {old.threads} --test {old.test}: choose another --out"
        )
    changed = ", ".join(old.changed())
    if old.contents:
        if changed:
            note(f"{changed} has changed since the sweep was begun, which keeps its own copy")
        return old
    if changed:
        raise SweepError(f"{changed} has changed since: choose another --out")
    # Of an earlier version.
    return replace(old, contents=contents_of(old.configs, old.norms), digests={})


def checked(grid: Grid, out: Path) -> tuple[Grid, list[str], dict[str, Length]]:
    """Check a grid and write it; returns it, its unfinished runs, and the lengths by label."""
    old = read_grid(out)
    if old is not None:
        check_extends(grid, old, out)
        kept = {name: getattr(old, name) for name in _KEPT}
        grid = replace(grid, **kept)
        if old.version != __version__:
            note(f"{out} was begun with ln_zoo {old.version}, this is {__version__}")
    names = [run.name for run in grid.runs()]
    waiting = [name for name in names if state_of(out / name).kind not in DONE]
    if not waiting and old == grid and not grid.search:
        return grid, [], {}
    from ln_zoo.cli.sweep.check import check_grid, places

    grid.find_modules(out)
    with grid.in_own_folder(out) as place:
        found = check_grid(grid, place)
    paths = sorted(found.paths.union(grid.paths))
    grid = replace(
        grid,
        paths=paths,
        folders=grid.folders or (places(Path(), out) if paths else []),
        data_seed=found.data_seed,
        callback=found.callback,
        data=grid.data or found.data,
        modules=grid.modules | found.modules,
    )
    with locked(out):
        current = read_grid(out)
        if current not in (None, old):
            check_extends(grid, current, out)
        write_grid(grid, out)
    return grid, waiting, found.lengths


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Own the files of the sweep; other processes of it wait."""
    try:
        with owned(out / _LOCK, timeout=_PATIENCE):
            yield
    except LockedError as error:
        raise SweepError(f"{error}: wait for it, or choose another --out") from None


def note(text: str) -> None:
    """Print a note on standard error."""
    print(f"note: {text}", file=sys.stderr)
