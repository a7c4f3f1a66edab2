"""One run of a sweep in this process; resumes from the last checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TextIO, cast

from filelock import FileLock, Timeout

from ln_zoo.sweeps.grid import Grid, Run, SweepError, existing_grid, make_folder
from ln_zoo.sweeps.state import (
    FAILURE,
    FINISHED,
    LOCK,
    TEST_FOLDER,
    checkpoint_of,
    state_of,
    write_failure,
)
from ln_zoo.utils.names import nearest

#: Seconds to wait for an earlier process of the run, which is writing its last checkpoint.
_PATIENCE = 60
#: Exit codes above are 128 plus the number of a signal.
_SIGNALLED = 128


def work(out: Path, name: str, attached: bool = False) -> int:
    """Trains and tests one run of a sweep; returns the exit code of ``fit``, or of ``test``.

    ``name`` is such as ``"layer/seed_0"``. ``attached``: stop, as on SIGTERM, when standard input
    ends, because the parent is gone.

    Raises:
        SweepError: if there is no such sweep or run, or another process is running it.
    """
    grid = existing_grid(out)
    runs = {run.name: run for run in grid.runs()}
    if name not in runs:
        raise SweepError(f"{out} has no run {name!r}{nearest(name, runs)}")
    folder = out / name
    make_folder(folder)
    watch = _ParentWatcher()
    if attached:
        watch.start()
    if grid.threads:
        # Before torch is imported, which reads it.
        os.environ["OMP_NUM_THREADS"] = str(grid.threads)
    try:
        with FileLock(folder / LOCK, timeout=_PATIENCE if attached else 1):
            if state_of(folder).kind == FINISHED:
                print(f"{name} is finished: {folder}")
                return 0
            (folder / FAILURE).unlink(missing_ok=True)
            code, error = _trained(grid, runs[name], out)
            if code == 0:
                state = state_of(folder)
                if state.kind != FINISHED:
                    code, error = 1, state.error or "the test left no results"
                    print(f"ln-zoo sweep: error: {error}", file=sys.stderr)
            if 0 < code < _SIGNALLED and not watch.ended:
                write_failure(folder, error)
            return code
    except Timeout:
        raise SweepError(f"another process is running {folder}") from None


def _trained(grid: Grid, run: Run, out: Path) -> tuple[int, str]:
    from ln_zoo.cli import main

    # Lightning warns that it deletes the curves, which the checkpoint restores.
    warnings.filterwarnings("ignore", "Experiment logs directory .* is not empty")
    messages = _LastErrorLine(sys.stderr)
    cell, _, seed = run.name.rpartition("/")
    common = [
        *grid.arguments(run),
        f"--trainer.logger.save_dir={out}",
        f"--trainer.logger.name={cell}",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
    fit = ["fit", *common, f"--trainer.logger.version={seed}"]
    fit += [f"--test_after_fit={'true' if grid.test == 'last' else 'false'}"]
    checkpoint = checkpoint_of(out / run.name)
    if checkpoint is not None:
        fit += _from_checkpoint(checkpoint)
    with contextlib.redirect_stderr(cast(TextIO, messages)):
        try:
            code = main(fit)
            if code == 0 and grid.test == "best":
                best = _best(out / run.name)
                # Lightning's logger would delete the curves in the run's folder.
                test = ["test", *common, f"--trainer.logger.version={seed}/{TEST_FOLDER}"]
                code = main([*test, *_from_checkpoint(best)])
        except Exception as error:
            write_failure(out / run.name, f"{type(error).__name__}: {error}".splitlines()[0])
            raise
    return code, messages.error or f"exit code {code}"


def _from_checkpoint(path: Path) -> list[str]:
    return ["--weights=null", f"--ckpt_path={path}"]


def _best(folder: Path) -> Path:
    from ln_zoo.zoo.reading import read_checkpoint

    last = checkpoint_of(folder)
    states = read_checkpoint(str(last))["callbacks"] if last else {}
    for state in states.values():
        if state.get("monitor") and state.get("best_model_path"):
            return folder / "checkpoints" / Path(state["best_model_path"]).name
    raise SweepError(
        "there is no best checkpoint: --test best needs a ModelCheckpoint with monitor"
    )


class _LastErrorLine:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error = ""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            _, found, error = line.partition(": error: ")
            if found:
                self.error = error
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _ParentWatcher(threading.Thread):
    """Sends SIGTERM to this process when standard input ends."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = False

    def run(self) -> None:
        with contextlib.suppress(OSError):
            # Not sys.stdin: a thread must not hold its lock when Python exits.
            while os.read(0, 1024):
                pass
        self.ended = True
        os.kill(os.getpid(), signal.SIGTERM)
