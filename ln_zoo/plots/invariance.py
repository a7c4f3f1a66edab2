"""Effect of eps on invariances."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from ln_zoo.analysis import EpsEffect, eps_deviation
from ln_zoo.plots.figures import new_figure, save_figure


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
