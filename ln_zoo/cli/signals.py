"""Ctrl-C and SIGTERM: how to resume, in one line, and the exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from ln_zoo.callbacks.last_checkpoint import Interrupted
from ln_zoo.utils.files import relative
from ln_zoo.utils.signals import signal_handler


def raised() -> AbstractContextManager[None]:
    """Raise `Interrupted` on a signal; `LastCheckpoint` defers it to the end of an update."""
    return signal_handler(_raise)


def prepare(trainer: Trainer) -> None:
    """Replaces the trainer's handlers of SIGTERM and, under SLURM, of SIGUSR1.

    Lightning's wait for the other processes, so a signal to one process blocks all of them. SLURM's
    also saves, in the middle of an update.
    """
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = _raise
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment):
        environment.auto_requeue = False


def end_others(trainer: Trainer) -> None:
    """Send SIGTERM to the processes that this one started."""
    for process in getattr(trainer.strategy.launcher, "procs", ()):
        with contextlib.suppress(OSError):
            process.send_signal(signal.SIGTERM)


def report_stop(command: str, end: Interrupted) -> int:
    """Prints how to resume, and returns the exit code.

    If all processes stop together, only the first one fails: an error of another would make
    Lightning kill it.
    """
    if end.on_all_processes and _rank():
        return 0
    name = signal.Signals(end.number).name
    process = f" (process {_rank()})" if _rank() else ""
    how = ""
    if end.checkpoint:
        path = relative(os.path.abspath(end.checkpoint))
        how = f": resume with the same command and --ckpt_path {path}"
    elif command == "fit":
        how = ": no checkpoint was written"
    print(f"ln-zoo {command}: stopped by {name}{process}{how}", file=sys.stderr)
    return 128 + end.number


def lost_process(error: Exception) -> ConnectionError | None:
    """A readable error if a peer process was lost, else None."""
    # Gloo raises plain RuntimeErrors.
    words = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
    plain = type(error) is RuntimeError and any(word in str(error) for word in words)
    if plain or isinstance(error, torch.distributed.DistError):
        return ConnectionError("another process of this run has ended")
    return None


def _rank() -> int:
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)
