"""Growth of perturbations of hidden states, and norms of gradients, by time step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ln_zoo.analysis import Dynamics
from ln_zoo.plots.figures import new_figure, save_figure

_LINES = ("-", "--", ":", "-.")


def plot_dynamics(found: Sequence[Dynamics], picture: Path, title: str = "") -> None:
    """Draw two panels per group: sizes of perturbations and norms of gradients, by time step."""
    from matplotlib.ticker import MaxNLocator

    if not found:
        raise ValueError("found is empty: give at least one measurement")
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
