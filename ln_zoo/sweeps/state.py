"""Files in the folder of a run, and the state of the run."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_zoo.utils.files import atomic_write_text

#: Files of the sweep in the folder of a run.
LOG = "log.txt"
FAILURE = "failure.json"
_PRUNED = "pruned.json"
#: Earlier versions left an empty file ``.lock`` behind.
LOCK = ".owner"
#: Folder of the log of ``--test best``; a user's own ``ln-zoo test`` writes to ``test``.
TEST_FOLDER = "sweep_test"

#: Exit code of a run that another process trains (EX_TEMPFAIL).
BUSY = 75
#: States of a run.
FINISHED, FAILED, PRUNED, BEGUN, WAITING = "finished", "failed", "pruned", "begun", "waiting"
#: States of runs that are not trained any further.
DONE = (FINISHED, PRUNED)


@dataclass(frozen=True)
class State:
    """The state of a run."""

    kind: str  # finished (tested), failed, pruned, begun (can be resumed) or waiting
    results: dict[str, Any] | None = None  # of a finished run's test
    error: str = ""  # of a failed run

    @property
    def metrics(self) -> dict[str, float]:
        """Test metrics, as logged."""
        return dict(self.results["metrics"]) if self.results else {}


@dataclass(frozen=True)
class Length:
    """How long a run trains; None if unbounded."""

    epochs: int | None
    updates: int | None


def state_of(folder: Path) -> State:
    """The state of a run, from the files in its folder."""
    for path in (folder / "test_results.json", folder / TEST_FOLDER / "test_results.json"):
        results = _read(path)
        if results is not None and isinstance(results.get("metrics"), dict):
            # A truncated file would not parse.
            values = results["metrics"].items()
            bad = [k for k, v in values if not (isinstance(v, int | float) and math.isfinite(v))]
            if bad:
                return State(FAILED, error=f"{', '.join(bad)} of the test is not finite")
            return State(FINISHED, results)
    if _read(folder / _PRUNED) is not None:
        return State(PRUNED)
    failure = _read(folder / FAILURE)
    if failure is not None:
        return State(FAILED, error=str(failure.get("error", "")))
    return State(BEGUN if checkpoint_of(folder) or metrics_of(folder) else WAITING)


def checkpoint_of(folder: Path) -> Path | None:
    """The checkpoint to resume from."""
    path = folder / "checkpoints" / "last.ckpt"
    return path if path.is_file() else None


def metrics_of(folder: Path) -> Path | None:
    """The table of a run's curves."""
    path = folder / "metrics.csv"
    return path if path.is_file() else None


def write_failure(folder: Path, error: str) -> None:
    """Writes the error of a failed run; no-op on a full disk."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / FAILURE, json.dumps({"error": error}) + "\n")


def write_pruned(folder: Path, metric: str, value: float, epoch: int) -> None:
    """Mark a run as pruned by a search."""
    content = {"metric": metric, "value": value, "epoch": epoch}
    atomic_write_text(folder / _PRUNED, json.dumps(content) + "\n")


def progress_of(folder: Path) -> tuple[int, int]:
    """Finished epochs and updates, from the last logged row."""
    path = folder / "metrics.csv"
    try:
        with path.open("rb") as file:
            names = next(csv.reader([file.readline().decode()]), [])
        for line in reversed(_last_lines(path)):
            cells = next(csv.reader([line]), [])
            if len(cells) == len(names):
                row = dict(zip(names, cells, strict=True))
                return int(row["epoch"]), int(row["step"])
    except (OSError, KeyError, ValueError):
        pass  # the file is missing, or is being written
    return 0, 0


def last_error_line(folder: Path) -> str:
    """The last error in a run's log, or its last line."""
    try:
        lines = _last_lines(folder / LOG)
    except OSError:
        return ""
    errors = [line for line in lines if "error" in line.lower()]
    return next((line.strip() for line in reversed(errors or lines) if line.strip()), "")


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 8192))
        return file.read().decode(errors="replace").splitlines()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
