"""The search of a sweep: its ranges, its proposals, and trials of processes that were killed.

The runs here are a few lines of Python whose validation error is least at a rate of 1e-3.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_runs import refuses

from ln_zoo.sweeps.grid import Grid
from ln_zoo.sweeps.launchers import base
from ln_zoo.sweeps.launchers.local import LocalLauncher
from ln_zoo.sweeps.manifest import existing_grid, write_grid
from ln_zoo.sweeps.progress import Watcher
from ln_zoo.sweeps.queue import Queue
from ln_zoo.sweeps.ranges import check_settings, corners, parse_range
from ln_zoo.sweeps.state import FINISHED, PRUNED, state_of

GRID = Grid(
    configs=["c.yaml"],
    norms=["a.yaml"],
    seeds=[0],
    settings={"model.lr": ["log(1e-4,1e-2)"]},
    search={"sampler": "TPESampler", "pruner": "NopPruner", "trials": 12},
)

#: In place of a run. It ends at the file ``go`` if its rate is high, as a run of many epochs.
FAKE = """
import json, math, pathlib, sys, time
out, name = (a.partition("=")[2] for a in sys.argv[2:4])
folder = pathlib.Path(out, name)
folder.mkdir(exist_ok=True, parents=True)
rate = float(name.partition("lr-")[2].partition("/")[0])
score = (math.log10(rate) + 3) ** 2
(folder / "metrics.csv").write_text(f"epoch,step,val_error\\n0,9,{score}\\n1,19,{score}\\n")
if pathlib.Path(out, "slow").exists() and score > 0.3: time.sleep(60)
(folder / "test_results.json").write_text(json.dumps({"metrics": {"error": score}}))
"""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("log(0,1)", "0 < LOW"),
        ("log(2,1)", "LOW < HIGH"),
        ("uniform(1,1)", "LOW < HIGH"),
        ("int(1.5,3)", "whole"),
        ("log(a,1)", "two numbers"),
    ],
)
def test_wrong_ranges(given: str, message: str) -> None:
    refuses(message, parse_range, given)


def test_ranges_are_for_a_search() -> None:
    refuses("--search", check_settings, {"lr": ["log(1,2)"]}, False)
    refuses("not both", check_settings, {"lr": ["log(1,2)", "3"]}, True)
    refuses("--set", check_settings, {}, True)
    check_settings({"lr": ["log(1,2)"], "size": ["8", "16"]}, True)
    grid = replace(
        GRID, settings={"lr": ["log(1e-4,1e-2)"], "n": ["int(2,8)"], "size": ["8", "16"]}
    )
    ends = [run.settings for run in corners(grid).runs()]
    assert ends == [
        {"lr": "0.0001", "n": "2", "size": "8"},
        {"lr": "0.01", "n": "8", "size": "16"},
    ]


def queue(out: Path, monkeypatch: pytest.MonkeyPatch, grid: Grid = GRID, **options: Any) -> Queue:
    from ln_zoo.sweeps.search import Search

    monkeypatch.setattr(base, "PYTHON", [sys.executable, "-S", "-c", FAKE])
    monkeypatch.setattr(base.Launcher, "pause", 0.01)
    if not (out / "sweep.json").exists():
        write_grid(grid, out)

    @contextlib.contextmanager
    def locked() -> Iterator[None]:
        yield

    stored = existing_grid(out)
    search = Search(out, locked, stored.search, options.pop("select", None))
    return Queue(stored.runs(), out, {}, LocalLauncher(), [Watcher()], search=search, **options)


def test_a_search_closes_in_and_is_resumed(tmp_path: Path, monkeypatch, capsys) -> None:
    optuna = pytest.importorskip("optuna", reason="needs the extra `optuna`")
    assert queue(tmp_path, monkeypatch).run() == 0
    grid = existing_grid(tmp_path)
    rates = [float(run.settings["model.lr"]) for run in grid.runs()]
    assert len(rates) == len(set(rates)) == 12
    assert min(abs(math.log10(rate) + 3) for rate in rates) < 0.15
    # A process is killed after a trial is proposed, or after its run has finished.
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "search.journal"))
    study = optuna.load_study(
        study_name="a", storage=optuna.storages.JournalStorage(journal), sampler=None
    )
    assert all(trial.state.is_finished() for trial in study.trials)
    grid.search["trials"] = 14
    for rate in ("0.002", "0.003"):
        grid.trials.append(
            {"norm": "a.yaml", "number": study.ask().number, "settings": {"model.lr": rate}}
        )
    write_grid(grid, tmp_path)
    left = tmp_path / "a-model.lr-0.002/seed_0"
    left.mkdir(parents=True)
    (left / "metrics.csv").write_text("epoch,step,val_error\n0,9,0.09\n")
    (left / "test_results.json").write_text(json.dumps({"metrics": {"error": 0.09}}))
    assert queue(tmp_path, monkeypatch).run() == 0
    assert existing_grid(tmp_path).trials == grid.trials
    assert state_of(tmp_path / "a-model.lr-0.003/seed_0").kind == FINISHED
    assert all(trial.state.is_finished() for trial in study.trials)
    assert study.trials[-2].value == 0.09


def test_pruned_runs_are_stopped_and_stay_so(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    from ln_zoo.sweeps import search

    monkeypatch.setattr(search, "_LOOK_EVERY", 0.01)
    (tmp_path / "slow").touch()
    options = {"sampler": "RandomSampler", "pruner": "MedianPruner", "trials": 16}
    grid = replace(GRID, search=options)
    for _ in range(2):
        assert queue(tmp_path, monkeypatch, grid, select="val_error").run() == 0
        kinds = [state_of(tmp_path / r.name).kind for r in existing_grid(tmp_path).runs()]
        assert set(kinds) == {FINISHED, PRUNED}
    assert ": pruned" in capsys.readouterr().out


def test_optuna_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    refuses("ln-zoo\\[optuna\\]", queue, tmp_path, monkeypatch)


def test_wrong_samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna", reason="needs the extra `optuna`")
    for name, value in (("sampler", "TPESampler2"), ("pruner", "Median")):
        grid = replace(GRID, search=GRID.search | {name: value})
        write_grid(grid, tmp_path)
        refuses(value, queue, tmp_path, monkeypatch)
