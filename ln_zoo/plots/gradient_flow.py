"""Norms of gradients by time step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ln_zoo.analysis import GradientFlow
from ln_zoo.plots.figures import new_figure, save_figure


def plot_gradient_flow(
    flows: Sequence[GradientFlow], picture: Path, title: str = "", floor: float = 1e-30
) -> None:
    """Draw gradient norms by time step, of one length T: a panel per norm, a line per gain.

    Norms without a gain are dashed in all panels. ``floor`` is the lower limit of the axis.
    """
    from matplotlib import colormaps

    panels: dict[str, dict[float, GradientFlow]] = {}
    for flow in flows:
        if flow.gain is not None:
            panels.setdefault(flow.norm, {})[flow.gain] = flow
    panels = panels or {"": {}}
    shared = [flow for flow in flows if flow.gain is None]
    gains = sorted({gain for panel in panels.values() for gain in panel})
    ramp = colormaps["viridis"]
    colours = {gain: ramp(0.95 * i / max(1, len(gains) - 1)) for i, gain in enumerate(gains)}
    steps = range(1, len(flows[0].norms) + 1)
    figure = new_figure(5.4 * len(panels), 4.2, title)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        for gain, flow in panel.items():
            label = f"gain {gain:g}"
            axis.plot(steps, flow.norms, label=label, color=colours[gain], linewidth=1.1)
        for number, flow in enumerate(shared):
            colour = "black" if number == 0 else f"C{number}"
            axis.plot(steps, flow.norms, "--", label=flow.label, color=colour, linewidth=1.1)
        axis.set(title=name, xlabel="time step t", yscale="log")
        axis.grid(alpha=0.3)
    finite = torch.cat([flow.norms[flow.norms.isfinite()] for flow in flows])
    least = float(finite[finite > 0].min()) if bool((finite > 0).any()) else floor
    axes[0].set_ylim(bottom=max(floor, least / 2))
    axes[0].set_ylabel("norm of the gradient by h_t")
    # One legend beside the panels: curves pass through every corner.
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    save_figure(figure, picture, dpi=120)
