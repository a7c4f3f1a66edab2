"""Scales of axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def set_log_scale(axis: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers (6, not 6×10⁰) unless it is long."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            # It decides which ticks have room for a label.
            return f"{value:g}" if super().__call__(value, position) else ""

    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(Plain(minor_thresholds=(1.0, 0.8)))
    low, high = axis.get_ylim()
    if low > 1e-3 and high < 1e4:
        axis.yaxis.set_major_formatter(Plain())
