"""Scales of axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def set_log_scale(axis: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers (6, not 6×10⁰) between powers of ten."""
    from matplotlib.ticker import LogFormatter

    axis.set_yscale("log")
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.0, 0.8)))
    if max(axis.get_ylim()) < 1e4 and min(axis.get_ylim()) > 1e-3:
        axis.yaxis.set_major_formatter(LogFormatter())
