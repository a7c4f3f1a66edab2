"""Pictures of tests, which nobody looks at."""

from __future__ import annotations

from matplotlib.axis import Axis, Tick
from matplotlib.figure import Figure


def leave_out_layout() -> None:
    """Draws from now on without matplotlib's search for margins, half of the time of a picture."""

    def get_layout_engine(self: Figure) -> None:
        """Everything stays where it is, and is not drawn once more to see how large it is."""

    Figure.get_layout_engine = get_layout_engine


def leave_out_ticks() -> None:
    """Draws from now on without the numbers of axes, most of what is left."""

    def _update_ticks(self: Axis) -> list[Tick]:
        return []

    Axis._update_ticks = _update_ticks
