"""How far gradients reach back in time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ln_zoo.analysis import GradientFlow


def plot_gradient_flow(
    flows: Sequence[GradientFlow], picture: Path, title: str = "", floor: float = 1e-30
) -> None:
    """Draws gradient norms against the time step: a panel for each norm, a line for each gain.

    Norms without a gain are drawn, dashed, in all panels.

    Args:
        flows: of one length T.
        picture: the file to write, .png or .svg.
        title: of the picture.
        floor: the axis ends here, where any smaller norm is left out.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot: nothing global, no display

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
    figure = Figure(figsize=(5.4 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        for gain, flow in panel.items():
            label = f"gain {gain:g}"
            axis.plot(steps, flow.norms, label=label, color=colours[gain], linewidth=1.1)
        for number, flow in enumerate(shared):
            colour = "black" if number == 0 else f"C{number}"
            axis.plot(steps, flow.norms, "--", label=flow.label, color=colour, linewidth=1.1)
        axis.set_yscale("log")
        axis.set_title(name)
        axis.set_xlabel("time step t")
        axis.grid(alpha=0.3)
    finite = torch.cat([flow.norms[flow.norms.isfinite()] for flow in flows])
    least = float(finite[finite > 0].min()) if bool((finite > 0).any()) else floor
    axes[0].set_ylim(bottom=max(floor, least / 2))
    axes[0].set_ylabel("norm of the gradient by h_t")
    # One for all panels, beside them: curves go through every corner.
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    if title:
        figure.suptitle(title)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
