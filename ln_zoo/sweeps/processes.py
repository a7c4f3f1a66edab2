"""Runs of a sweep as processes, at most N at a time."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.state import (
    FAILED,
    FAILURE,
    FINISHED,
    LOG,
    WAITING,
    State,
    checkpoint_of,
    last_error_line,
    progress_of,
    state_of,
    write_failure,
)
from ln_zoo.utils.signals import STOPPING, signal_handler

if TYPE_CHECKING:
    from ln_zoo.sweeps.state import Length

#: Seconds between two checks of the processes.
_PAUSE = 0.25
#: Seconds between two lines of progress, without a terminal.
_LINE_EVERY = 60.0


@dataclass
class Progress:
    """Progress of a sweep."""

    runs: Sequence[Run]  # all runs of the grid
    states: dict[str, State]  # by name, of runs that are not running
    shares: dict[str, float]  # finished share by name, of running runs
    left: float | None = None  # remaining seconds; None if unknown


class Watcher:
    """Callbacks of `Processes`; prints a line for each run, and every minute."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def began(self, run: Run, progress: Progress) -> None:
        """Called when a run begins or resumes."""
        share = progress.shares.get(run.name, 0)
        done = sum(state.kind == FINISHED for state in progress.states.values())
        how = f"resumed at {share:.0%}" if share else "begun"
        print(f"[{done}/{len(progress.runs)} finished] {run.name}: {how}", flush=True)

    def ended(self, run: Run, state: State, seconds: float, progress: Progress) -> None:
        done = sum(s.kind in (FINISHED, FAILED) for s in progress.states.values())
        count = f"[{done}/{len(progress.runs)}]"
        left = f", {duration(progress.left)} left" if progress.left else ""
        print(f"{count} {run.name}: {outcome(state)}, {duration(seconds)}{left}", flush=True)

    def checked(self, progress: Progress) -> None:
        """Called after each check of the processes."""
        if time.monotonic() - self._printed < _LINE_EVERY:
            return
        self._printed = time.monotonic()
        running = ", ".join(f"{name} {share:.0%}" for name, share in progress.shares.items())
        left = f", {duration(progress.left)} left" if progress.left else ""
        print(f"running: {running}{left}", flush=True)

    def stopping(self, runs: int) -> None:
        print(
            f"stopping: {runs} runs write their checkpoints (interrupt again to stop at once)",
            flush=True,
        )


class Processes:
    """The processes of a sweep, ``jobs`` at a time.

    ``lengths`` of the runs are by label. After ``max_time`` seconds the runs are stopped, as on
    SIGTERM.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        out: Path,
        lengths: Mapping[str, Length],
        jobs: int,
        watcher: Watcher,
        max_time: float = math.inf,
    ) -> None:
        self.max_time = max_time
        self.out = out
        self.lengths = lengths
        self.jobs = jobs
        self.watcher = watcher
        states = {run.name: state_of(out / run.name) for run in runs}
        # Failed runs are repeated.
        states = {k: State(WAITING) if s.kind == FAILED else s for k, s in states.items()}
        self.progress = Progress(runs, states, {})
        self._running: dict[str, tuple[Run, subprocess.Popen[bytes], float]] = {}
        self._signals: list[int] = []
        self._began = time.monotonic()
        # A resumed run rewrites its table, which is missing for a while.
        self._resumed: dict[str, float] = {}
        self._resumed = {
            run.name: self._share_of(run) for run in runs if checkpoint_of(out / run.name)
        }
        self._share_at_start = self._share()

    def run(self) -> int:
        """Runs all unfinished runs; returns the signal that stopped the sweep, or 0."""
        states = self.progress.states
        waiting = deque(r for r in self.progress.runs if states[r.name].kind != FINISHED)
        stopping = [*STOPPING]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            stopping.append(signal.SIGHUP)  # nohup ignores it
        with signal_handler(lambda number, frame: self._signals.append(number), stopping):
            try:
                while (waiting or self._running) and not self._signals:
                    while waiting and len(self._running) < self.jobs:
                        self._start(waiting.popleft())
                    time.sleep(_PAUSE)
                    self._check()
                    late = time.monotonic() - self._began > self.max_time
                    if late and (waiting or self._running):
                        self._signals.append(signal.SIGTERM)
                if self._signals:
                    self._stop()
            finally:
                # Also after an error: no process outlives the sweep.
                for _, process, _ in self._running.values():
                    process.kill()
                    process.wait()
        return self._signals[0] if self._signals else 0

    def _start(self, run: Run) -> None:
        folder = self.out / run.name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            (folder / FAILURE).unlink()
        with (folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                [*_PYTHON, "sweep", f"--out={self.out}", f"--run={run.name}", "--attached"],
                # A pipe that is closed whenever this process ends.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Only this process gets Ctrl-C, and passes it on.
                start_new_session=True,
            )
        del self.progress.states[run.name]
        self._running[run.name] = (run, process, time.monotonic())
        self.progress.shares[run.name] = self._share_of(run)
        self.watcher.began(run, self.progress)

    def _check(self) -> None:
        for name, (run, process, began) in list(self._running.items()):
            self.progress.shares[name] = self._share_of(run)
            if process.poll() is None:
                continue
            del self._running[name]
            del self.progress.shares[name]
            if process.stdin is not None:
                process.stdin.close()
            state = self._ended(run, process.returncode)
            self.progress.states[name] = state
            self.progress.left = self._time_left()
            self.watcher.ended(run, state, time.monotonic() - began, self.progress)
        self.progress.left = self._time_left()
        self.watcher.checked(self.progress)

    def _ended(self, run: Run, code: int) -> State:
        folder = self.out / run.name
        state = state_of(folder)
        if code == 0 or state.kind in (FAILED, FINISHED) or self._signals:
            return state
        if code < 0:
            error = f"killed by {signal.Signals(-code).name}"
            if -code == getattr(signal, "SIGKILL", 9):
                error += ", perhaps because memory ran out"
        else:
            error = last_error_line(folder) or f"exit code {code}"
        write_failure(folder, error)
        return State(FAILED, error=error)

    def _stop(self) -> None:
        """Let the runs write their checkpoints; return early on another signal."""
        asked = len(self._signals)
        self.watcher.stopping(len(self._running))
        for _, process, _ in self._running.values():
            process.terminate()
        while self._running and len(self._signals) == asked:
            time.sleep(_PAUSE)
            self._check()

    # Progress

    def _share_of(self, run: Run) -> float:
        length = self.lengths.get(run.label)
        epochs, updates = progress_of(self.out / run.name)
        shares = [self._resumed.get(run.name, 0.0)]
        if length and length.epochs and length.epochs > 0:
            shares.append(epochs / length.epochs)
        if length and length.updates:
            shares.append(updates / length.updates)
        return min(max(shares), 1.0)

    def _share(self) -> float:
        """Number of finished runs, with fractions of running ones."""
        done = 0.0
        for run in self.progress.runs:
            state = self.progress.states.get(run.name)
            ended = state is not None and state.kind in (FINISHED, FAILED)
            done += 1.0 if ended else self._share_of(run)
        return done

    def _time_left(self) -> float | None:
        share = self._share()
        gained = share - self._share_at_start
        if gained <= 0:
            return None
        return (time.monotonic() - self._began) / gained * (len(self.progress.runs) - share)


#: Python without the current folder first in its path (-P).
_PYTHON = [sys.executable, "-P", "-c", "import sys; from ln_zoo.cli import main; sys.exit(main())"]


def outcome(state: State) -> str:
    """Formats the state of a run that has ended."""
    if state.kind == FINISHED:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
        return f"finished ({shown})"
    if state.kind == FAILED:
        return f"FAILED: {state.error}"
    return "stopped"


def duration(seconds: float) -> str:
    """Formats seconds, rounded.

    Example:
        >>> duration(12.3), duration(754), duration(5025)
        ('12 s', '12 min 34 s', '1 h 23 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
