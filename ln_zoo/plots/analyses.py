"""Pictures of the measurements of `ln_zoo.analysis`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ln_zoo.analysis import Dynamics, EpsEffect, GradientFlow, eps_deviation
from ln_zoo.plots.figures import new_figure, save_figure

_LINES = ("-", "--", ":", "-.")


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


def plot_dynamics(found: Sequence[Dynamics], picture: Path, title: str = "") -> None:
    """Draw two panels per group: sizes of perturbations and norms of gradients, by time step."""
    from matplotlib.ticker import MaxNLocator

    groups: dict[str, list[Dynamics]] = {}
    for each in found:
        groups.setdefault(each.group, []).append(each)
    colours = list(dict.fromkeys(each.name.partition(" ")[0] for each in found))
    kinds = list(dict.fromkeys(each.name.partition(" ")[2] for each in found))
    figure = new_figure(11, 1 + 3 * len(groups), title)
    axes = figure.subplots(len(groups), 2, squeeze=False)
    for (perturbed, gradients), (group, members) in zip(axes, groups.items(), strict=True):
        for each in members:
            first, _, rest = each.name.partition(" ")
            style: dict[str, Any] = {
                "color": f"C{colours.index(first) % 10}",
                "linestyle": _LINES[kinds.index(rest) % len(_LINES)],
                "linewidth": 1.2,
            }
            steps = range(1, len(each.growth) + 1)
            perturbed.plot(steps, each.sizes / math.log(10), label=each.name, **style)
            gradients.plot(steps, each.gradients.log10(), **style)
        for axis, what in ((perturbed, "size of a perturbation"), (gradients, "gradient by h_t")):
            axis.set(title=group, xlabel="time step t", ylabel=f"log10 of the {what}")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
    shown: dict[str, Any] = {}
    for perturbed, _ in axes:
        lines, names = perturbed.get_legend_handles_labels()
        shown |= dict(zip(names, lines, strict=True))
    figure.legend(list(shown.values()), list(shown), fontsize="small", loc="outside right upper")
    save_figure(figure, picture, dpi=90)


def plot_eps_effect(effects: Sequence[EpsEffect], picture: Path, title: str = "") -> None:
    """Draw measured deviations (marks) and their formula (line), a panel per factor.

    The dotted line is the first term of the formula, for a variance much greater than eps.
    """
    factors = sorted({effect.factor for effect in effects})
    figure = new_figure(5.0 * len(factors), 4.2, title)
    axes = figure.subplots(1, len(factors), squeeze=False, sharey=True)[0]
    for axis, factor in zip(axes, factors, strict=True):
        shown = [effect for effect in effects if effect.factor == factor]
        ends = torch.stack([effect.ratios.log10() for effect in shown])
        ratios = torch.logspace(float(ends.min()), float(ends.max()), 200, dtype=torch.float64)
        exact = eps_deviation(ratios, 1.0, factor).abs()
        limit = abs(1 - factor**-2) / (2 * ratios)
        axis.plot(ratios, exact, color="black", linewidth=1, label="formula")
        axis.plot(ratios, limit, ":", color="black", linewidth=1, label="its first term")
        # Coinciding marks have different sizes.
        for number, (effect, mark) in enumerate(zip(shown, itertools.cycle("osD^v"))):
            size = 9.5 - 3 * number if number < 3 else 3
            style = {"fillstyle": "none", "markersize": size, "markeredgewidth": 1.1}
            axis.plot(effect.ratios, effect.measured, mark, label=effect.norm, **style)
        axis.set(title=f"weights times {factor:g}", xscale="log", yscale="log")
        axis.set_xlabel("variance of the pre-activations / eps")
        axis.grid(alpha=0.3)
    # The dotted lines extend far beyond the marks.
    marks = torch.cat([effect.measured for effect in effects])
    axes[0].set_ylim(float(marks[marks > 0].min()) / 3, 10 * float(marks.max()))
    axes[0].set_ylabel("relative change of the normalised pre-activations")
    axes[-1].legend(fontsize="small")
    save_figure(figure, picture, dpi=120)
