"""The queue of a sweep: starts its runs by a launcher, some at a time, and notes how they end.

Several queues may share the folder of a sweep, on any machines: a run that another one trains is
left to it, and taken over if its process is gone.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.sweeps.grid import Run, norm_name
from ln_zoo.sweeps.launchers.base import Command, Handle, Launcher
from ln_zoo.sweeps.progress import Progress, Watcher
from ln_zoo.sweeps.state import (
    BUSY,
    DONE,
    FAILED,
    FAILURE,
    LOCK,
    WAITING,
    State,
    checkpoint_of,
    last_error_line,
    progress_of,
    state_of,
    write_failure,
)
from ln_zoo.utils.locks import is_free, lock_of
from ln_zoo.utils.signals import STOPPING, signal_handler

if TYPE_CHECKING:
    from filelock import SoftFileLease

    from ln_zoo.sweeps.search import Search
    from ln_zoo.sweeps.state import Length

#: Seconds between two checks of a run that is trained elsewhere.
_ELSEWHERE_PAUSE = 2.0
#: How often a run is started again without any progress.
_RETRIES = 2


@dataclass
class _Job:
    handle: Handle
    left: list[Run]  # that have not ended; the first one is trained
    began: float


class Queue:
    """The queue of a sweep: ``jobs`` processes at a time, each for ``pack`` runs.

    ``lengths`` of the runs are by label. After ``max_time`` seconds the runs are stopped, as on
    SIGTERM.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        out: Path,
        lengths: Mapping[str, Length],
        launcher: Launcher,
        watchers: Sequence[Watcher],
        jobs: int = 1,
        pack: int = 1,
        max_time: float = math.inf,
        search: Search | None = None,
    ) -> None:
        self.out = out
        self.lengths = lengths
        self.launcher = launcher
        self.watchers = watchers
        self.jobs = jobs
        self.pack = pack
        self.max_time = max_time
        self.search = search
        self._searches = search is not None
        states = {run.name: state_of(out / run.name) for run in runs}
        #: Failed runs are repeated once.
        self._repeated = {name for name, state in states.items() if state.kind == FAILED}
        states |= dict.fromkeys(self._repeated, State(WAITING))
        self.progress = Progress(runs, states)
        self._waiting = deque(run for run in runs if states[run.name].kind not in DONE)
        self._jobs: list[_Job] = []
        #: Locks of runs that are trained elsewhere, and when to look again.
        self._elsewhere: dict[str, tuple[SoftFileLease, float]] = {}
        #: Progress at the last start of a run, and how often it was started again since.
        self._attempts: dict[str, tuple[tuple[int, int], int]] = {}
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
        stopping = [*STOPPING]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            stopping.append(signal.SIGHUP)  # nohup ignores it
        with (
            self.launcher.opened(),
            signal_handler(lambda number, frame: self._signals.append(number), stopping),
        ):
            try:
                while (self._waiting or self._jobs or self._searches) and not self._signals:
                    self._ask()
                    self._fill()
                    time.sleep(self.launcher.pause)
                    self._check()
                    late = time.monotonic() - self._began > self.max_time
                    if late and (self._waiting or self._jobs):
                        self._signals.append(signal.SIGTERM)
                if self._signals:
                    self._stop()
                if self.search is not None:
                    self.search.tell()
            finally:
                # Also after an error: no process outlives the sweep.
                for job in self._jobs:
                    job.handle.kill()
                for watcher in self.watchers:
                    watcher.closed(self.progress)
        return self._signals[0] if self._signals else 0

    # Starting

    def _ask(self) -> None:
        """Ask the search for runs, as many as may start."""
        free = self.jobs - len(self._jobs)
        while self.search and self._searches and len(self._waiting) - len(self._elsewhere) < free:
            known = {run.name for run in self.progress.runs}
            runs = self.search.ask(known)
            self._searches = bool(runs)
            self.progress.runs = [*self.progress.runs, *runs]
            for run in runs:
                state = state_of(self.out / run.name)
                self.progress.states[run.name] = state
                if state.kind not in DONE:
                    self._waiting.append(run)

    def _fill(self) -> None:
        """Start as many processes as may run."""
        free = self.jobs - len(self._jobs)
        groups: list[list[Run]] = []
        while self.launcher.queues or len(groups) < free:
            size = math.ceil(len(self._waiting) / max(free - len(groups), 1))
            if not (group := self._next(min(self.pack, size))):
                break
            groups.append(group)
        commands = [Command(self.out, group) for group in groups]
        for group in groups:
            for run in group:
                with contextlib.suppress(OSError):
                    (self.out / run.name / FAILURE).unlink()
        for handle, group in zip(self.launcher.start_all(commands), groups, strict=True):
            self._jobs.append(_Job(handle, group, time.monotonic()))
            if self.launcher.runs_at_once:
                self._begin(group[0])

    def _next(self, size: int) -> list[Run]:
        """Remove up to ``size`` runs from the queue that nobody trains."""
        found: list[Run] = []
        for _ in range(len(self._waiting)):
            if len(found) == size:
                break
            run = self._waiting.popleft()
            state = state_of(self.out / run.name)
            failed = state.kind == FAILED and run.name not in self._repeated
            if state.kind in DONE or failed:
                self._end(run, state, self._began)  # elsewhere
            elif self._is_free(run):
                self._repeated.discard(run.name)
                found.append(run)
            else:
                self._waiting.append(run)
        return found

    def _is_free(self, run: Run) -> bool:
        path = self.out / run.name / LOCK
        if not path.exists():
            return True
        lock, when = self._elsewhere.get(run.name) or (lock_of(path), 0.0)
        if time.monotonic() < when:
            return False
        if is_free(lock):
            self._elsewhere.pop(run.name, None)
            return True
        self._elsewhere[run.name] = (lock, time.monotonic() + _ELSEWHERE_PAUSE)
        if run.name in self.progress.states:
            self._begin(run)
        return False

    def _begin(self, run: Run) -> None:
        self.progress.states.pop(run.name, None)
        self.progress.shares[run.name] = self._share_of(run)
        for watcher in self.watchers:
            watcher.began(run, self.progress)

    # Ending

    def _check(self) -> None:
        for job in list(self._jobs):
            code = job.handle.poll()
            self._follow(job)
            if code is None and self.search and self.search.prunes(job.left[0]):
                job.handle.stop()
            if code is not None:
                self._jobs.remove(job)
                self._leave(job, code)
        for run in self.progress.runs:
            if run.name in self.progress.shares:
                self.progress.shares[run.name] = self._share_of(run)
        self._count()
        for watcher in self.watchers:
            watcher.checked(self.progress)

    def _follow(self, job: _Job) -> None:
        """Note which runs of a process have begun, and which have ended."""
        while len(job.left) > 1 and self._has_ended(job.left[0]):
            run = job.left.pop(0)
            self._end(run, state_of(self.out / run.name), job.began)
            job.began = time.monotonic()
        run = job.left[0]
        if run.name in self.progress.states and (self.out / run.name / LOCK).exists():
            self._begin(run)

    def _has_ended(self, run: Run) -> bool:
        return state_of(self.out / run.name).kind in (*DONE, FAILED)

    def _leave(self, job: _Job, code: int) -> None:
        """Note what became of the runs of a process that has ended."""
        unfinished = [run for run in job.left if not self._has_ended(run)]
        for run in job.left:
            state = state_of(self.out / run.name)
            if run in unfinished and not self._signals:
                if run is not unfinished[0] or code == BUSY or self._starts_again(run, job.handle):
                    self.progress.shares.pop(run.name, None)
                    self.progress.states[run.name] = state
                    self._waiting.append(run)
                    continue
                state = self._failed(run, code, job.handle.why) if code else state
            self._end(run, state, job.began)

    def _starts_again(self, run: Run, handle: Handle) -> bool:
        """Whether to start a run again that its engine has ended."""
        if not (self.launcher.resubmits and handle.interrupted):
            return False
        now = progress_of(self.out / run.name)
        before, tries = self._attempts.get(run.name, ((0, 0), 0))
        tries = 0 if now > before else tries + 1
        self._attempts[run.name] = (now, tries)
        return tries <= _RETRIES

    def _failed(self, run: Run, code: int, why: str) -> State:
        folder = self.out / run.name
        if why:
            error = why
        elif code < 0:
            error = f"killed by {signal.Signals(-code).name}"
            if -code == getattr(signal, "SIGKILL", 9):
                error += ", perhaps because memory ran out"
        else:
            error = last_error_line(folder) or f"exit code {code}"
        write_failure(folder, error)
        return State(FAILED, error=error)

    def _end(self, run: Run, state: State, began: float) -> None:
        self.progress.shares.pop(run.name, None)
        self.progress.states[run.name] = state
        self._count()
        for watcher in self.watchers:
            watcher.ended(run, state, time.monotonic() - began, self.progress)

    def _stop(self) -> None:
        """Let the runs write their checkpoints; return early on another signal."""
        asked = len(self._signals)
        for watcher in self.watchers:
            watcher.stopping(len(self._jobs))
        for job in self._jobs:
            job.handle.stop()
        while self._jobs and len(self._signals) == asked:
            time.sleep(self.launcher.pause)
            self._check()

    # Progress

    def _share_of(self, run: Run) -> float:
        length = self.lengths.get(run.label) or self.lengths.get(norm_name(run.norm))
        epochs, updates = progress_of(self.out / run.name)
        shares = [self._resumed.get(run.name, 0.0)]
        if length and length.epochs and length.epochs > 0:
            shares.append(epochs / length.epochs)
        if length and length.updates:
            shares.append(updates / length.updates)
        return min(max(shares), 1.0)

    def _share(self) -> float:
        """Number of finished runs, with fractions of running ones."""
        ended = (*DONE, FAILED)
        done = sum(state.kind in ended for state in self.progress.states.values())
        waiting = (
            self._resumed.get(name, 0.0)
            for name, state in self.progress.states.items()
            if state.kind not in ended
        )
        return done + sum(waiting) + sum(self.progress.shares.values())

    def _count(self) -> None:
        """Update share and time left."""
        done = self._share()
        runs, gained = len(self.progress.runs), done - self._share_at_start
        seconds = time.monotonic() - self._began
        self.progress.share = done / max(runs, 1)
        self.progress.left = seconds / gained * (runs - done) if gained > 0 else None
