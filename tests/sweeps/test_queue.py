"""The queue of a sweep: how many run, what becomes of their ends, stopping, one run's own process.

The runs here are a few lines of Python that leave what a run leaves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import Namespace
from sweep_runs import refuses

from ln_zoo.cli import main, run_folders
from ln_zoo.cli.sweep import worker
from ln_zoo.cli.sweep.check import Checked
from ln_zoo.sweeps import progress, queue
from ln_zoo.sweeps.grid import Grid, Run
from ln_zoo.sweeps.launchers import base
from ln_zoo.sweeps.launchers.local import LocalLauncher
from ln_zoo.sweeps.manifest import write_grid
from ln_zoo.sweeps.progress import Progress, Watcher
from ln_zoo.sweeps.queue import Queue
from ln_zoo.sweeps.state import (
    BUSY,
    FAILED,
    FINISHED,
    TEST_FOLDER,
    WAITING,
    Length,
    State,
    progress_of,
    state_of,
)
from ln_zoo.utils.locks import owned

GRID = Grid(configs=["c.yaml"], norms=["a.yaml", "b.yaml"], seeds=[0, 1], data_seed=False)

#: In place of a run: notes its begin and end in ``events``, and ends as its folder's ``how`` says.
FAKE = """
import json, os, pathlib, signal, sys, time
out, *names = (a.partition("=")[2] for a in sys.argv[2:-1])
for name in names:
    folder = pathlib.Path(out, name)
    folder.mkdir(exist_ok=True, parents=True)
    events = pathlib.Path(out, "events")
    with events.open("a") as file: file.write(f"begin {name}\\n")
    how = (folder / "how").read_text() if (folder / "how").exists() else ""
    time.sleep(60 if how == "long" else 0.05)
    with events.open("a") as file: file.write(f"end {name}\\n")
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "words": sys.exit("ln-zoo fit: error: no data")
    (folder / "test_results.json").write_text(json.dumps({"metrics": {"error": 0.5}}))
"""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PYTHON", [sys.executable, "-S", "-c", FAKE])
    monkeypatch.setattr(base.Launcher, "pause", 0.01)
    monkeypatch.setattr(queue, "_ELSEWHERE_PAUSE", 0.01)


def sweep(out: Path, watcher: Watcher | None = None, **options: Any) -> Queue:
    lengths = options.pop("lengths", {})
    return Queue(GRID.runs(), out, lengths, LocalLauncher(), [watcher or Watcher()], **options)


def end_as(out: Path, name: str, how: str) -> None:
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / "how").write_text(how)


def test_no_more_runs_at_a_time_than_jobs(tmp_path: Path) -> None:
    assert sweep(tmp_path, jobs=2).run() == 0
    lines = (tmp_path / "events").read_text().splitlines()
    running = list(accumulate(1 if line.startswith("begin") else -1 for line in lines))
    assert len(lines) == 8
    assert 1 <= max(running) <= 2
    assert all(state_of(tmp_path / run.name).kind == FINISHED for run in GRID.runs())


def test_failures_are_noted_and_stop_nothing(tmp_path: Path, capsys) -> None:
    end_as(tmp_path, "a/seed_0", "kill")
    end_as(tmp_path, "b/seed_0", "words")
    assert sweep(tmp_path).run() == 0
    states = {run.name: state_of(tmp_path / run.name) for run in GRID.runs()}
    assert [state.kind for state in states.values()] == [FAILED, FAILED, FINISHED, FINISHED]
    assert states["a/seed_0"].error.startswith("killed by SIGKILL")
    assert states["b/seed_0"].error == "ln-zoo fit: error: no data"
    printed = capsys.readouterr().out
    assert "[2/4] b/seed_0: FAILED: ln-zoo fit: error: no data" in printed
    assert "[4/4] b/seed_1: finished (error 0.5)" in printed
    # Once more: what has finished is left alone, what failed is tried again.
    for name in ("a/seed_0", "b/seed_0"):
        end_as(tmp_path, name, "")
    (tmp_path / "events").unlink()
    assert sweep(tmp_path).run() == 0
    begun = [x for x in (tmp_path / "events").read_text().splitlines() if x.startswith("begin")]
    assert begun == ["begin a/seed_0", "begin b/seed_0"]
    assert state_of(tmp_path / "a/seed_0").kind == FINISHED


def test_stopped_by_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stopper(Watcher):
        def checked(self, progress: Progress) -> None:
            # When all of them run.
            if (tmp_path / "events").exists() and len(progress.states) == 2:
                signal.raise_signal(signal.SIGINT)

    for name in ("a/seed_0", "b/seed_0"):
        end_as(tmp_path, name, "long")
    before = signal.getsignal(signal.SIGINT)
    assert sweep(tmp_path, jobs=2, watcher=Stopper()).run() == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping: 2 runs write their checkpoints" in capsys.readouterr().out
    for run in GRID.runs():
        # Ended by us, so neither failed nor finished.
        assert state_of(tmp_path / run.name).kind == "waiting"


def test_a_resumed_run_is_shown_as_it_is(tmp_path: Path, monkeypatch, capsys) -> None:
    """At once, though the run has not yet written its table anew; without a terminal too."""
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    tables = [tmp_path / run / "seed_0/metrics.csv" for run in "ab"]
    for table in tables:
        table.parent.mkdir(parents=True)
        table.write_text("epoch,step\n0,40\n")
    (tmp_path / "a/seed_0/checkpoints").mkdir()
    (tmp_path / "a/seed_0/checkpoints/last.ckpt").touch()
    lengths = dict.fromkeys("ab", Length(None, 100))
    running = sweep(tmp_path, lengths=lengths)
    for table in tables:
        table.unlink()
    assert running.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[0/4 finished] a/seed_0: resumed at 40%"
    assert lines[1].startswith("running: a/seed_0 40%")
    # Without a checkpoint it begins anew.
    assert "[1/4 finished] b/seed_0: begun" in lines


def test_an_ignored_signal_stops_nothing(tmp_path: Path) -> None:
    """Such as SIGHUP under nohup."""

    class HangUp(Watcher):
        def began(self, run: Run, progress: Progress) -> None:
            signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert sweep(tmp_path, watcher=HangUp()).run() == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_sweep_that_ends_with_its_time_is_finished(tmp_path: Path) -> None:
    class Slow(Watcher):
        def ended(self, run: Run, state: State, seconds: float, progress: Progress) -> None:
            if len(progress.states) == len(progress.runs):
                time.sleep(max(0.0, began + 1.0 - time.monotonic()))

    began = time.monotonic()
    running = sweep(tmp_path, Slow(), jobs=4, max_time=0.9)
    assert running.run() == 0


def test_stopped_after_a_time(tmp_path: Path) -> None:
    end_as(tmp_path, "a/seed_0", "long")
    running = sweep(tmp_path, max_time=0.2)
    began = time.monotonic()
    assert running.run() == signal.SIGTERM
    assert 0.2 < time.monotonic() - began < 30
    assert state_of(tmp_path / "a/seed_0").kind == "waiting"


def test_packed_runs_share_a_process(tmp_path: Path) -> None:
    """What ends it is the failure of the run under way; the others go on in another."""
    end_as(tmp_path, "b/seed_0", "kill")
    assert sweep(tmp_path, pack=8).run() == 0
    states = {run.name: state_of(tmp_path / run.name) for run in GRID.runs()}
    assert [state.kind for state in states.values()] == [FINISHED, FAILED, FINISHED, FINISHED]
    lines = (tmp_path / "events").read_text().splitlines()
    assert [line for line in lines if line.startswith("begin")] == [
        f"begin {run.name}" for run in GRID.runs()
    ]


def test_a_run_that_is_trained_elsewhere_is_left_to_it(tmp_path: Path, capsys) -> None:
    """Until it has finished there, or its process is gone."""
    names = ["a/seed_0", "b/seed_0"]
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom ln_zoo.utils.locks import owned\n"
        "with owned(Path(sys.argv[1])): print('ready', flush=True); time.sleep(60)"
    )
    others = []
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        argv = [sys.executable, "-c", code, str(tmp_path / name / ".owner")]
        others.append(subprocess.Popen(argv, stdout=subprocess.PIPE))
        assert others[-1].stdout.readline() == b"ready\n"

    class Other(Watcher):
        def ended(self, run: Run, state: State, seconds: float, progress: Progress) -> None:
            if run.name == "b/seed_1":
                assert names[0] not in progress.states
                results = tmp_path / names[0] / "test_results.json"
                results.write_text('{"metrics": {"error": 0.25}}')
                for other in others:
                    other.kill()
                    other.wait()

    assert sweep(tmp_path, Other()).run() == 0
    states = {run.name: state_of(tmp_path / run.name) for run in GRID.runs()}
    assert [state.metrics.get("error") for state in states.values()] == [0.25, 0.5, 0.5, 0.5]
    events = (tmp_path / "events").read_text()
    assert "begin a/seed_0" not in events
    assert events.count("begin b/seed_0") == 1


def test_the_manifest_has_one_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ln_zoo.cli.sweep.request._PATIENCE", 0)
    monkeypatch.setattr("ln_zoo.cli.sweep.check.check_grid", lambda grid, out: Checked())
    (tmp_path / "c.yaml").touch()
    grid = replace(GRID, configs=[str(tmp_path / "c.yaml")], norms=["LayerNorm"])
    write_grid(grid, tmp_path)
    with owned(tmp_path / ".sweep.owner"):
        assert main(["sweep", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"process {os.getpid()}" in error
    assert "--out" in error


def test_progress_of_a_run(tmp_path: Path) -> None:
    assert progress_of(tmp_path) == (0, 0)
    text = "epoch,step,train_loss\r\n0,9,0.5\r\n3,39,0.4\r\n"
    (tmp_path / "metrics.csv").write_text(text)
    assert progress_of(tmp_path) == (3, 39)
    (tmp_path / "metrics.csv").write_text(text + "4,4")  # as it is being written
    assert progress_of(tmp_path) == (3, 39)


# One run, in its own process


def work(out: Path, monkeypatch: pytest.MonkeyPatch, *outcomes: object) -> tuple[int, list]:
    """Runs a/seed_0 with this in place of ``fit`` and ``test``: exit codes, words, or errors."""
    write_grid(GRID, out)
    calls: list[list[str]] = []
    left = list(outcomes)

    def fake_main(argv: list[str]) -> int:
        calls.append(argv)
        loggers = [Namespace(class_path="CSVLogger", init_args=Namespace())]
        assert run_folders.place(loggers)
        own = loggers[0].init_args
        assert Path(own.save_dir, own.name, own.version) == out / "a/seed_0"
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, str):
            print(f"ln-zoo fit: error: {outcome}", file=sys.stderr)
            return 1
        if outcome == 0:
            results = {"metrics": {"error": 0.25}}
            (out / "a/seed_0/test_results.json").write_text(json.dumps(results))
        return int(outcome)  # type: ignore[call-overload]

    monkeypatch.setattr("ln_zoo.cli.main", fake_main)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return worker.work(out, ["a/seed_0"]), calls


def test_a_run_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, calls = work(tmp_path, monkeypatch, 0)
    assert code == 0
    (call,) = calls
    assert call[0] == "fit"
    assert {"--config=a.yaml", "--seed_everything=0", "--test_after_fit=true"} <= set(call)
    assert not any(a.startswith("--ckpt_path") for a in call)
    assert work(tmp_path, monkeypatch) == (0, [])


def test_runs_of_a_sweep_are_one_group_of_wandb(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "rates"
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    out.mkdir()
    work(out, monkeypatch, 0)
    assert os.environ["WANDB_RUN_GROUP"] == "rates"


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / "a/seed_0/checkpoints/last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    _, (call,) = work(tmp_path, monkeypatch, 0)
    assert call[-1] == f"--ckpt_path={checkpoint}"


def test_why_a_run_failed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(tmp_path, monkeypatch, "the training loss is not finite at step 3")[0] == 1
    state = state_of(tmp_path / "a/seed_0")
    assert state.kind == FAILED
    assert state.error == "the training loss is not finite at step 3"
    with pytest.raises(RuntimeError, match="out of memory"):
        work(tmp_path, monkeypatch, RuntimeError("out of memory\nat ..."))
    assert state_of(tmp_path / "a/seed_0").error == "RuntimeError: out of memory"
    # Ended by a signal it did not fail.
    assert work(tmp_path, monkeypatch, 130)[0] == 130
    assert state_of(tmp_path / "a/seed_0").kind == "waiting"


def test_a_result_that_was_cut_short_is_none(tmp_path: Path) -> None:
    (tmp_path / "test_results.json").write_text('{"metrics": {"error": 0.')
    assert state_of(tmp_path).kind == "waiting"
    (tmp_path / "test_results.json").write_text('{"metrics": {"error": NaN}}')
    assert state_of(tmp_path).kind == FAILED


def test_a_test_of_the_user_is_none_of_the_sweep(tmp_path: Path) -> None:
    """`ln-zoo test` with the config.yaml of an interrupted run writes to ``test`` within it."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.ckpt").touch()
    for name in ("test", TEST_FOLDER):
        assert state_of(tmp_path).kind == "begun"
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_results.json").write_text('{"metrics": {"error": 0.5}}')
    assert state_of(tmp_path).kind == FINISHED


def test_runs_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("there is no sweep in", worker.work, tmp_path, ["a/seed_0"])
    write_grid(GRID, tmp_path)
    message = "has no run 'a/seed_7'; did you mean 'a/seed_"
    refuses(message, worker.work, tmp_path, ["a/seed_7"])
    (tmp_path / "a/seed_0").mkdir(parents=True)
    monkeypatch.setattr(worker, "_PATIENCE", 0)
    monkeypatch.setattr(worker._ParentWatcher, "start", lambda self: None)
    with owned(tmp_path / "a/seed_0/.owner"):
        refuses(f"process {os.getpid()} on", worker.work, tmp_path, ["a/seed_0"])
        assert worker.work(tmp_path, ["a/seed_0"], attached=True) == BUSY
    assert state_of(tmp_path / "a/seed_0").kind == WAITING


def test_a_run_ends_with_the_sweep(tmp_path: Path) -> None:
    """Also where that is killed, so that no second process begins beside the first."""
    code = (
        "from ln_zoo.cli.sweep.worker import _ParentWatcher\nimport time\n"
        "_ParentWatcher().start()\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    timer = threading.Timer(50, process.kill)
    timer.start()
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait() == -signal.SIGTERM
    timer.cancel()
