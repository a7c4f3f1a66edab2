"""What starts the runs of a sweep: the interface of launchers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.state import LOG
from ln_zoo.utils.signals import signal_handler

#: Python without the current folder first in its path (-P).
PYTHON = [sys.executable, "-P", "-c", "import sys; from ln_zoo.cli import main; sys.exit(main())"]


class Handle(ABC):
    """A process or a job that was started."""

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code (negative: a signal), or None until it has ended."""

    @abstractmethod
    def stop(self) -> None:
        """Request a stop: the run writes its checkpoint first."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, and wait for its end."""

    #: Whether the engine ended it early, so that it should be started again.
    interrupted = False

    @property
    def why(self) -> str:
        """Why the engine ended it, if it did."""
        return ""


@dataclass(frozen=True)
class Command:
    """The command of one process for some runs, and where its output goes."""

    out: Path
    runs: Sequence[Run]

    @property
    def argv(self) -> list[str]:
        runs = [f"--run={run.name}" for run in self.runs]
        return [*PYTHON, "sweep", f"--out={self.out}", *runs, "--attached"]

    @property
    def log(self) -> Path:
        return self.out / self.runs[0].name / LOG

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process; it stops when this one ends, which holds its standard input open."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Only this process gets Ctrl-C, and passes it on.
                start_new_session=True,
            )


def run_in_job(command: Command, folder: str) -> int:
    """Start a process in the job of an engine, and wait for it; returns its exit code.

    Passes on the engine's signals. If the engine kills this process, the pipe of `Command.start`
    ends the other.
    """
    with contextlib.suppress(OSError):
        os.chdir(folder)  # for relative paths among the options
    process = command.start()
    with signal_handler(lambda number, frame: process.terminate()):
        # Not `wait`, in which Ray's interrupt would have no effect.
        while (code := process.poll()) is None:
            time.sleep(0.2)
    return code


class Launcher(ABC):
    """Starts runs, each in a process that ends with this one or with its job."""

    #: Seconds between two checks of the processes.
    pause = 0.25

    #: Whether a process runs as soon as it is started.
    runs_at_once = False
    #: Whether the engine limits how many jobs run, and so takes all of them at once.
    queues = False
    #: Whether jobs that ended early, such as at their time limit, are started again.
    resubmits = False

    @abstractmethod
    def start(self, command: Command) -> Handle:
        """Start a process."""

    def start_all(self, commands: Sequence[Command]) -> list[Handle]:
        """Start several processes."""
        return [self.start(command) for command in commands]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Connect to the engine."""
        yield
