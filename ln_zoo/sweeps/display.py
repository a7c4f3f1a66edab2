"""A live table of a running sweep."""

from __future__ import annotations

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ln_zoo.sweeps.grid import Run
from ln_zoo.sweeps.progress import Progress, Watcher, label_rows, outcome, summary
from ln_zoo.sweeps.state import FAILED, State


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
    table = Table(title=summary(progress), title_justify="left")
    for head in ("", "finished", "running", "waiting", "failed", "test"):
        table.add_column(head)
    for row in label_rows(progress):
        # As Text: square brackets of values would be read as markup.
        table.add_row(*map(Text, row))
    return table
