"""A live table of a running sweep."""

from __future__ import annotations

import statistics

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.processes import Progress, Watcher, duration, outcome
from ln_zoo.sweeps.state import FAILED, FINISHED, State
from ln_zoo.zoo.reported import metric_unit


class LiveTable(Watcher):
    """A row for each label: finished, running, waiting and failed runs, and scores."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.live = Live(console=console, refresh_per_second=2)

    def __enter__(self) -> LiveTable:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def began(self, run: Run, progress: Progress) -> None:
        self.live.update(progress_table(progress))

    def ended(self, run: Run, state: State, seconds: float, progress: Progress) -> None:
        if state.kind == FAILED:
            self.console.print(Text(f"{run.name}: {outcome(state)}", style="red"))

    def checked(self, progress: Progress) -> None:
        self.live.update(progress_table(progress))

    def stopping(self, runs: int) -> None:
        self.console.print(
            f"stopping: {runs} runs write their checkpoints (press Ctrl-C again to stop at once)"
        )


def progress_table(progress: Progress) -> Table:
    """The table of a sweep."""
    left = f"{duration(progress.left)} left" if progress.left else "time left: not known yet"
    done = sum(s.kind == FINISHED for s in progress.states.values())
    table = Table(
        title=f"{done} of {len(progress.runs)} runs finished, {left}", title_justify="left"
    )
    for head in ("", "finished", "running", "waiting", "failed", "test"):
        table.add_column(head)
    labels: dict[str, list[Run]] = {}
    for run in progress.runs:
        labels.setdefault(run.label, []).append(run)
    for label, runs in labels.items():
        states = [progress.states[run.name] for run in runs if run.name in progress.states]
        finished = [state for state in states if state.kind == FINISHED]
        failed = sum(state.kind == FAILED for state in states)
        running = [
            f"seed {run.seed}: {progress.shares.get(run.name, 0):.0%}"
            for run in runs
            if run.name not in progress.states
        ]
        cells = [
            label,
            str(len(finished)),
            ", ".join(running),
            str(len(states) - len(finished) - failed or ""),
            str(failed or ""),
            _measured(finished),
        ]
        # As Text: square brackets of values would be read as markup.
        table.add_row(*map(Text, cells))
    return table


def _measured(finished: list[State]) -> str:
    if not finished:
        return ""
    parts = []
    for name in finished[0].metrics:
        unit = metric_unit(name)
        values = [s.metrics[name] * unit.scale for s in finished if name in s.metrics]
        parts.append(f"{name} {statistics.fmean(values):.4g} {unit.unit}".strip())
    return ", ".join(parts)
