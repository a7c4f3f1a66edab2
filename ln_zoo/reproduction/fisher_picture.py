"""The picture of `ln_zoo.reproduction.fisher_claims`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ln_zoo.plots.figures import new_figure, save_figure
from ln_zoo.reproduction.fisher_claims import FisherPanel, FisherStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_fisher(study: FisherStudy, picture: Path, title: str = "") -> None:
    """Draw four panels: eigenvalues of F, remainder of KL, sampling error, eq. 13 as printed."""
    figure = new_figure(10, 7, title)
    for panel, axis in zip(study.panels, figure.subplots(2, 2).flat, strict=True):
        for number, (name, values) in enumerate(panel.lines.items()):
            style = "o-" if panel.power else "x" if "printed" in name else "o"
            places = panel.x[: len(values)]  # without a norm there are fewer parameters
            axis.plot(places, values, style, color=f"C{number}", label=name, markersize=4)
        if panel.power:
            _plot_power(axis, panel)
            axis.set_xscale("log")
            if len(panel.x) <= 3:
                axis.set_xticks(panel.x, [f"{place:,g}" for place in panel.x])
                axis.set_xticks([], minor=True)
        axis.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label, yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    save_figure(figure, picture, dpi=90)


def _plot_power(axis: Axes, panel: FisherPanel) -> None:
    """Draw the panel's power of x as a dashed line just above the others."""
    assert panel.power is not None
    greatest = max(
        value / place**panel.power
        for values in panel.lines.values()
        for place, value in zip(panel.x, values, strict=True)
    )
    guide = [1.3 * greatest * place**panel.power for place in panel.x]
    axis.plot(panel.x, guide, "--", color="grey", label=f"x^{panel.power:g}", linewidth=1)
