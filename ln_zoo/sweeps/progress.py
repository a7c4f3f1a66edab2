"""Progress of a sweep, and its lines in a log."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.state import BEGUN, FAILED, FINISHED, PRUNED, WAITING, State

#: Seconds between two lines of progress, without a terminal.
_LINE_EVERY = 60.0


@dataclass
class Progress:
    """Progress of a sweep."""

    runs: Sequence[Run]  # all runs of the grid
    states: dict[str, State]  # by name, of runs that are not running
    shares: dict[str, float] = field(default_factory=dict)  # finished share of running runs
    share: float = 0.0  # of all runs
    left: float | None = None  # remaining seconds; None if unknown


class Watcher:
    """Follows a sweep; this one prints a line for each run, and every minute."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def began(self, run: Run, progress: Progress) -> None:
        """Called when a run begins or resumes."""
        share = progress.shares.get(run.name, 0)
        done = sum(state.kind == FINISHED for state in progress.states.values())
        how = f"resumed at {share:.0%}" if share else "begun"
        print(f"[{done}/{len(progress.runs)} finished] {run.name}: {how}", flush=True)

    def ended(self, run: Run, state: State, seconds: float, progress: Progress) -> None:
        """Called when a run has ended, here or elsewhere."""
        done = sum(s.kind in (FINISHED, FAILED, PRUNED) for s in progress.states.values())
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

    def closed(self, progress: Progress) -> None:
        """Called at the end of the sweep, also after a signal."""

    def stopping(self, runs: int) -> None:
        """Called on the first signal."""
        print(
            f"stopping: {runs} runs write their checkpoints (interrupt again to stop at once)",
            flush=True,
        )


def summary(progress: Progress) -> str:
    """One line: runs that have finished, and the time left."""
    left = f"{duration(progress.left)} left" if progress.left else "time left: not known yet"
    done = sum(state.kind == FINISHED for state in progress.states.values())
    text = f"{done} of {len(progress.runs)} runs finished"
    return text if done == len(progress.runs) else f"{text}, {left}"


def label_rows(progress: Progress) -> list[list[str]]:
    """Cells for each label: finished, running, waiting and failed runs, and mean scores."""
    labels: dict[str, list[Run]] = {}
    for run in progress.runs:
        labels.setdefault(run.label, []).append(run)
    rows = []
    for label, runs in labels.items():
        states = [progress.states[run.name] for run in runs if run.name in progress.states]
        finished = [state for state in states if state.kind == FINISHED]
        running = [
            f"seed {run.seed}: {progress.shares.get(run.name, 0):.0%}"
            for run in runs
            if run.name not in progress.states
        ]
        waiting = sum(state.kind in (BEGUN, WAITING) for state in states)
        failed = sum(state.kind == FAILED for state in states)
        cells = [str(len(finished)), ", ".join(running), str(waiting or ""), str(failed or "")]
        rows.append([label, *cells, _measured(finished)])
    return rows


def _measured(finished: list[State]) -> str:
    if not finished:
        return ""
    from ln_zoo.zoo.reported import metric_unit

    parts = []
    for name in finished[0].metrics:
        unit = metric_unit(name)
        values = [s.metrics[name] * unit.scale for s in finished if name in s.metrics]
        parts.append(f"{name} {statistics.fmean(values):.4g} {unit.unit}".strip())
    return ", ".join(parts)


def outcome(state: State) -> str:
    """Formats the state of a run that has ended."""
    if state.kind == FINISHED:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in state.metrics.items())
        return f"finished ({shown})"
    if state.kind == FAILED:
        return f"FAILED: {state.error}"
    return PRUNED if state.kind == PRUNED else "stopped"


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
