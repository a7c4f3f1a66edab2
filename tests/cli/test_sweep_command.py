"""`ln-zoo sweep` with real runs, and its refusals."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_support import CONFIGS, SCRIPT, environment, installed, run

#: The network of the quickstart, on few of scikit-learn's digits.
QUICK = [f"--config={CONFIGS / 'quickstart.yaml'}", "--out=s"]
SMALL = (
    "--model.hidden_sizes=[8]", "--data.train_size=100", "--data.val_size=20",
    "--trainer.max_epochs=1",
)  # fmt: skip


def refused(*argv: str) -> str:
    """The line that says why, of a command that left nothing behind."""
    done = run("sweep", *argv)
    assert done.code == 2, done.err
    assert not Path("s/sweep.json").exists()
    (line,) = done.err.splitlines()
    return line.removeprefix("ln-zoo sweep: error: ")


def test_wrong_grids_are_told_in_one_line(here: Path) -> None:
    layer = [*QUICK, "--norms=layer"]
    assert refused("--out=s") == "give --config FILE, or the --out of a sweep that was begun"
    assert refused(*QUICK) == "give --norms, such as --norms layer,none"
    assert refused(*QUICK, "--norms=,") == "--norms names no norm: the grid is empty"
    assert "no norm 'layr'; did you mean 'layer'?" in refused(*QUICK, "--norms=layr")
    assert "LayerNrom" in refused(*QUICK, "--norms=LayerNrom")
    assert "the grid is empty" in refused(*layer, "--set=model.lr=")
    assert refused(*layer, "--seeds=0").endswith("give at least 1, or `0,` for seed 0 alone")
    assert refused("--config=no.yaml", "--norms=layer", "--out=s") == (
        "--config: there is no file no.yaml"
    )
    assert "--jobs must be at least 1" in refused(*layer, "--jobs=0")
    for wrong in ("9", "00:00:00", "00:70:00", "soon"):
        assert "--max_time takes HH:MM:SS" in refused(*layer, f"--max_time={wrong}")
    unknown = refused(*layer, "--set=model.lrr=1,2")
    assert unknown.startswith("layer, model.lrr=1: ")
    assert "lr" in unknown.partition("did you mean")[2]
    assert "layer, model.lr=fast: " in refused(*layer, "--set=model.lr=1e-3,fast")
    assert "lr must be positive" in refused(*layer, "--set=model.lr=1e-3,-1")
    assert "'trainer.max_epoch" in refused(*layer, "--", "--trainer.max_epoch=3")
    assert "--seed_everything is set by the sweep" in refused(*layer, "--", "--seed_everything=3")
    assert "needs a ModelCheckpoint with a monitor" in refused(*layer, "--test=best")
    assert "keep CSVLogger" in refused(*layer, "--", "--trainer.logger=false")
    Path("file").touch()
    assert refused(*QUICK, "--norms=layer", "--out=file") == "--out file is a file: give a folder"


@pytest.fixture
def printed(here: Path) -> list[str]:
    """A grid of two norms with one seed each, not begun; a command each."""
    done = run("sweep", *QUICK, "--norms=layer,none", "--seeds=3,", "--print", "--", *SMALL)
    assert done.code == 0, done.err
    return done.out.splitlines()


def test_printed_commands_are_gathered(printed: list[str], here: Path) -> None:
    names = ["layer/seed_3", "none/seed_3"]
    assert printed == [f"ln-zoo sweep --out s --run {name}" for name in names]
    for command in printed:
        done = run(*command.split()[1:])
        assert done.code == 0, done.err
    again = run(*printed[0].split()[1:])
    assert (again.code, "is finished" in again.out) == (0, True)
    # Nothing is left to do but the report.
    done = run("sweep", "--out=s")
    assert done.code == 0, done.err
    assert "2 of 2 runs have finished." in done.out
    assert (here / "s/report/curves.png").is_file()
    with (here / "s/report/runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, name in zip(rows, names, strict=True):
        results = json.loads((here / f"s/{name}/test_results.json").read_text())
        assert float(row["error"]) == pytest.approx(100 * results["metrics"]["error"])
        assert results["seed"] == 3
        assert results["data"]["seed"] == 3 if "seed" in results["data"] else True
    # Another grid has no place here; a larger one has.
    other = run("sweep", *QUICK, "--norms=layer", "--seeds=4,", "--print", "--", *SMALL)
    assert other.code == 2
    assert "s holds another sweep (norms" in other.err
    more = run("sweep", *QUICK, "--norms=none,layer,RMSNorm", "--seeds=3,", "--print", "--", *SMALL)
    assert more.out == "ln-zoo sweep --out s --run RMSNorm/seed_3\n"


def test_a_run_that_ends_in_nan_is_reported(here: Path) -> None:
    done = run(
        *("sweep", *QUICK, "--norms=none", "--seeds=1", "--set=model.lr=1e-3,1e30", "--print"),
        *("--", *SMALL),
    )
    codes = [run(*command.split()[1:]).code for command in done.out.splitlines()]
    assert codes == [0, 1]
    report = run("sweep", "--out=s", "--gather")
    assert report.code == 0, report.err
    assert "1 of 2 runs have finished." in report.out
    assert "`none-model.lr-1e30/seed_0` failed:" in report.out
    assert "not finite" in report.out


def test_runs_from_weights_are_tested_and_resumed(here: Path) -> None:
    """Weights that every run starts from are not given again with its own checkpoint."""
    done = run(
        *("sweep", f"--config={CONFIGS / 'quickstart.yaml'}", "--out=s", "--norms=layer"),
        *("--seeds=1", "--test=best", "--print", "--", "--weights=mlp.layernorm-digits"),
        *("--trainer.max_epochs=1", "--trainer.callbacks+=ModelCheckpoint"),
        "--trainer.callbacks.monitor=val_nll",
    )
    assert done.code == 0, done.err
    (command,) = done.out.splitlines()
    first = run(*command.split()[1:])
    assert first.code == 0, first.err
    # Lightning would warn of files that it never replaces here.
    assert "is not empty" not in first.err
    assert "dirpath has changed" not in first.err
    tested = here / "s/layer/seed_0/sweep_test/test_results.json"
    runs = json.loads(tested.read_text())["training_runs"]
    assert [run["epochs"] for run in runs] == [15, 1]
    # Its table lost, it goes on from its checkpoint, of which nothing is left to train.
    tested.unlink()
    again = run(*command.split()[1:])
    assert again.code == 0, again.err
    assert json.loads(tested.read_text())["training_runs"] == runs


def grid(folder: Path) -> list[str]:
    return [
        *("sweep", f"--config={CONFIGS / 'quickstart.yaml'}", f"--out={folder}", "--jobs=2"),
        *("--norms=layer,batch", "--seeds=2"),
    ]


def tables(folder: Path) -> dict[str, str]:
    """All that the report says, but for seconds."""
    found = {}
    for name in ("runs", "spread", "differences", "curves", "reached"):
        with (folder / f"report/{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        found[name] = json.dumps([{k: v for k, v in r.items() if "seconds" not in k} for r in rows])
    return found


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    asked = ["pgrep", "-P", str(process.pid)]
    return list(map(int, subprocess.run(asked, capture_output=True, text=True).stdout.split()))


@pytest.mark.slow
def test_killed_and_gone_on_with_elsewhere(tmp_path: Path) -> None:
    """From a copy of its folder at another path, as on another machine."""
    assert installed(tmp_path, *grid(tmp_path / "whole"), timeout=3000).code == 0
    here, there = tmp_path / "here", tmp_path / "there"
    process = subprocess.Popen(
        [SCRIPT, *grid(here)], env=environment(), stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    while not list(here.rglob("last.ckpt")):
        assert process.poll() is None, "it ended before its first checkpoint"
        time.sleep(0.1)
    children = children_of(process)
    process.kill()
    process.wait()
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            while True:  # until it is gone
                os.kill(child, signal.SIGKILL)
                time.sleep(0.05)
    shutil.copytree(here, there)
    shutil.rmtree(here)
    assert installed(tmp_path, *grid(there), timeout=3000).code == 0
    assert tables(there) == tables(tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_random_times_it_makes_the_same_table(tmp_path: Path) -> None:
    """20 times by SIGKILL: the sweep alone, whose runs then end, or with all of its runs."""
    assert installed(tmp_path, *grid(tmp_path / "whole"), timeout=3000).code == 0
    chance = random.Random(0)
    kills = 0
    broken = tmp_path / "broken"
    while kills < 20:
        process = subprocess.Popen(
            [SCRIPT, *grid(broken)], env=environment(), stdout=subprocess.DEVNULL, cwd=tmp_path
        )
        time.sleep(chance.uniform(2, 30))
        children = children_of(process)
        if process.poll() is not None:
            # It has finished: once more from nothing.
            assert process.returncode == 0
            assert tables(broken) == tables(tmp_path / "whole")
            subprocess.run(["rm", "-r", str(broken)], check=True)
            continue
        process.kill()
        process.wait()
        kills += 1
        for child in children if chance.random() < 0.5 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert installed(tmp_path, *grid(broken), timeout=3000).code == 0
    assert tables(broken) == tables(tmp_path / "whole")
