"""Runs of a sweep in this process, one after the other; each resumes from its last checkpoint."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

from ln_zoo.sweeps.grid import Grid, Run, SweepError
from ln_zoo.sweeps.manifest import existing_grid, make_folder
from ln_zoo.sweeps.state import (
    BUSY,
    DONE,
    FAILURE,
    FINISHED,
    LOCK,
    LOG,
    TEST_FOLDER,
    checkpoint_of,
    state_of,
    write_failure,
)
from ln_zoo.utils.locks import LockedError, owned
from ln_zoo.utils.names import nearest
from ln_zoo.utils.signals import signal_handler

#: Seconds to wait for an earlier process of the run, which is writing its last checkpoint.
_PATIENCE = 60
#: Exit codes above are 128 plus the number of a signal.
_SIGNALLED = 128


def work(out: Path, names: Sequence[str], attached: bool = False) -> int:
    """Trains and tests runs of a sweep; returns the first exit code of ``fit`` or ``test`` but 0.

    ``names`` are such as ``"layer/seed_0"``. ``attached``: stop, as on SIGTERM, when standard input
    ends, because the parent is gone; with several runs, each has a log of its own.

    Raises:
        SweepError: if there is no such sweep or run, or another process is training it.
    """
    grid = existing_grid(out)
    runs = {run.name: run for run in grid.runs()}
    for name in names:
        if name not in runs:
            raise SweepError(f"{out} has no run {name!r}{nearest(name, runs)}")
    watch = _ParentWatcher()
    if attached:
        watch.start()
    if grid.threads:
        # Before torch is imported, which reads it.
        os.environ["OMP_NUM_THREADS"] = str(grid.threads)
    grid.find_modules(out)
    # W&B shows the runs as one group.
    os.environ.setdefault("WANDB_RUN_GROUP", out.absolute().name)
    codes = []
    # Until training handles signals: locks are released, as after any exception.
    with signal_handler(_exit, [signal.SIGTERM]), grid.in_own_folder(out) as out:
        for name in names:
            make_folder(out / name)
            if len(names) > 1 and attached:
                _log_to(out / name / LOG)
            codes.append(_work(grid, runs[name], out, attached, watch))
            if codes[-1] > _SIGNALLED:
                break
            if wandb := sys.modules.get("wandb"):
                wandb.finish()  # it would log the next run as part of this one
            gc.collect()
    return next(filter(None, codes), 0)


def _work(grid: Grid, run: Run, out: Path, attached: bool, watch: _ParentWatcher) -> int:
    folder = out / run.name
    try:
        # A queue starts the run again once it is free.
        with owned(folder / LOCK, timeout=1 if attached else _PATIENCE):
            if (kind := state_of(folder).kind) in DONE:
                print(f"{run.name} is {kind}: {folder}")
                return 0
            (folder / FAILURE).unlink(missing_ok=True)
            code, error = _trained(grid, run, out)
            if code == 0:
                state = state_of(folder)
                if state.kind != FINISHED:
                    code, error = 1, state.error or "the test left no results"
                    print(f"ln-zoo sweep: error: {error}", file=sys.stderr)
            # Without a queue, wrong input may be a mistake of place: nothing was run.
            if 0 < code < _SIGNALLED and not watch.ended and (attached or code != 2):
                write_failure(folder, error)
            return code
    except LockedError as error:
        if not attached:
            raise SweepError(f"{error}, which trains this run: wait for it, or stop it") from error
        return BUSY


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(_SIGNALLED + number)


def _log_to(path: Path) -> None:
    """Append standard output and error of this process to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _trained(grid: Grid, run: Run, out: Path) -> tuple[int, str]:
    from ln_zoo.cli import main, run_folders

    # Lightning warns that it deletes the curves, which the checkpoint restores.
    warnings.filterwarnings("ignore", "Experiment logs directory .* is not empty")
    messages = _LastErrorLine(sys.stderr)
    cell, _, seed = run.name.rpartition("/")
    common = [
        *grid.arguments(run),
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
    fit = ["fit", *common, f"--test_after_fit={'true' if grid.test == 'last' else 'false'}"]
    checkpoint = checkpoint_of(out / run.name)
    if checkpoint is not None:
        fit += _from_checkpoint(checkpoint)
    with contextlib.redirect_stderr(cast(TextIO, messages)):
        try:
            with run_folders.of_sweep(out, cell, seed):
                code = main(fit)
            if code == 0 and grid.test == "best":
                best = _best(out / run.name)
                # Lightning's logger would delete the curves in the run's folder.
                with run_folders.of_sweep(out, cell, f"{seed}/{TEST_FOLDER}"):
                    code = main(["test", *common, *_from_checkpoint(best)])
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
