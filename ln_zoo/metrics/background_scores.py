"""Scores of sentence vectors, computed in other processes while this one trains."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from ln_zoo.metrics.sentence_tasks import KnownVectors, ProtocolName, evaluate

#: Python without the current folder first in its path (-P).
_COMMAND = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]


class BackgroundScores:
    """Evaluates tasks in other processes, a task each, at most ``processes`` at a time.

    They have one thread and low priority, and do not receive the terminal's signals.
    """

    def __init__(self, processes: int) -> None:
        # Each thread waits for a process.
        self._threads = ThreadPoolExecutor(processes)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def submit(
        self, vectors: KnownVectors, task: Any, protocol: ProtocolName
    ) -> Future[dict[str, float]]:
        """`ln_zoo.metrics.sentence_tasks.evaluate` in another process; RuntimeError if it fails."""
        return self._threads.submit(self._evaluate, vectors, task, protocol)

    def close(self) -> None:
        """Kills the processes; unfinished scores are lost."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()

    def _evaluate(
        self, vectors: KnownVectors, task: Any, protocol: ProtocolName
    ) -> dict[str, float]:
        work = pickle.dumps((vectors, _plain(task), protocol), pickle.HIGHEST_PROTOCOL)
        process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._running.add(process)
        if self._closed:
            process.kill()
        out, errors = process.communicate(work)
        self._running.remove(process)
        if process.returncode:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RuntimeError(
                f"the evaluation of {task.name} failed: {reason or f'code {process.returncode}'}"
            )
        scores: dict[str, float] = json.loads(out.splitlines()[-1])
        return scores


def _plain(value: Any) -> Any:
    """Dataclasses as namespaces, whose class needs no import in the other process."""
    if not is_dataclass(value):
        return value
    return SimpleNamespace(**{f.name: _plain(getattr(value, f.name)) for f in fields(value)})


def main() -> None:
    """Evaluate the task on standard input, and print its scores."""
    if hasattr(os, "nice"):
        os.nice(10)
    vectors, task, protocol = pickle.load(sys.stdin.buffer)
    print(json.dumps(evaluate(vectors, task, protocol)))
